"""What a node says of its own links: news that floods, numbered by its reporter.

News may overtake each other, get lost with a link, and outlive the process that told them, so whoever knows better
says so: two nodes whose link opens compare what they know of lost links; a node that hears an earlier life of its own
quoted says what holds now, under a later number; and who hears news that a later life has outdone tells the reporter.
"""

from __future__ import annotations

from msgspec.structs import replace

from .effects import Effect, Transmit
from .messages import EVERYONE, Farewell, LinkNews, Losses, Outlived, ViewKey
from .messages.fields import MAX_NODES
from .overlay import LinkState, News, Overlay
from .relay import ONE_LIFE, Relay

ECHO_S = 1.0  # Many may tell us the same of an earlier life of ours at once; one answer does.


class LinkReporter:
    """Tells what node `me` knows of its links.

    `life`: later than any before under its name, if its clock is right.
    """

    def __init__(self, me: str, life: int, relay: Relay, overlay: Overlay) -> None:
        self.me, self.life, self.relay, self.overlay = me, life, relay, overlay
        self.version = life
        # News of an earlier life of ours that we have just outdone: peer, version, and till when it is an echo.
        self.outdone = ("", 0, 0.0)
        self.echo_till_s = 0.0  # Of those who hear of a later life.

    def tell(self, peer: str, state: LinkState, key: ViewKey, peer_life: int | None = None) -> list[Effect]:
        """Tell everybody the state of our link to `peer`. `key`: of the view that we are a member of, or (0, 0).

        `peer_life`: which life of `peer` it is about. Default: the latest that was heard of; none, if we saw that one
        dying: whoever answers in its place has not told yet which it lives.
        """
        self.version += 1
        latest = self.overlay.lives.newest(peer)[1]
        if peer_life is None:
            peer_life = 0 if self.overlay.saw_dying(self.me, peer, latest) else latest
        news = LinkNews(
            reporter=self.me,
            peer=peer,
            version=self.version,
            state=state.value,
            key=key,
            life=self.life,
            peer_life=peer_life,
        )
        return self.relay.send(EVERYONE, news)

    def repeat(self, key: ViewKey) -> list[Effect]:
        """Tell our neighbours of our links again: one that is in a newer view by now answers so."""
        effects: list[Effect] = []
        for peer in sorted(self.relay.peers - self.relay.leaves):
            if known := self.overlay.known(self.me, peer):
                effects += self.relay.send(peer, replace(known, key=key, life=self.life))
        return effects

    def outlived(self, life: int) -> list[Effect]:
        """Our clock was set back: an earlier life has later numbers than this one. `life` exceeds them."""
        self.life = self.version = life
        self.relay.start_from(life)
        return self._tell_open((0, 0))

    def outdo(self, later: int, key: ViewKey, now_s: float) -> list[Effect]:
        """As `outlived`, but others know us by this life already: number our news beyond `later` from now on."""
        if self.version > later and now_s < self.echo_till_s:
            return []
        self.version, self.echo_till_s = max(self.version, later), now_s + ECHO_S
        return self._tell_open(key)

    def tell_outlived(self, node: str, life: int) -> list[Effect]:
        """Tell the node in `life` that a later life of its name was heard of."""
        return self.relay.send(node, Outlived(life=life, later=self.overlay.lives.greatest(node)))

    def _tell_open(self, key: ViewKey) -> list[Effect]:
        neighbors = sorted(self.relay.peers - self.relay.leaves)
        return [effect for peer in neighbors for effect in self.tell(peer, LinkState.OPEN, key)]

    def correct(self, news: LinkNews, key: ViewKey, now_s: float) -> list[Effect] | None:
        """The answer to news of an earlier life, which a later one has outdone, or has to; None for other news."""
        known = self.overlay.news.get((news.reporter, news.peer))
        if news.reporter == self.me and news.life != self.life:
            if known is None or news.version > known.version:
                return self._outdo(news, known, key, now_s)
            if news.version < known.version:  # Somebody had not heard yet.
                echo = (news.peer, news.version) == self.outdone[:2] and now_s < self.outdone[2]
                return [] if echo else self.tell(news.peer, known.state, key, known.peer_life)
        elif news.life and known is not None and known.version - news.version > ONE_LIFE:
            told = self.overlay.known(news.reporter, news.peer)
            return self.relay.send(news.reporter, told) if told else []
        return None

    def _outdo(self, past: LinkNews, mine: News | None, key: ViewKey, now_s: float) -> list[Effect]:
        """Others still quote an earlier life of ours: tell the link anew, with a number that exceeds it."""
        self.version = max(self.version, past.version)
        self.outdone = (past.peer, past.version, now_s + ECHO_S)
        is_open = past.peer in self.relay.peers
        state = mine.state if mine else LinkState.OPEN if is_open else LinkState.SILENT
        return self.tell(past.peer, state, key, mine.peer_life if mine else None)

    def tell_losses(self, peer: str) -> list[Effect]:
        """Two parts of the overlay may have met again: what one knows of lost links, the other must know, too."""
        losses, left = self.overlay.losses(), self.overlay.lives.farewells()[:MAX_NODES]
        return [Transmit(peer, Losses(news=losses, left=left))] if losses or left else []

    def on_losses(self, peer: str, losses: Losses) -> list[Effect]:
        """Pass on what is news to our part; answer with what has been overtaken."""
        effects: list[Effect] = []
        newer: list[LinkNews] = []
        for news in losses.news:
            known = self.overlay.known(news.reporter, news.peer)
            if known is None or known.version < news.version:
                effects += self.relay.send(EVERYONE, news)
            elif known.version > news.version:
                newer.append(known)
        for node, life, key, error in losses.left:
            if self.overlay.lives.is_news(node, life, key, error):
                told = Farewell(node=node, life=life, key=key, error=error)
                effects += self.relay.send(EVERYONE, told)
        return effects + ([Transmit(peer, Losses(news=tuple(newer)))] if newer else [])
