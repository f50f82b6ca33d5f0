"""What a trainer tells of its run, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .batches import Batches
from .data import DataShare
from .engines.data_parallel import DataParallel
from .means import Means
from .node.session import Session
from .protocols.errors import ConfigError
from .script_node import ScriptNode
from .script_steps import ScriptSteps


@dataclass(frozen=True, slots=True)
class Run:
    """What there is once a model has been attached."""

    session: Session
    engine: DataParallel
    node: ScriptNode
    steps: ScriptSteps
    batches: Batches


class RunFacts:
    """Of the model and the cluster: 0 before there is a model. Of this node: ConfigError before."""

    _run: Run | None
    _share: DataShare
    _means: Means

    def _attached(self) -> Run:
        if self._run is None:
            raise ConfigError("Trainer: no model yet (pass model and optimizer, or call attach)")
        return self._run

    @property
    def session(self) -> Session:
        """This node's life in the cluster."""
        return self._attached().session

    @property
    def engine(self) -> DataParallel:
        """What it trains."""
        return self._attached().engine

    # --- of the cluster ---

    @property
    def step(self) -> int:
        """Updates of the model, by anybody, since the cluster began."""
        return self._run.engine.step if self._run else 0

    @property
    def samples(self) -> float:
        """Behind them."""
        return self._run.engine.samples if self._run else 0.0

    @property
    def epoch(self) -> int:
        """Epochs of `batches` that the cluster has completed."""
        return self._share.epoch

    @property
    def members(self) -> tuple[str, ...]:
        """Of the cluster, in the order in which they have come, as agreed with the last step."""
        self._attached()
        return tuple(name for name, _ in self._share.deal)

    @property
    def world_size(self) -> int:
        """How many they are."""
        return len(self.members)

    @property
    def is_main(self) -> bool:
        """Is this the node that has been a member for the longest?

        All that ask after the same step get one answer: at most one node is. If it dies before it has done what it
        was to do, nobody has done it; after the next step, another one is.
        """
        return self.members[:1] == (self._share.name,)

    @property
    def metrics(self) -> dict[str, float]:
        """The cluster's means of the last step, by name."""
        return self._means.last

    @property
    def samples_dropped(self) -> int:
        """Left out at the ends of epochs (`drop_last`, `min_samples`), by the whole cluster."""
        return self._share.left_out().get("samples_dropped", 0)

    @property
    def samples_set_aside(self) -> int:
        """Passed over because scripts ended with an error over them, each once an epoch, by the whole cluster."""
        return self._share.left_out().get("samples_set_aside", 0)

    # --- of this node ---

    @property
    def updates_here(self) -> int:
        """Steps with samples from here."""
        return self._attached().steps.updates_here

    @property
    def joined_step(self) -> int:
        """Since which it is a member."""
        return self.session.joined_step

    @property
    def join_seconds(self) -> float:
        """How long the join took."""
        return self.session.join_seconds

    @property
    def join_phases(self) -> Mapping[str, float]:
        """What of it went into what: seconds by phase (docs/life_of_a_join.md); of the last time, if it rejoined."""
        return self.session.join_phases

    @property
    def join_bytes(self) -> int:
        """Of the state that it received."""
        return self.session.join_bytes

    @property
    def join_bytes_by_source(self) -> Mapping[str, int]:
        """The same, by whom they were sent."""
        return self.session.join_bytes_by_source

    @property
    def rejoins(self) -> int:
        """How often it was out, and came back."""
        return self.session.rejoins

    @property
    def heals(self) -> int:
        """How often it has pulled the state anew, as its own differed."""
        return self._attached().steps.heals
