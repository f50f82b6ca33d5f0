"""Who can still be reached: the overlay of the view, less what was lost, plus what was found.

Node failure, link failure and partition are one thing here. Ends of a link report it lost; a node is
*reachable* if a path of live links leads to it. A node that died has lost all its links, so it is not
reachable; a node that lost one link still is. Members that are not reachable are what a flush leaves out.
"""

from __future__ import annotations

import enum
from collections.abc import Set
from dataclasses import dataclass

import msgspec

from .lives import Lives
from .messages import Electorate, Link, LinkNews, View, ViewKey, link

MAX_STRANGERS = 1024  # Nodes of no view, and links of theirs, that something is remembered of.
STRANGERS_TOLD = 64  # Lost links of such nodes that nodes tell each other when they meet: the newest.


class LinkState(enum.Enum):
    """What one end says of a link."""

    OPEN = "open"
    SILENT = "silent"  # Nothing was heard; the other end may be alive.
    CLOSED = "closed"  # The connection was closed: the process at the other end died.


@dataclass(frozen=True, slots=True)
class News:
    """The newest that one end has said of its link to the other."""

    version: int
    state: LinkState
    peer_life: int  # Which life of the other end it spoke of.


def has_quorum(electorate: Electorate, alive: Set[str], crashed: Set[str], word: bool = False) -> bool:
    """May `alive` go on for the whole electorate? (docs/design.md, "Quorums")

    A majority may. An exact half may if it holds the most senior member, or if all others are known to
    have crashed, which a closed connection proves and silence does not. So two halves of a partition
    never both go on, and two nodes survive the crash of either. With a person's `word` on some of those
    who are dead, fewer than half may, too.
    """
    voters = electorate.members
    missing = {*voters}.difference(alive)
    present = len(voters) - len(missing)
    if word and missing <= crashed:
        return present > 0
    if 2 * present != len(voters):
        return 2 * present > len(voters)
    return voters[0] in alive or missing <= crashed


def lacking(
    electorates: list[Electorate], alive: Set[str], crashed: Set[str], word: bool = False
) -> Electorate | None:
    """The first electorate without whose quorum `alive` may not go on; None if it may.

    The first is that of the present view and needs a quorum. The others are of views that some of their
    members may still act in; a view all of whose other members have crashed is nobody's any more.
    """
    present, *priors = electorates
    if not has_quorum(present, alive, crashed, word):
        return present
    for prior in priors:
        if not has_quorum(prior, alive, crashed, word) and not alive | crashed >= set(prior.members):
            return prior
    return None


class Overlay:
    """What node `me` knows of the links of its view, and of others that happen to be open.

    News of a link comes from its two ends, numbered by the reporter, and may arrive out of order. A link of
    the view lives until one end has lost it; any other connection is found when one end says so and the
    other does not deny it.
    """

    def __init__(self, me: str) -> None:
        self.me = me
        self.view = View(term=0, seq=0, scheduler="", members=())
        self.lives = Lives(self.view)
        self.news: dict[tuple[str, str], News] = {}  # (reporter, peer)
        self.told: dict[str, set[str]] = {}  # Node: the other ends of its links that there is news of.
        self.denials: set[Link] = set()  # Links that one end has lost.
        self.extra: set[Link] = set()  # Open connections that are no link of the view and that nobody denies.
        self.lost: set[Link] = set()  # Links of the view that one end has lost.
        self.found: set[Link] = set()  # Extra ones between nodes of the view.
        # Who saw whom die, and in which lives: the one that is meant, and the last.
        self.closed: dict[tuple[str, str], frozenset[int]] = {}
        self.left_behind = False  # Somebody acts in a newer view, without us.
        self.reachable: Set[str] = {me}

    @property
    def key(self) -> ViewKey:
        return self.view.key

    def enter(self, view: View) -> None:
        """Take over the links of a new view; news about them stays, for it may be newer than the view."""
        before, self.view = self.view, view
        self.left_behind = False
        self.lives.enter(view)
        for each in before.link_set ^ view.link_set:
            self._sort(each)
        self.lost = self.denials & view.link_set
        self.found = {each for each in self.extra if view.node_set.issuperset(each)}
        self._explore()

    def listens(self, view: View) -> None:
        """This node begins to listen in a view, which tells who lives in it: what we heard before may be old."""
        self.lives.listens(view)
        self.closed = {ends: lives for ends, lives in self.closed.items() if ends[1] not in view.node_set}

    def note_newer_view(self) -> None:
        """Note that somebody acts in a newer view, and need not wait for us: no death proves anything any more."""
        self.left_behind = True

    def settled(self) -> None:
        """Nobody acts in an older view any more: forget nodes that have gone."""
        for node in self.lives.settled():
            for peer in sorted(self.told.get(node, ())):
                for ends in ((node, peer), (peer, node)):
                    if ends in self.news:
                        self._forget(ends)

    def heard(self, told: LinkNews) -> bool:
        """One end tells of a link; True if that changes what can be reached, or who is known to have died."""
        a, b = ends = (told.reporter, told.peer)
        before = self.news.get(ends)
        if before is not None and before.version >= told.version:
            return False
        crashed = self.crashed
        self.news.pop(ends, None)  # The newest come last.
        self.news[ends] = News(told.version, LinkState(told.state), told.peer_life)
        self.told.setdefault(a, set()).add(b)
        self.told.setdefault(b, set()).add(a)
        self._witness(ends, told)
        changed = self._settle(link(a, b))
        if self.lives.heard(a, told.version, told.life):
            changed = True
            self._explore()
        self._forget_strangers()
        return changed or crashed != self.crashed

    def _witness(self, ends: tuple[str, str], told: LinkNews) -> None:
        """One end has seen a life die: it is dead, whoever answers instead, until that end takes it back."""
        seen = self.closed.pop(ends, frozenset[int]())
        if told.state == LinkState.CLOSED.value:
            seen = frozenset((*(seen & {self.lives.of(told.peer)}), told.peer_life))
        else:
            seen -= {told.peer_life}
        if seen:
            self.closed[ends] = seen

    def saw_dying(self, by: str, peer: str, life: int) -> bool:
        """Has `by` told that this life of `peer` has died, and not taken it back?"""
        return life in self.closed.get((by, peer), ())

    def farewell(self, node: str, life: int, key: ViewKey, error: bool = False) -> None:
        """A node has left for good.

        `key`: of the last view that it acted in; `error`: did its script end with one?
        """
        self.lives.farewell(node, life, key, error)
        self._forget_strangers()

    def missing_of(self, members: Set[str]) -> tuple[tuple[str, int], ...]:
        """Those of `members` that are out of reach and that no person has declared dead, each with its life."""
        missing = members - self.reachable - self.lives.declared_dead
        return tuple((node, self.lives.of(node)) for node in sorted(missing))

    def _forget_strangers(self) -> None:
        """Bound what is kept about nodes that are in no view, as there is no end to names."""
        most = 2 * MAX_STRANGERS
        if len(self.news) > most + 2 * len(self.view.links):
            odd = [ends for ends in self.news if not all(map(self.lives.was_in_view, ends))]
            for ends in odd[:-MAX_STRANGERS]:
                self._forget(ends)
        self.lives.forget_strangers(MAX_STRANGERS)

    def _forget(self, ends: tuple[str, str]) -> None:
        """Forget what one end said of a link."""
        a, b = ends
        del self.news[ends]
        self.closed.pop(ends, None)
        if (b, a) not in self.news:
            for end, other in (ends, (b, a)):
                self.told[end].discard(other)
                if not self.told[end]:
                    del self.told[end]
        self._sort(link(a, b))

    def known(self, reporter: str, peer: str) -> LinkNews | None:
        """The newest news of that end, as anybody may repeat it."""
        news = self.news.get((reporter, peer))
        if news is None:
            return None
        return LinkNews(
            reporter=reporter,
            peer=peer,
            version=news.version,
            state=news.state.value,
            peer_life=news.peer_life,
        )

    def losses(self) -> tuple[LinkNews, ...]:
        """All that is known of lost links, and of processes that have the name of an earlier one.

        A joiner floods what is news to it: of one that died before it was in a view, each later one would.
        """
        lost = [ends for ends, news in self.news.items() if news.state is not LinkState.OPEN]
        # In no view yet, all are strangers.
        odd = [ends for ends in lost if self.view.members and not all(map(self.lives.was_in_view, ends))]
        told = sorted({*lost}.difference(odd[:-STRANGERS_TOLD]))
        return tuple(news for ends in told if (news := self.known(*ends))) + self._rebirths()

    def _rebirths(self) -> tuple[LinkNews, ...]:
        """The newest news of each node that lives again, with its life."""
        found = []
        for node in sorted(self.lives.reborn):
            version, life = self.lives.newest(node)
            for peer in sorted(self.told.get(node, ())):
                news = self.known(node, peer)
                if news is not None and news.version == version:
                    found.append(msgspec.structs.replace(news, life=life))
        return tuple(found)

    @property
    def crashed(self) -> set[str]:
        """Nodes that act no more, and have not gone on without us before they ended.

        They are out of reach, and were seen dying by a node in reach, or have said farewell, in our view or an
        older one. That a node lives again is no proof, nor is the end of that life: its earlier one may have gone
        on in newer views. So may anybody, once one of them has. What a person declares is believed.
        """
        if self.left_behind:
            return set()
        died = {
            peer
            for (by, peer), lives in self.closed.items()
            if by in self.reachable and self.lives.of(peer) in lives
        }
        return (died | self.lives.left_by(self.key) | self.lives.declared_dead) - self.reachable

    @property
    def has_word(self) -> bool:
        """Has a person declared some of those out of reach dead?"""
        return bool(self.lives.declared_dead - self.reachable)

    def electorate(self, view: View) -> Electorate:
        """Who decides for `view`: its voters. If all of them are dead by a person's word, its other members do."""
        if not self.has_word or not self.crashed.issuperset(view.voter_ids):
            return view.electorate
        return Electorate(key=view.key, members=view.voteless_ids or view.voter_ids)

    def live_links(self) -> set[Link]:
        """Links between nodes in reach: of the view and not lost, or found."""
        return {each for each in (self.view.link_set - self.lost) | self.found if self.reachable >= {*each}}

    def depth(self) -> int:
        """How many links the farthest node in reach is away."""
        found, edge, depth = {self.me}, {self.me}, -1
        while edge:
            edge = {peer for each in edge for peer in self._around(each)} - found
            found |= edge
            depth += 1
        return depth

    def _sort(self, each: Link) -> None:
        """Put a link where it belongs, as far as that does not depend on who is in the view."""
        said = self.news.get(each), self.news.get(each[::-1])  # By one end, and by the other.
        denied = any(news is not None and news.state is not LinkState.OPEN for news in said)
        _put(each, self.denials, denied)
        extra = not denied and each not in self.view.link_set and each[1] in self.told.get(each[0], ())
        _put(each, self.extra, extra)

    def _settle(self, each: Link) -> bool:
        """Take in news of a link. Returns: has it become live, or stopped being so?"""
        was_live = self._is_live(each)
        self._sort(each)
        if not self.view.node_set.issuperset(each):
            return False
        _put(each, self.lost, each in self.denials and each in self.view.link_set)
        _put(each, self.found, each in self.extra)
        is_live = self._is_live(each)
        if is_live is was_live:
            return False
        if is_live and len(self.reachable & {*each}) == 1:
            self._explore()
        elif was_live and self.reachable >= {*each}:
            self._cut(*each)
        return True

    def _is_live(self, each: Link) -> bool:
        """Is it of the view and not lost, or found?"""
        return each in self.found or (each in self.view.link_set and each not in self.lost)

    def _around(self, node: str) -> list[str]:
        """Neighbours over live links."""
        around = [
            peer for peer in self.view.neighbors(node) if not self.lost or link(node, peer) not in self.lost
        ]
        return around + [a if b == node else b for a, b in self.found if node in (a, b)]

    def _explore(self) -> None:
        """Find out who is in reach. Observers are at the edge: no path leads through them."""
        if self.view.is_whole and not self.lost and not self.lives.reborn and self.me in self.view.node_set:
            self.reachable = self.view.node_set
        else:
            self.reachable = self._part_of(self.me)

    def _part_of(self, node: str) -> set[str]:
        found, edge = {node}, [node]
        while edge:
            around = set(self._around(edge.pop())) - found - self.lives.reborn
            found |= around
            edge.extend(around - self.view.observer_set)
        return found

    def _cut(self, a: str, b: str) -> None:
        """A link between two nodes in reach is gone. Searching from both ends shows what hung on it."""
        observers = self.view.observer_set
        if self.lives.reborn or observers & {a, b, self.me}:
            self._explore()
            return
        sides, edges = ({a}, {b}), ([a], [b])
        while edges[0] and edges[1]:
            near = 0 if len(sides[0]) <= len(sides[1]) else 1
            around = set(self._around(edges[near].pop(0))) - sides[near] - observers
            if around & sides[1 - near]:
                return  # There is another way.
            sides[near].update(around)
            edges[near].extend(sorted(around))
        part = sides[0] if not edges[0] else sides[1]
        if self.me in part:
            self._explore()
            return
        rest = self.reachable - part
        deaf = {each for each in observers & rest if not (set(self._around(each)) & rest) - observers}
        self.reachable = rest - deaf


def _put(each: Link, links: set[Link], belongs: bool) -> None:
    """Into a set of links, or out of it."""
    (links.add if belongs else links.discard)(each)
