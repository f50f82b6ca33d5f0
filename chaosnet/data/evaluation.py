"""An evaluation that the whole cluster shares: each sample of a data set once, and one result for all.

Its rounds are steps of the cluster without gradients. Who evaluates says so with its contribution (`evaluates`), and
is dealt batches from the next round on; what it has evaluated, and the numbers that its script has averaged, ride on
the next contribution. Samples that a node had in hand when it died or left were never counted, and are dealt again. A
node with something else to do, such as one that has just joined, takes part without samples until the evaluation is
over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..node.outcomes import StepOutcome
from ..protocols.data_cursor import DataCursor, positions
from ..protocols.errors import ConfigError
from ..protocols.messages import Contribution, Range
from ..script.means import Means

RESULTS_KEPT = 64  # By name; a script evaluates a data set or two.

Sums = dict[str, tuple[float, float]]
"""(sum of value * weight, of the weights) by name."""


class Evaluation:
    """The one that is under way in the cluster, and the part of node `name` in it.

    What is under way is the same on all members that have completed the same steps, and part of the training state.

    Attributes:
        size: Samples that this node takes at once; 0: it does not evaluate.
        mine: The samples that it is about to evaluate, or has evaluated since the last round.
        ended: How many evaluations of the cluster are over.
        results: What they came to; of each name the newest.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.size = self.length = 0
        self.mine: list[Range] = []
        self._cursor: DataCursor | None = None
        self._sums: Sums = {}
        self.ended, self.results = 0, Sums()
        # How many were over, or missed, when the script last trained or evaluated.
        self._seen: int | None = None
        # Who takes part with samples, in the order of membership.
        self._deal: tuple[tuple[str, int], ...] = ()

    @property
    def under_way(self) -> bool:
        """Does the cluster evaluate, with the step that is due?"""
        return self._cursor is not None

    @property
    def in_hand(self) -> float:
        """Samples of the batch that this node evaluates."""
        return float(sum(stop - start for start, stop in self.mine))

    # --- this node's part ---

    def enter(self, length: int, size: int) -> None:
        """The script evaluates so many samples, `size` at once."""
        self.length, self.size, self.mine = length, size, []
        self.attend()

    def leave(self) -> None:
        """The script does not evaluate any more. What it leaves early, it has not missed."""
        self.length, self.size, self.mine = 0, 0, []
        self._seen = self.ended + self.under_way

    def attend(self) -> None:
        """The script has its place among the others: it has trained with them, or evaluated."""
        self._seen = self.ended

    def missed(self) -> bool:
        """Have the others done, without this node, the evaluation that its script asks for? Each counts once."""
        if self._seen is None or self.ended <= self._seen:
            return False
        self._seen += 1
        return True

    def take(self) -> list[int]:
        """Indices of this node's samples in the round that is due."""
        assert self._cursor is not None
        self.mine = list(self._cursor.deal(self._deal).get(self.name, []))
        return list(positions(self.mine))

    def ahead(self) -> Iterator[list[int]]:
        """Indices of this node's batches from the one that is due on, if nothing happens."""
        for epoch, dealt in self._cursor.ahead(self._deal) if self._cursor is not None else ():
            if epoch:  # All have been dealt.
                return
            if mine := dealt.get(self.name):
                yield list(positions(mine))

    def contribution(self) -> dict[str, Any]:
        """What this node contributes to an evaluation: fields of `Contribution`."""
        if not self.size:
            return {}
        return {
            "evaluation": self.length,
            "evaluates": {self.name: self.size},
            "evaluated": tuple(self.mine) if self.under_way else (),
        }

    # --- the cluster's ---

    def completed(self, total: Contribution, order: Sequence[str]) -> Sums | None:
        """A step has been completed: the evaluation goes on, begins or ends.

        Args:
            order: All members.
        Returns: the sums of all, if it has ended with this step.
        Raises: ConfigError if our data set is another one.
        """
        told = self.name in total.evaluates  # Who comes back catches up with steps that it was not in.
        if told and self.length not in (0, total.evaluation):
            raise ConfigError(
                f"evaluate: this node's data set has {self.length} samples, another's {total.evaluation}"
            )
        cursor, self._deal = self._cursor, tuple((name, total.evaluates.get(name, 0)) for name in order)
        if cursor is None:
            if total.evaluates:
                self._cursor, self._sums = DataCursor(total.evaluation, 0, in_order=True), {}
            return None
        for name, (value, weight) in total.metrics.items():
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (before[0] + value, before[1] + weight)
        cursor.commit(total.evaluated)
        self.mine = []
        if total.evaluates and not cursor.epoch:
            return None
        self._cursor, sums = None, self._sums
        self.ended += 1
        older = [(name, each) for name, each in self.results.items() if name not in sums]
        self.results = dict([*older, *sums.items()][-RESULTS_KEPT:])
        return sums

    # --- replication ---

    def to_plain(self) -> dict[str, Any] | None:
        """The evaluation under way, for a joiner; None if there is none."""
        if self._cursor is None:
            return None
        return {
            "cursor": self._cursor.to_plain(),
            "sums": {name: [*sums] for name, sums in self._sums.items()},
        }

    def from_plain(self, plain: Mapping[str, Any] | None) -> None:
        """Take over the evaluation under way. Which nodes take part in it is told with the next step."""
        self._cursor, self._sums, self._deal, self.mine = None, {}, (), []
        if plain is not None:
            self._cursor = DataCursor.from_plain(plain["cursor"])
            self._sums = {str(name): (float(a), float(b)) for name, (a, b) in plain["sums"].items()}

    def past(self) -> dict[str, Any]:
        """What is over, for a joiner."""
        return {"ended": self.ended, "results": {name: [*sums] for name, sums in self.results.items()}}

    def load_past(self, plain: Mapping[str, Any] | None) -> None:
        """Take over what is over. Who comes back may have missed some of it."""
        plain = plain or {"ended": 0, "results": {}}
        self.ended = int(plain["ended"])
        self.results = {str(name): (float(a), float(b)) for name, (a, b) in plain["results"].items()}
        self._seen = self.ended if self._seen is None else min(self._seen, self.ended)


def average(evaluation: Evaluation, means: Means, outcome: StepOutcome) -> tuple[bool, Sums | None]:
    """Give the script its means: of a completed step, or of an evaluation once that is complete.

    Returns: whether the step belongs to an evaluation, and the sums of that, if it has ended.
    Raises: as `Evaluation.completed`.
    """
    total, was_under_way = outcome.commit.total, evaluation.under_way
    sums = evaluation.completed(total, [name for name, _ in outcome.deal])
    if not was_under_way:
        means.came(total.metrics)
    elif sums is not None:
        means.came(sums)
    return was_under_way or evaluation.under_way, sums
