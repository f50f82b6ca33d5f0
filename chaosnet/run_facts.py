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
        """This node's life in the cluster: join, steps, leave (docs/extending.md)."""
        return self._attached().session

    @property
    def engine(self) -> DataParallel:
        """What this node trains, and how (docs/extending.md)."""
        return self._attached().engine

    # --- of the cluster ---

    @property
    def step(self) -> int:
        """Updates of the model, by anybody, since the cluster began."""
        return self._run.engine.step if self._run else 0

    @property
    def samples(self) -> float:
        """Samples behind the updates of `step`, of all nodes."""
        return self._run.engine.samples if self._run else 0.0

    @property
    def epoch(self) -> int:
        """Epochs of `batches` that the cluster has completed."""
        return self._share.epoch

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the cluster's members, in the order in which they joined, as agreed with the last step."""
        self._attached()
        return tuple(name for name, _ in self._share.deal)

    @property
    def world_size(self) -> int:
        """How many members there are, as agreed with the last step."""
        return len(self.members)

    @property
    def is_main(self) -> bool:
        """Has this node been a member for the longest?

        Of the nodes that ask after the same step, at most one is told yes. If it dies before it has done what it was
        to do, nobody has done it; after the next step, another node is the main one.
        """
        return self.members[:1] == (self._share.name,)

    @property
    def metrics(self) -> dict[str, float]:
        """The cluster's means of the last step, by name."""
        return self._means.last

    @property
    def samples_dropped(self) -> int:
        """Samples that the whole cluster has left out at the ends of epochs (`drop_last`, `min_samples`)."""
        return self._share.left_out().get("samples_dropped", 0)

    @property
    def samples_set_aside(self) -> int:
        """Samples that the whole cluster passes over as scripts failed over them, each once an epoch."""
        return self._share.left_out().get("samples_set_aside", 0)

    # --- of this node ---

    @property
    def updates_here(self) -> int:
        """Steps to which this node has brought samples."""
        return self._attached().steps.updates_here

    @property
    def joined_step(self) -> int:
        """The step since which this node is a member."""
        return self.session.joined_step

    @property
    def join_seconds(self) -> float:
        """Seconds that this node's join took."""
        return self.session.join_seconds

    @property
    def join_phases(self) -> Mapping[str, float]:
        """Seconds of the join by phase (docs/life_of_a_join.md); of the last join, if this node came back."""
        return self.session.join_phases

    @property
    def join_bytes(self) -> int:
        """Bytes of the state that this node received when it joined."""
        return self.session.join_bytes

    @property
    def join_bytes_by_source(self) -> Mapping[str, int]:
        """`join_bytes` by the node that sent them."""
        return self.session.join_bytes_by_source

    @property
    def rejoins(self) -> int:
        """How often this node was out of the cluster, and came back."""
        return self.session.rejoins

    @property
    def heals(self) -> int:
        """How often this node has pulled the state anew because its own differed (`on_divergence="heal"`)."""
        return self._attached().steps.heals
