"""Who can still be reached: the overlay of the view, less what was lost, plus what was found.

Node failure, link failure and partition are one thing here. Ends of a link report it lost; a node is
*reachable* if a path of live links leads to it. A node that died has lost all its links, so it is not
reachable; a node that lost one link still is. Members that are not reachable are what a flush leaves out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .messages import Electorate, Link, LinkNews, View, ViewKey, link

MAX_STRANGERS = 1024  # Nodes of no view, and links of theirs, that something is remembered of.


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


def has_quorum(electorate: Electorate, alive: set[str], crashed: set[str]) -> bool:
    """May `alive` go on for the whole electorate? (DESIGN, section 6.)

    A majority may. An exact half may if it holds the most senior member, or if all others are known to
    have crashed, which a closed connection proves and silence does not. So two halves of a partition
    never both go on, and two nodes survive the crash of either.
    """
    voters = electorate.members
    missing = [voter for voter in voters if voter not in alive]
    present = len(voters) - len(missing)
    if 2 * present != len(voters):
        return 2 * present > len(voters)
    return voters[0] in alive or all(voter in crashed for voter in missing)


def lacking(electorates: list[Electorate], alive: set[str], crashed: set[str]) -> Electorate | None:
    """The first electorate without whose quorum `alive` may not go on; None if it may.

    The first is that of the present view and needs a quorum. The others are of views that some of their
    members may still act in; a view all of whose other members have crashed is nobody's any more.
    """
    present, *priors = electorates
    if not has_quorum(present, alive, crashed):
        return present
    for prior in priors:
        if not has_quorum(prior, alive, crashed) and not alive | crashed >= set(prior.members):
            return prior
    return None


class Overlay:
    """What node `me` knows of the links of its view, and of others that happen to be open.

    News of a link comes from its two ends, numbered by the reporter, and may arrive out of order. A link of
    the view lives until one end has lost it; any other connection is found when one end says so and the
    other does not deny it. A process that was started again under the id of a member is not that member: it
    lives in a later `life`, which proves that the member has died.
    """

    def __init__(self, me: str) -> None:
        self.me = me
        self.nodes: set[str] = set()  # Of the view.
        self.observers: set[str] = set()
        self.links: set[Link] = set()  # Of the view.
        self.lost: set[Link] = set()  # Of these, those that one end has lost.
        self.live: dict[str, set[str]] = {}  # Neighbours over live links: of the view and not lost, or found.
        self.news: dict[tuple[str, str], News] = {}  # (reporter, peer)
        self.closed: set[tuple[str, str]] = set()  # Of these, who saw whom die.
        self.key: ViewKey = (0, 0)
        self.left: dict[str, tuple[int, ViewKey]] = {}  # Who said farewell: the life, and its last view.
        self.life: dict[str, int] = {}  # Of each node that is, or was, in a view.
        self.latest_life: dict[str, int] = {}  # Of each node that was heard of.
        self.reborn: set[str] = set()  # Nodes of the view, or an earlier one, whose name a later process has.
        self.departed: set[str] = set()  # Nodes of earlier views.
        self.reachable: set[str] = {me}

    def enter(self, view: View) -> None:
        """Take over the links of a new view; news about them stays, for it may be newer than the view."""
        self.departed = (self.departed | self.nodes) - {*view.node_ids}
        self.nodes, self.observers, self.key = {*view.node_ids}, {*view.observer_ids}, view.key
        self.links, self.lost, self.live = {*view.links}, set(), {}
        self.life |= {member.id: member.life for member in (*view.members, *view.observers)}
        self.reborn = {node for node, life in self.life.items() if self.latest_life.get(node, 0) > life}
        for a, b in self.links | {link(*ends) for ends in self.news}:
            self._settle(a, b)
        self._explore()

    def settled(self) -> None:
        """Nobody acts in an older view any more: what is known of nodes that have gone can go."""
        back = self.reborn
        gone, self.departed = self.departed - back, self.departed & back
        if gone:
            self.news = {ends: news for ends, news in self.news.items() if not gone & {*ends}}
            self.closed &= self.news.keys()
        for node in gone:
            self.left.pop(node, None)
            self.life.pop(node, None)
            self.latest_life.pop(node, None)

    def heard(self, told: LinkNews) -> bool:
        """One end tells of a link; True if that changes what can be reached, or who is known to have died."""
        a, b = ends = (told.reporter, told.peer)
        before = self.news.get(ends)
        if before is not None and before.version >= told.version:
            return False
        crashed = self.crashed
        self.news.pop(ends, None)  # The newest come last.
        self.news[ends] = News(told.version, LinkState(told.state), told.peer_life)
        if told.state == LinkState.CLOSED.value:
            self.closed.add(ends)
        else:
            self.closed.discard(ends)
        changed = self._settle(a, b)
        explore = changed and (a in self.reachable or b in self.reachable)
        if told.life > self.latest_life.get(a, 0):
            self.latest_life[a] = told.life
            if a in self.life and told.life > self.life[a] and a not in self.reborn:
                self.reborn.add(a)
                explore = changed = True
        self._forget_strangers()
        if explore:
            self._explore()
        return changed or crashed != self.crashed

    def farewell(self, node: str, life: int, key: ViewKey) -> None:
        """A node has left for good; `key`: of the last view that it acted in."""
        self.left[node] = max((life, key), self.left.pop(node, (0, (0, 0))))
        self._forget_strangers()

    def _forget_strangers(self) -> None:
        """Who is in no view, and may never be, was heard of by others; there is no end to names."""
        most = 2 * MAX_STRANGERS
        if len(self.news) > most + 2 * len(self.links):
            odd = [ends for ends in self.news if not self.life.keys() >= {*ends}]
            for ends in odd[:-MAX_STRANGERS]:
                del self.news[ends]
            self.closed &= self.news.keys()
        for known in (self.left, self.latest_life):
            if len(known) > most + len(self.life):
                odd_names = [node for node in known if node not in self.life]
                for node in odd_names[:-MAX_STRANGERS]:
                    del known[node]

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
        """All that is known of lost links."""
        lost = sorted(ends for ends, news in self.news.items() if news.state is not LinkState.OPEN)
        return tuple(news for ends in lost if (news := self.known(*ends)))

    @property
    def crashed(self) -> set[str]:
        """Nodes that act no more, and have not gone on without us before they ended.

        They are out of reach, and were seen dying by a node in reach, or have said farewell in our view or an
        older one. That a node lives again is no proof: its earlier life may have gone on in newer views.
        """
        died = {
            peer
            for by, peer in self.closed
            if by in self.reachable and self._is_current(peer, self.news[by, peer].peer_life)
        }
        left = {
            node
            for node, (life, key) in self.left.items()
            if self._is_current(node, life) and key <= self.key
        }
        return (died | left) - self.reachable

    def live_links(self) -> set[Link]:
        """Links between nodes in reach: of the view and not lost, or found."""
        reachable = self.reachable
        return {link(a, b) for a, around in self.live.items() if a in reachable for b in around & reachable}

    def _is_current(self, node: str, life: int) -> bool:
        return life >= self.life.get(node, 0)

    def life_of(self, node: str) -> int:
        """The latest life of that name that was heard of; 0 if none."""
        left = self.left.get(node, (0, (0, 0)))[0]
        return max(left, self.life.get(node, 0), self.latest_life.get(node, 0))

    def denied(self, a: str, b: str) -> bool:
        """Does one end say that the link is lost?"""
        ours, theirs = self.news.get((a, b)), self.news.get((b, a))
        return (ours is not None and ours.state is not LinkState.OPEN) or (
            theirs is not None and theirs.state is not LinkState.OPEN
        )

    def _settle(self, a: str, b: str) -> bool:
        """After news of this link, or a new view: is it live, is it lost? True if that has changed."""
        if a not in self.nodes or b not in self.nodes:
            return False
        denied = self.denied(a, b)
        is_live = not denied and (link(a, b) in self.links or (a, b) in self.news or (b, a) in self.news)
        if denied and link(a, b) in self.links:
            self.lost.add(link(a, b))
        else:
            self.lost.discard(link(a, b))
        if is_live == (b in self.live.get(a, ())):
            return False
        for end, other in ((a, b), (b, a)):
            around = self.live.setdefault(end, set())
            around.add(other) if is_live else around.discard(other)
        return True

    def _explore(self) -> None:
        """Who is in reach. Observers are at the edge: no path leads through them."""
        found, edge = {self.me}, [self.me]
        while edge:
            around = self.live.get(edge.pop(), set()) - found - self.reborn
            found |= around
            edge.extend(around - self.observers)
        self.reachable = found
