"""Who keeps which part of the training state: a function of what all members know, as the pipelines are.

Parameters that the same layers use are a *group*. Each has a number of *keepers*: members that have its parameters
and all that the optimizer knows of them, get its summed gradient, and step. Others that compute its layers get its
parameters when a step begins. So members of several pipelines share the optimizer's work and memory (ZeRO-1;
ElasWave, Sec. 5.2), and a layer that moves has other keepers from the next step on. One keeper of each group computes
none of its layers, where there is such a member: so all who compute a stage may be lost at once (ElasWave, Sec. 5.1,
has a copy on a ring; here it is where there is least so far).

A table is agreed with each commit. Whoever keeps a group after a step gets its state before it, from those who kept
it so far, and these have it until the step is committed. So at any time all keepers in one of the two tables have it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

# By group: its keepers. The first tells the others of its summed gradient.
Table = tuple[tuple[str, ...], ...]

Rate = Callable[[str, str], int]
"""Of what goes from one member to another: the same on all members; > 0."""


@dataclass(frozen=True, slots=True)
class Move:
    """Before a step `sources` send `target` the parameters of a group, or, if `whole`, all of its training state.

    Each source sends a share, by its weight: all at once, so that what comes over several links comes sooner.
    """

    group: int
    target: str
    whole: bool
    sources: tuple[tuple[str, int], ...]

    def source_of(self, at: int, size: int) -> str:
        """Who sends what lies `at` this place of so many bytes; 0 <= at < size."""
        ends = list(accumulate(weight for _, weight in self.sources))
        place = at * ends[-1] // size
        return next(name for (name, _), end in zip(self.sources, ends, strict=True) if place < end)


@dataclass(frozen=True, slots=True)
class PartsKept:
    """A state that is kept in parts: what plans are made of.

    Attributes:
        users: By group, the layers that use it.
        sizes: By group, bytes of its parameters.
        table: Who keeps it now.
        copies: Members that are to keep each.
        staying: Members that may keep something; not empty.
        known: By group, bytes of what the optimizer knows of it; (): nothing.
    """

    users: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    table: Table
    copies: int
    staying: tuple[str, ...]
    known: tuple[int, ...] = ()

    def settled(
        self, placement: Mapping[str, range], members: Sequence[str], rate: Rate
    ) -> tuple[Table, list[Move]]:
        """Once steps were done with these layers at these members: the keepers, and what each step begins with."""
        computing, after = self._after(placement, members)
        return after, moves(computing, after, after, members, rate)

    def first(self, placement: Mapping[str, range], members: Sequence[str], rate: Rate) -> list[Move]:
        """What the first step with these layers at these members begins with. Nothing of what is lost."""
        computing, after = self._after(placement, members)
        gone = lost_groups(self.table, members)
        here = tuple(() if group in gone else names for group, names in enumerate(after))
        return moves(computing, self.table, here, members, rate)

    def _after(self, placement: Mapping[str, range], members: Sequence[str]) -> tuple[list[set[str]], Table]:
        computing = who_computes(self.users, placement, members)
        return computing, choose_keepers(self.sizes, computing, self.table, self.staying, self.copies)


def who_computes(
    users: Sequence[Collection[int]], placement: Mapping[str, range], members: Collection[str]
) -> list[set[str]]:
    """By group: the members that have one of its layers."""
    return [
        {name for name in members if any(layer in placement.get(name, ()) for layer in layers)}
        for layers in users
    ]


def choose_keepers(
    sizes: Sequence[int],
    computing: Sequence[Collection[str]] | None,
    before: Table,
    members: Sequence[str],
    copies: int,
) -> Table:
    """Who is to keep each group: `copies` of `members`, or all if they are no more.

    The first is one of those who compute it, the last one who does not. Of these one who has it already, and has no
    more than a fair share; then one who keeps least.
    Args:
        sizes: Of each group, in bytes.
        computing: By group: who computes its layers. None: nothing is computed, and only who is missing is replaced.
        before: Who kept it until now.
        members: Those who may keep something, the most senior first; not empty.
    """
    copies = min(copies, len(members))
    fair = copies * sum(sizes) / len(members) + max(sizes, default=0)
    load = dict.fromkeys(members, 0)
    chosen: list[list[str]] = [[] for _ in sizes]
    largest_first = sorted(range(len(sizes)), key=lambda group: (-sizes[group], group))

    def rank(member: str, group: int, apart: bool) -> tuple[int | bool, ...]:
        """The least is best."""
        kept, full = member in before[group], load[member] + sizes[group] > fair
        first = (not kept,) if computing is None else ((member in computing[group]) is apart, full, not kept)
        return (*first, load[member], members.index(member))

    for number in range(copies):
        apart = 0 < number == copies - 1
        for group in largest_first:
            free = (member for member in members if member not in chosen[group])
            best = min(free, key=lambda member: rank(member, group, apart))
            chosen[group].append(best)
            load[best] += sizes[group]
    return tuple(map(tuple, chosen))


def lost_groups(before: Table, members: Collection[str]) -> list[int]:
    """Those that none of `members` keeps."""
    return [group for group, keepers in enumerate(before) if not {*keepers} & {*members}]


def moves(
    needing: Sequence[Collection[str]],
    before: Table,
    after: Table,
    members: Sequence[str],
    rate: Rate,
) -> list[Move]:
    """What has to be sent before a step whose keepers are those of `after`: by all who have it, by what links carry.

    Args:
        needing: By group: who needs its parameters for the step; of one that is lost nobody gets them.
    """
    found = []
    for group, (old, new) in enumerate(zip(before, after, strict=True)):
        sources = [member for member in members if member in old]
        assert sources or not {*new} & {*members}, (
            f"group {group} is to be kept, and none of {members} has it"
        )
        first = group % max(len(sources), 1)  # What is small comes from one: not from the same one each time.
        for target in members if sources else ():
            whole = target in new
            if target not in sources and (whole or target in needing[group]):
                by = tuple((name, rate(name, target)) for name in sources[first:] + sources[:first])
                found.append(Move(group, target, whole, by))
    return found
