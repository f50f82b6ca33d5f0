"""Training in which nodes keep only parts of the state, as with PipelineTrainer(keepers=2).

Chunks but the last are groups of parameters, and who keeps each is a table that is agreed with each commit
(scheduler/elastic/keeping.py). What a node has of a group is the number of steps that went into it: it may be told,
computed with and stepped only where that is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from ..protocols import events as ev
from ..protocols.messages import Contribution, Tensor, View
from ..scheduler.elastic.keeping import Move, Table, choose_keepers, lost_groups, moves
from .nodes import SimNode
from .tensors import Attempt, Attempted, Tensors


class AllCopiesLost(Exception):
    """No member has some group any more, so the cluster cannot go on.

    `keepers`: those that had it, as far as `node` knows; `last`: by the newest commit, which `node` may not know.
    """

    def __init__(self, node: str, group: int, keepers: tuple[str, ...], last: tuple[str, ...]) -> None:
        super().__init__(f"{node}: all are gone who kept group {group}: {keepers}, and at last {last}")
        self.last = last


@dataclass(slots=True)
class _Plan:
    """A node's plan of one attempt. `due`: by group that the node waits for, the shares that have yet to come."""

    attempt: Attempt
    after: Table
    due: dict[int, set[int]]


@dataclass(frozen=True, slots=True)
class _Share:
    """A share of a group, as it is sent. `version`: how many steps went into it."""

    group: int
    number: int
    whole: bool
    version: int


def _rate(source: str, to: str) -> int:
    return 1


@dataclass(slots=True)
class KeptTensors(Tensors):
    """What all nodes of a life keep: `groups` groups of parameters, with `copies` copies of each.

    `tables`: the table of keepers, as each node knows it; `newest`: the step of the newest commit, and its table;
    `leaving`: nodes that are about to go, as each node knows; `held`: by node and group, the version that it has.
    """

    groups: int = 1
    copies: int = 2
    tables: dict[SimNode, Table] = field(default_factory=dict)
    newest: tuple[int, Table] = (0, ())
    held: dict[SimNode, dict[int, int]] = field(default_factory=dict)
    leaving: dict[SimNode, set[str]] = field(default_factory=lambda: defaultdict(set))
    plans: dict[SimNode, _Plan] = field(default_factory=dict)
    brought: dict[SimNode, dict[Attempt, list[_Share]]] = field(default_factory=dict)

    def found(self, nodes: Sequence[SimNode]) -> None:
        """A cluster begins: all of `nodes` have all of the state."""
        names = tuple(node.name for node in nodes)
        for node in nodes:
            self.tables[node] = (names,) * self.groups
            self.newest = 0, self.tables[node]
            self.held[node] = dict.fromkeys(range(self.groups), 0)

    def agreed(self, node: SimNode) -> tuple[Table, set[str]]:
        """What is agreed, as `node` knows it."""
        return self.tables[node], self.leaving[node]

    def loaded(self, node: SimNode, agreed: tuple[Table, set[str]]) -> None:
        """A joiner has what is agreed, and no group."""
        (self.tables[node], self.leaving[node]), self.held[node] = agreed, {}

    # --- a step ---

    def compute(
        self, node: SimNode, view: View, step: int, chunks: int, contribution: Contribution, took_s: float
    ) -> None:
        """See `Tensors`. First, nodes send what others need of their groups for this step."""
        attempt, members = (view.key, step), view.member_ids
        before = self.tables[node]
        if gone := lost_groups(before, members):
            raise AllCopiesLost(node.name, gone[0], before[gone[0]], self.newest[1][gone[0]])
        sizes = range(1, self.groups + 1)
        # Who computes a layer changes with each view.
        computing = [{members[(group + view.seq) % len(members)]} for group in range(self.groups)]
        staying = [name for name in members if name not in self.leaving[node]] or members
        after = choose_keepers(sizes, computing, before, staying, self.copies)
        todo = moves(computing, before, after, members, _rate)
        mine = {each.group: {*range(len(each.sources))} for each in todo if each.target == node.name}
        self.plans[node] = _Plan(attempt, after, mine)
        self._do(node, 0.0, lambda: self._begin(node, attempt, todo))
        plain = msgspec.json.encode(after) if after != before else b""
        Tensors.compute(self, node, view, step, chunks, replace(contribution, keepers=plain), took_s)
        for share in self.brought.get(node, {}).pop(attempt, []):
            self._bring(node, share)

    def _begin(self, node: SimNode, attempt: Attempt, todo: Sequence[Move]) -> None:
        if self.plans[node].attempt != attempt:
            return
        key, step = attempt
        for each in todo:
            for number in [n for n, (name, _) in enumerate(each.sources) if name == node.name]:
                version = self.held[node].get(each.group)
                assert version == step, f"{node.name} sends version {version} of {each} for step {step}"
                tensor = Tensor(
                    key=key, step=step, target=each.target, way="s" if each.whole else "p", micro_batch=0,
                    layer=each.group, part=number, parts=len(each.sources),
                )  # fmt: skip
                self.tell(node, ev.TensorMade(tensor, version))

    def handed_over(self, node: SimNode, message: Tensor, payload: object) -> None:
        """See `Tensors`."""
        if message.way == "a":
            Tensors.handed_over(self, node, message, payload)
            return
        attempt, version = (message.key, message.step), payload
        assert isinstance(version, int)
        share = _Share(message.layer, message.part, message.way == "s", version)
        plan = self.plans.get(node)
        if plan is not None and plan.attempt == attempt:
            self._bring(node, share)
            self._contribute(node, self.work[node])
        else:
            came = self.brought.setdefault(node, {})
            for each in [each for each in came if each < attempt]:
                del came[each]
            came.setdefault(attempt, []).append(share)

    def _bring(self, node: SimNode, share: _Share) -> None:
        plan, version = self.plans[node], share.version
        assert version == plan.attempt[1], f"{node.name} was brought version {version} in {plan.attempt}"
        if share.group not in plan.due:
            return  # It was here.
        plan.due[share.group].discard(share.number)
        if plan.due[share.group]:
            return
        del plan.due[share.group]
        if share.whole:
            self.held[node][share.group] = version

    def _lacks_parts(self, node: SimNode) -> bool:
        return bool(self.plans[node].due)

    def _hand_over(self, node: SimNode, work: Attempted) -> None:
        """Hand over the node's part. Its Ready follows once all is summed that it keeps."""
        key, keepers = work.attempt[0], enumerate(map(frozenset, self.plans[node].after))
        if self.work[node] is work:
            self.tell(node, ev.KeepersChosen(dict(keepers), key))
            self.tell(node, ev.Contributed(tuple(range(work.chunks)), work.contribution.weight, key))

    def summed(self, node: SimNode, attempt: Attempt) -> None:
        """All that the node keeps of an attempt is summed: it may say that it is ready."""
        work = self.work[node]
        if work.attempt == attempt:
            self._do(node, 0.001, lambda: self._ready(node, attempt))

    def _ready(self, node: SimNode, attempt: Attempt) -> None:
        work = self.work[node]
        if work.attempt == attempt:
            self.tell(node, ev.LocalReady(work.contribution, attempt[0]))

    def _check_keepers(self, node: SimNode, names: Sequence[str], shares: Mapping[str, int]) -> None:
        """Check that a commit has copies enough of a group, all of them at members."""
        enough = min(self.copies, sum(name not in self.leaving[node] for name in shares) or len(shares))
        assert {*names} <= shares.keys() and len(names) >= enough, f"{names} of {sorted(shares)} are keepers"

    def applied(self, node: SimNode, step: int, total: Contribution) -> None:
        """A step is complete at `node`: it has stepped what it keeps, and lets go of the rest."""
        before = self.tables[node]
        table: Table = msgspec.json.decode(total.keepers, type=Table) if total.keepers else before
        self.tables[node] = table
        if step >= self.newest[0]:
            self.newest = step, table
        for names in table:
            self._check_keepers(node, names, total.shares)
        self.leaving[node] = {name for name, share in total.shares.items() if not share}
        held = self.held[node]
        kept = [group for group, names in enumerate(table) if node.name in names]
        if node.name not in total.shares:
            kept = []  # It only listened.
        elif total.keepers:
            assert table == self.plans[node].after, (
                f"{node.name} worked out {self.plans[node].after}, not {table}"
            )
        for group in kept:
            assert held.get(group) == step, (
                f"{node.name} steps version {held.get(group)} of {group} in step {step}"
            )
            has_sum = group in node.results.get(step, {})
            assert has_sum or not total.weight, f"{node.name} lacks the sum of {group} in step {step}"
        self.held[node] = dict.fromkeys(kept, step + 1)
