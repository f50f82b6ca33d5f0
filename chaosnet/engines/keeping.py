"""Members that keep parts of the training state: who keeps what, and what is sent before a step.

    begin     who keeps each group after this step; those who had it before send it to who lacks it
    await_    what comes is put in its place, at the latest when the layers that use it are computed
    committed from now on that is so: the rest is let go of

Until something is trained, layers that functions build are not sent: whoever needs one makes it (made_layers.py).

What is agreed is the same on all members that have completed the same steps (scheduler/elastic/keeping.py decides).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from ..data.evaluation import Evaluation
from ..node.mailbox import Mailbox, TensorName
from ..node.state.plain import decode, encode
from ..node.state.state_window import arithmetic_of
from ..node.state.training_state import TrainingState
from ..node.sums.layer_sums import LayerSums
from ..protocols.data_cursor import joined
from ..protocols.errors import ConfigError, ReplicasDiffer
from ..protocols.messages import Contribution, Tensor, View, ViewKey
from ..scheduler.elastic.keeping import (
    Move,
    PartsKept,
    Rate,
    Table,
    choose_keepers,
    lost_groups,
    moves,
    who_computes,
)
from ..scheduler.elastic.running import Running
from ..script.means import WHOLE
from ..training.checkpointing import Checkpointing
from . import tensor_bytes
from .layer_builds import LayerBuilds
from .made_layers import MadeLayers
from .state_parts import StateParts


class Keeping:
    """Which groups of parameters node `me` keeps, and what it sends and gets before a step.

    Args:
        users: By group, the layers that use it.
        copies: How many members keep each group.
        evaluation: The evaluations of the script, for which all members get the whole model.
        send: Sends a tensor to its target.
        made: Layers that any member can make by itself.
    Attributes:
        table: The members that keep each group. Agreed.
        whole: Members that have the parameters of all layers, as of the last update. Agreed.
        wants_whole: Does this member want the whole model?
    """

    def __init__(
        self,
        me: str,
        parts: StateParts,
        users: Sequence[Collection[int]],
        copies: int,
        evaluation: Evaluation,
        send: Callable[[Tensor, Any], None],
        made: MadeLayers,
    ) -> None:
        self.me, self.parts, self._users, self.copies, self._send = me, parts, users, copies, send
        self._evaluation, self.made = evaluation, made
        self.table: Table = ((me,),) * len(users)
        self.whole: frozenset[str] = frozenset()
        self.wants_whole = False
        self._leaving: frozenset[str] = frozenset()  # Members that leave. Agreed, as is the next.
        self._asked = False  # Has a member asked for the whole model?
        # The table after the attempt under way. The next are of that attempt, too.
        self.after: Table = self.table
        self._computes: frozenset[int] = frozenset()  # Groups that this member computes with.
        self._due: dict[int, bool] = {}  # Groups that others send here: with the optimizer's state, too?
        self._came: dict[int, int] = {}  # Of these, how many of their slots are here.
        self._to_make: dict[int, bool] = {}  # Groups to be made here: is this member to keep them?
        self._mailbox: Mailbox | None = None

    @property
    def gathers(self) -> bool:
        """Do all members get all parameters with the step that is due? Nothing is trained in such a step."""
        return self._asked or self._evaluation.under_way

    @property
    def has_model(self) -> bool:
        """Are the parameters of all layers here, as of the last update?"""
        return self.me in self.whole

    @property
    def absent(self) -> str:
        """The layers of which parameters are not here, and cannot be made, in words; "" if there are none."""
        lacking = [g for g in range(len(self.table)) if not self.parts.has(g) and g not in self.made.layers]
        layers = sorted({layer for group in lacking for layer in self._users[group]})
        return layers_named(layers) if layers else ""

    def lost_in(self, members: Collection[str]) -> str:
        """If none of `members` has some layers any more, a sentence that names these; else ""."""
        gone = lost_groups(self.made.present(self.table, members), members)
        layers = sorted({layer for group in gone for layer in self._users[group]})
        who = ", ".join(sorted({name for group in gone for name in self.table[group]}))
        lost, them = ("is lost", "it") if len(layers) == 1 else ("are lost", "them")
        return f"{layers_named(layers)} {lost}: all who kept {them} ({who}) are gone" if gone else ""

    # --- before a step ---

    def begin(
        self, view: View, key: ViewKey, round: int, running: Running | None, mailbox: Mailbox, rate: Rate
    ) -> None:
        """An attempt begins: work out who keeps what after it, and send what others need of this member.

        If layers are lost (`lost_in`), these are not sent, and nothing is computed in the attempt.
        """
        members = view.member_ids
        computing = None
        if running is not None:
            computing = who_computes(self._users, running.plan.placement, members)
        staying, before = self._staying(members), self.made.present(self.table, members)
        self.after = choose_keepers(self.parts.sizes, computing, before, staying, self.copies)
        if gone := lost_groups(before, members):  # Names of the table are told with what is lost.
            self.after = tuple(self.table[g] if g in gone else names for g, names in enumerate(self.after))
        lacking = {*members} - self.whole if self.gathers and not gone else set[str]()
        needing = computing or [lacking] * len(self.table)
        todo = moves(needing, before, self.after, members, rate)
        self._find_to_make(needing, running is not None)
        self._due = {each.group: each.whole for each in todo if each.target == self.me}
        self._came = dict.fromkeys(self._due, 0)
        self._computes = frozenset(g for g, names in enumerate(computing or ()) if self.me in names)
        self._mailbox = mailbox
        for each in todo:
            if self.me in dict(each.sources):
                self._tell(each, key, round)

    def _find_to_make(self, needing: Sequence[Collection[str]], trains: bool) -> None:
        """Note which groups this member has to make by itself for the attempt."""
        self._to_make = {}
        for group in self.made.layers if self.made.fresh else ():
            keeps = trains and self.me in self.after[group] and group not in self.parts.held
            if keeps or (self.me in needing[group] and not self.parts.has(group)):
                self._to_make[group] = keeps

    def keepers(self, chunks: Iterable[Collection[int]]) -> dict[int, frozenset[str]]:
        """The keepers of each chunk in the attempt under way. `chunks`: the numbers of each group's chunks."""
        return {
            chunk: frozenset(names)
            for numbers, names in zip(chunks, self.after, strict=True)
            for chunk in numbers
        }

    def facts(self, members: Sequence[str]) -> PartsKept:
        """What planners have to know of who keeps what."""
        users = tuple(tuple(sorted(layers)) for layers in self._users)
        before = self.made.present(self.table, members)
        return PartsKept(
            users,
            tuple(self.parts.sizes),
            before,
            self.copies,
            self._staying(members),
            self.parts.known_bytes(),
        )

    def _staying(self, members: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in members if name not in self._leaving) or tuple(members)

    def _tell(self, move: Move, key: ViewKey, round: int) -> None:
        """Send our share of a group, without a copy: it does not change before the step is committed."""
        slots = self.parts.slots(move.group, move.whole)
        cuts = [tensor_bytes.cut(self.parts.content(slot)) for slot in slots]
        size, at = sum(len(each) for _, data in cuts for each in data), 0
        for number, (rows, data) in enumerate(cuts):
            for part, payload in enumerate(data):
                middle, at = at + len(payload) // 2, at + len(payload)
                if move.source_of(min(middle, size - 1), max(size, 1)) != self.me:
                    continue
                message = Tensor(
                    key=key, step=round, target=move.target, way="s" if move.whole else "p",
                    micro_batch=number, layer=move.group, part=part, parts=len(data), rows=rows,
                )  # fmt: skip
                self._send(message, payload)

    def await_layer(self, layer: int) -> None:
        """Wait until all parameters of `layer` are here, as it is about to be computed. Raises: Interrupted."""
        if self._to_make:
            self._make([group for group in self._to_make if layer in self._users[group]])
        if self._due:
            self._await([group for group in self._due if layer in self._users[group]])

    def await_all(self) -> None:
        """Wait until all is here that is to come in this attempt. Raises: Interrupted."""
        self._make(list(self._to_make))
        self._await(list(self._due))

    def _make(self, groups: Iterable[int]) -> None:
        assert self._mailbox is not None
        for group in groups:
            self._mailbox.check()
            for slot, value in self.made.values(group, whole=self._to_make[group]):
                self.parts.bring(slot, value)
            if self._to_make.pop(group):
                self.parts.brought(group)

    def _await(self, groups: Iterable[int]) -> None:
        assert self._mailbox is not None
        for group in groups:
            whole = self._due[group]
            slots = self.parts.slots(group, whole)
            while (number := self._came[group]) < len(slots):
                name = TensorName("s" if whole else "p", number, group)
                with self._mailbox.taken(name) as parts:  # An interrupt may come at any moment.
                    self.parts.bring(slots[number], tensor_bytes.joined(parts))
                    self._came[group] = number + 1
            if whole:
                self.parts.brought(group)
            del self._due[group]

    # --- this member's part of a step ---

    def first_of(self) -> list[int]:
        """The groups of which this member is the first keeper: it tells the others of their sums."""
        return [group for group, names in enumerate(self.after) if names[0] == self.me]

    def contribution(self, metrics: dict[str, tuple[float, float]]) -> bytes:
        """The table after this attempt, encoded, if it is new.

        Adds to `metrics` that this member wants the whole model.
        """
        if self.wants_whole and not self.gathers:
            metrics[WHOLE] = (1.0, 0.0)
        return encode(self.after, "keepers") if self.after != self.table else b""

    # --- after a step ---

    def agree(self, total: Contribution) -> set[int]:
        """A step is complete. Returns: the groups that this member keeps from now on, and is to step.

        Raises: ReplicasDiffer if this member has worked out something else than the others.
        """
        is_member = self.me in total.shares
        if total.keepers:
            self.table = tuple(map(tuple, decode(total.keepers)))
            if is_member and self.table != self.after:
                raise ReplicasDiffer(f"{self.me} has worked out other keepers than the others: {self.after}")
        kept = {group for group, names in enumerate(self.table) if self.me in names} if is_member else set()
        lacking = kept - self.parts.held  # A step in which nothing was trained makes nothing.
        assert not lacking or (self.made.fresh and self.made.layers.keys() >= lacking), (
            f"{self.me} lacks groups {sorted(lacking)}"
        )
        return kept - lacking

    def committed(
        self, total: Contribution, kept: set[int], applied: bool, gathered: bool, stepped: Collection[int]
    ) -> None:
        """The step is complete, and this member has stepped what it keeps: let go of the rest.

        Args:
            kept: What `agree` gave.
            applied: Was the model updated?
            gathered: Have all members got the parameters of all layers for it?
            stepped: Parameters that had a gradient then, by their numbers in `parts`.
        """
        there = frozenset(total.shares)
        self.whole = frozenset() if applied else there if gathered else self.whole & there
        self._leaving = frozenset(name for name, share in total.shares.items() if not share)
        self._asked = WHOLE in total.metrics
        if applied:
            self.made.trained()
            self.parts.note_stepped(stepped)
        if self.me not in self.whole:
            anew = [group for group in self.made.layers if self.made.fresh and self.parts.has(group)]
            self.parts.keep({*kept, *anew}, self._computes)

    # --- what is agreed ---

    def to_plain(self) -> dict[str, Any]:
        """For a joiner."""
        return {
            "table": [[*names] for names in self.table],
            "whole": sorted(self.whole),
            "leaving": sorted(self._leaving),
            "asked": self._asked,
            "made": self.made.to_plain(),
            "stepped": sorted(self.parts.stepped),
        }

    def from_plain(self, plain: Mapping[str, Any]) -> None:
        """Take over what is agreed; no group is here yet. Raises: CheckpointError."""
        self.table = tuple(map(tuple, plain["table"]))
        self.whole, self._leaving = frozenset(plain["whole"]), frozenset(plain["leaving"])
        self._asked = plain["asked"]
        self.parts.start_over(plain["stepped"])
        self.made.from_plain(plain["made"])

    def begin_anew(self, members: Sequence[str]) -> None:
        """`members` found a cluster, or go back to a checkpoint: each has all groups but those made when needed."""
        self.table = self.after = (tuple(members),) * len(self.table)
        self.whole = frozenset() if self.made.fresh else frozenset(members)
        self._leaving, self._asked = frozenset(), False
        if self.me not in members:
            self.parts.keep(())

    def tensors(self) -> dict[str, str]:
        """By name of a tensor that is kept in parts, its first keeper."""
        return {name: self.table[group][0] for name, group in self.parts.owners().items()}

    @property
    def layers(self) -> str:
        """The layers of which this member keeps parameters: "0-2, 5"."""
        return self.layers_of(self.me)

    def layers_of(self, member: str) -> str:
        """As `layers`, of any member."""
        there = [group for group, names in enumerate(self.table) if member in names]
        return ranges_of(sorted({layer for group in there for layer in self._users[group]}))

    @property
    def kept(self) -> dict[str, str]:
        """By name of a member that keeps any, its layers."""
        return {name: self.layers_of(name) for name in sorted({*chain(*self.table)})}

    @property
    def fewest(self) -> int:
        """How many members keep the group that the fewest keep."""
        return min(map(len, self.table))


def ranges_of(numbers: Sequence[int]) -> str:
    """Numbers in ascending order as text: "0-2, 5"."""
    return ", ".join(str(a) if stop == a + 1 else f"{a}-{stop - 1}" for a, stop in joined(numbers))


def layers_named(numbers: Sequence[int]) -> str:
    """As `ranges_of`: "layers 0-2, 5", "layer 5"."""
    return f"{'layer' if len(numbers) == 1 else 'layers'} {ranges_of(numbers)}"


def keeping_of(
    state: TrainingState, sums: LayerSums, copies: int, evaluation: Evaluation,
    send: Callable[[Tensor, Any], None], builds: LayerBuilds, checkpointing: Checkpointing | None,
) -> Keeping:  # fmt: skip
    """The Keeping of `state`, each group at `copies` members. Raises: ConfigError if it cannot be divided."""
    if not sums.groups:
        raise ConfigError(
            "keepers: no layer has a parameter that is trained (expected one, of which parts can be kept)"
        )
    groups = [[place.parameter for place in group.places] for group in sums.groups]
    names = [layers_named(group.users) for group in sums.groups]
    parts = StateParts(state.model, groups, state.optimizer, names, arithmetic_of(state), builds.shapes)
    parts.check_optimizer()
    state.parted = parts.parameters
    users = [group.users for group in sums.groups]
    made = MadeLayers(users, parts, builds, checkpointing.opened if checkpointing is not None else None)
    keeping = Keeping(evaluation.name, parts, users, copies, evaluation, send, made)
    if checkpointing is not None:
        checkpointing.keepers, checkpointing.absent = keeping.tensors, made.positions
    return keeping
