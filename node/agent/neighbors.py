"""The connections of a node: what opens, closes, falls silent or answers again, and who is told of it.

A connection that is lost tears the step that needs it (recovery.py), is told to everybody (LinkNews), and may
prove that the process at its other end has died (protocols/deaths.py). What others tell of their links
changes who can be reached (protocols/overlay.py, missing.py).
"""

from __future__ import annotations

from ...protocols.deaths import PROOF_S
from ...protocols.effects import ClosePeer, Effect, Measured, MeasureLink
from ...protocols.events import (
    DialFailed,
    Event,
    Iperf3Done,
    Iperf3Serving,
    LinkMeasured,
    NotReached,
    PeerClosed,
    PeerOpened,
    Reached,
    Received,
    Tick,
)
from ...protocols.messages import (
    DialBack,
    Echo,
    EchoReply,
    Introduction,
    Iperf3Ready,
    KeyCommand,
    KeyringNews,
    LinkNews,
    Losses,
    Ping,
    Pong,
    Probe,
    ProbeRequest,
    ProbeResult,
    View,
)
from ...protocols.overlay import LinkState
from .joining import Joining
from .missing import Missing
from .node import Node, Phase
from .recovery import StepRecovery
from .role import Role
from .routes import Routes, all_to, ignored

OF_A_PROBE = (ProbeRequest, Probe, ProbeResult, Iperf3Ready)
OF_KEYS = (KeyringNews, KeyCommand, Introduction)


class Neighbors:
    """A node's connections, and what it tells and hears of links."""

    def __init__(
        self, node: Node, role: Role, recovery: StepRecovery, joining: Joining, missing: Missing
    ) -> None:
        self.node, self.role, self.recovery = node, role, recovery
        self.joining, self.missing = joining, missing
        self.named_at: dict[str, str] = {}  # Peer: the address that it names, or that we dialled.

    def routes(self) -> Routes:
        return Routes(
            events={
                PeerOpened: self.on_opened,
                PeerClosed: self.on_closed,
                DialFailed: self.on_dial_failed,
                Reached: self.on_reached,
                NotReached: self.on_reached,
                Iperf3Serving: self.on_probe,
                Iperf3Done: self.on_probe,
            },
            messages={
                Ping: ignored,  # Heard of already.
                Pong: ignored,
                Losses: self.on_losses,
                DialBack: self.on_dial_back,
                **all_to(self.on_probe, *OF_A_PROBE),
            },
            routed={
                LinkNews: self.on_link_news,
                Echo: self.on_echo,
                EchoReply: self.on_echo_reply,
                **all_to(self.on_keys, *OF_KEYS),
            },
            effects={MeasureLink: self.on_measure_link, Measured: self.on_measured},
        )

    # --- connections ---

    def heard(self, event: Received, now_s: float) -> list[Effect]:
        """Whatever the message is, the link that it came over works."""
        self.node.relay.heard(event.peer)
        return self.node.liveness.received(event.peer, event.message, now_s)

    def tick(self, now_s: float) -> list[Effect]:
        node = self.node
        lost, silent, effects = node.liveness.tick(now_s)
        for peer in silent:
            node.relay.doubt(peer)
            effects += node.relay.around(peer, Echo(node=node.me, asked_s=now_s))
        for peer in lost:
            effects += [ClosePeer(peer, "nothing was heard from you")]
            effects += self._lose(peer, now_s, broke=False)
        effects += node.deaths.look_again(now_s)
        for peer in node.deaths.overdue(now_s):
            effects += self.tell(peer, LinkState.SILENT)
        effects += node.prober.handle(Tick(), now_s)
        if node.sync.view is not None:
            effects += node.lost_links.tick(node.sync.view, now_s)
        return effects + node.opener.tick(now_s)

    def on_opened(self, event: PeerOpened, now_s: float) -> list[Effect]:
        """A connection to a peer can be used."""
        node, peer = self.node, event.peer
        node.relay.opened(peer, event.client)
        node.liveness.opened(peer, now_s)
        node.deaths.opened(peer)
        if event.address and not event.client:
            self.named_at[peer] = event.address
        effects = self.joining.hear(event, now_s)
        if node.phase is Phase.MEMBER and node.sync.feeds(peer):  # It cannot know what was for it before.
            effects += self.recovery.tear(f"the link {node.me} - {peer} was late", now_s)
        if event.dialled:
            node.book.reached(peer, event.address, event.at)
            wanted = node.opener.view
            effects += [MeasureLink(peer)] if wanted and peer in wanted.neighbors(node.me) else []
        if not event.client:
            effects += node.keys.opened(peer, now_s)
            effects += self.tell(peer, LinkState.OPEN) + node.reporter.tell_losses(peer)
        return effects

    def on_closed(self, event: PeerClosed, now_s: float) -> list[Effect]:
        """No connection to that peer is left. A peer that said Bye is alive, so its connection did not break."""
        return self._lose(event.peer, now_s, broke=not event.clean)

    def _lose(self, peer: str, now_s: float, broke: bool) -> list[Effect]:
        """The link to `peer` is lost: forget it, tear the step that needs it, and see whether the peer died.

        `broke`: the connection broke; neither end had closed it.
        """
        node, view = self.node, self.node.sync.view
        if peer not in node.relay.peers:
            return []
        client = peer in node.relay.leaves
        proof_until_s, hold_until_s = self._proof_until_s(peer, now_s), node.liveness.hold_until_s(peer)
        node.relay.closed(peer)
        node.liveness.closed(peer)
        node.readings.closed(peer)
        node.dial_backs.closed(peer)
        self.named_at.pop(peer, None)
        effects = node.prober.closed(peer, now_s)
        effects += self.joining.hear(PeerClosed(peer, clean=not broke), now_s) + node.serving.drop(peer)
        if view is not None and peer in view.neighbors(node.me):
            node.lost_links.lost(peer, now_s)
        if view is not None and node.sync.depends_on(peer):
            effects += self.recovery.tear(f"lost the link {node.me} - {peer}", now_s)
        if client:
            return effects
        member = view.find(peer) if view is not None else None
        is_its_own = node.book.is_its_own(peer, member.addresses if member else ())
        effects += node.deaths.closed(peer, broke, now_s, proof_until_s, hold_until_s, is_its_own)
        return effects + ([] if peer in node.deaths.looking else self.tell(peer, LinkState.SILENT))

    def _proof_until_s(self, peer: str, now_s: float) -> float:
        """Until when a new connection that its machine refuses proves the peer dead, as its connection breaks now."""
        liveness = self.node.liveness
        lately_s = now_s + PROOF_S if liveness.spoke_lately(peer, now_s) else float("-inf")
        return max(lately_s, liveness.proof_until_s(peer)) if self._are_two(peer) else lately_s

    def _are_two(self, peer: str) -> bool:
        """Are we two the only voters of each view in which the peer may act? Then nothing shortens its patience."""
        node = self.node
        if node.phase is not Phase.MEMBER or node.sync.view is None or node.follower.flush is not None:
            return False
        voters = [each.members for each in node.sync.electorates()]
        voters += [each.voter_ids for each in node.coming]
        return all({*each} == {node.me, peer} for each in voters)

    def on_dial_failed(self, event: DialFailed, now_s: float) -> list[Effect]:
        """Nobody answered at an address."""
        self.node.opener.dial_failed(event.address, event.reason)
        return self.joining.hear(event, now_s)

    def on_reached(self, event: Reached | NotReached, now_s: float) -> list[Effect]:
        """An address was tried without opening a link: who is there, or nobody."""
        node = self.node
        effects = node.dial_backs.handle(event, node.relay.silent)
        # Who is no member does not know whether the dead one had gone on without those whom we tell.
        testifies = node.phase is Phase.MEMBER
        for peer, life in node.deaths.handle(event, now_s).items():
            died = testifies and life is not None
            effects += self.tell(peer, LinkState.CLOSED if died else LinkState.SILENT, life)
        if isinstance(event, NotReached):
            return effects
        node.book.reached(event.peer, event.address, event.at)
        view = node.sync.view
        if view is not None and node.phase is Phase.MEMBER:
            effects += node.lost_links.reached(event.peer, view)
        return effects

    def on_dial_back(self, event: Received, now_s: float) -> list[Effect]:
        """A joiner asks whether it can be dialled."""
        assert isinstance(event.message, DialBack)
        return self.node.dial_backs.asked(event.peer, event.message)

    def on_echo(self, event: Received, now_s: float) -> list[Effect]:
        """A peer hears nothing of us over our link: answer over other links."""
        assert isinstance(event.message, Echo)
        reply = EchoReply(node=self.node.me, asked_s=event.message.asked_s)
        return self.node.relay.around(event.message.node, reply)

    def on_echo_reply(self, event: Received, now_s: float) -> list[Effect]:
        """A peer that was silent has answered over other links: it lives."""
        assert isinstance(event.message, EchoReply)
        self.node.liveness.vouched(event.message.node, event.message.asked_s, now_s)
        return []

    def on_keys(self, event: Received, now_s: float) -> list[Effect]:
        """News of who may connect, or a wish to change it."""
        assert isinstance(event.message, KeyringNews | KeyCommand | Introduction)
        return self.node.keys.handle(event.message, now_s, scheduling=self.node.scheduler is not None)

    # --- rates ---

    def on_probe(self, event: Event, now_s: float) -> list[Effect]:
        return self.node.prober.handle(event, now_s)

    def on_measure_link(self, effect: MeasureLink, now_s: float) -> list[Effect]:
        return self.node.prober.want(effect.peer, now_s)

    def on_measured(self, effect: Measured, now_s: float) -> list[Effect]:
        self.node.readings.measured(effect.peer, effect.rate_bps, effect.source, now_s)
        return self.joining.hear(LinkMeasured(effect.peer, effect.rate_bps, effect.source), now_s)

    # --- news ---

    def tell(self, peer: str, state: LinkState, peer_life: int | None = None) -> list[Effect]:
        """Tell everybody the state of our link to `peer`. `peer_life`: as in LinkReporter."""
        return self.node.reporter.tell(peer, state, self.node.member_key, peer_life)

    def tell_missing(self, view: View) -> list[Effect]:
        """Tell of our links in `view` that are not open, in case the scheduler believes that they are."""
        node = self.node
        effects: list[Effect] = []
        for peer in view.neighbors(node.me):
            news = node.overlay.news.get((node.me, peer))
            if peer not in node.relay.peers and (news is None or news.state is LinkState.OPEN):
                effects += self.tell(peer, LinkState.SILENT)
        return effects

    def on_losses(self, event: Received, now_s: float) -> list[Effect]:
        """A peer tells of lost links that we may not know of."""
        assert isinstance(event.message, Losses)
        return self.node.reporter.on_losses(event.peer, event.message)

    def said_where(self, peer: str, news: LinkNews) -> list[Effect]:
        """A neighbour's own news of a link: where it is, and which life. News that is only repeated names no life."""
        node = self.node
        if not news.life or news.reporter != peer or peer in node.relay.leaves:
            return []
        node.deaths.said_where(peer, news.life)
        lives = node.overlay.saw_dying(node.me, peer, news.life)  # After all, whatever refused in its place.
        return self.tell(peer, LinkState.OPEN, news.life) if lives else []

    def on_link_news(self, event: Received, now_s: float) -> list[Effect]:
        """One end of a link tells of its state."""
        node, news = self.node, event.message
        assert isinstance(news, LinkNews)
        if node.is_ahead(news.key):
            node.overlay.note_newer_view()
        answer = node.reporter.correct(news, node.member_key, now_s)
        if answer is not None:
            return answer
        expel = self.role.expel_stranger(news.reporter, news.key) if news.key > (0, 0) else []
        if not node.overlay.heard(news) or node.sync.view is None:
            return expel
        lost = news.state != LinkState.OPEN.value and news.peer != node.me
        doubt = node.liveness.doubt(news.peer, now_s) if lost else []
        return expel + doubt + self.missing.overlay_changed(now_s)
