"""What a trainer tells of its run, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ..data.batches import Batches
from ..data.share import DataShare
from ..engines.data_parallel import DataParallel
from ..node.session import Session
from ..protocols.errors import ConfigError
from .means import Means
from .member import ScriptMember
from .process import ScriptNode
from .steps import ScriptSteps


@dataclass(frozen=True, slots=True)
class Run:
    """What exists once a model has been attached."""

    session: Session
    engine: DataParallel
    node: ScriptNode
    steps: ScriptSteps
    batches: Batches


class RunFacts(ScriptMember):
    """Attributes of `Trainer`.

    Before there is a model, those of the cluster are 0; those of this node raise ConfigError.
    """

    _run: Run | None
    _share: DataShare
    _means: Means

    def _attached(self) -> Run:
        if self._run is None:
            raise ConfigError("Trainer: no model yet (pass model and optimizer, or call attach)")
        return self._run

    @property
    def _is_attached(self) -> bool:
        return self._run is not None

    def _member(self) -> ScriptNode:
        return self._attached().node

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
    def heals(self) -> int:
        """How often this node has pulled the state anew because its own differed (`on_divergence="heal"`)."""
        return self._attached().steps.heals

    def state_hash(self) -> str:
        """A hash of the training state; equal on two members if and only if their states are, to the bit."""
        return self.engine.state.state_hash()
