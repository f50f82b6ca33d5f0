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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Table = tuple[
    tuple[str, ...], ...
]  # By group: its keepers. The first tells the others of its summed gradient.


@dataclass(frozen=True, slots=True)
class Move:
    """Before a step `source` sends `target` the parameters of a group, or, if `whole`, all of its training state."""

    group: int
    source: str
    target: str
    whole: bool


@dataclass(frozen=True, slots=True)
class PartsKept:
    """A state that is kept in parts: what plans are made of.

    Attributes:
        users: By group, the layers that use it.
        sizes: By group, bytes of its parameters.
        table: Who keeps it now.
        copies: Members that are to keep each.
        staying: Members that may keep something; not empty.
    """

    users: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    table: Table
    copies: int
    staying: tuple[str, ...]

    def settled(self, placement: Mapping[str, range], members: Sequence[str]) -> tuple[Table, list[Move]]:
        """Once steps were done with these layers at these members: the keepers, and what each step begins with."""
        computing = who_computes(self.users, placement, members)
        after = choose_keepers(self.sizes, computing, self.table, self.staying, self.copies)
        return after, moves(self.sizes, computing, after, after, members)


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
    sizes: Sequence[int],
    needing: Sequence[Collection[str]],
    before: Table,
    after: Table,
    members: Sequence[str],
) -> list[Move]:
    """What has to be sent before a step whose keepers are those of `after`; each by whoever has sent least so far.

    Args:
        needing: By group: who needs its parameters for the step; of one that is lost nobody gets them.
    """
    sent = dict.fromkeys(members, 0)
    found = []
    for group, (old, new) in enumerate(zip(before, after, strict=True)):
        sources = [member for member in members if member in old]
        assert sources or not {*new} & {*members}, (
            f"group {group} is to be kept, and none of {members} has it"
        )
        for target in members if sources else ():
            whole = target in new
            if target in sources or not (whole or target in needing[group]):
                continue
            source = min(sources, key=lambda member: (sent[member], members.index(member)))
            sent[source] += sizes[group] * (3 if whole else 1)  # As with Adam.
            found.append(Move(group, source, target, whole))
    return found
