"""What the loop tells the training thread, and the other way round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..protocols.effects import TakeSnapshot
from ..protocols.messages import Commit, Deal, View
from .state.flat_state import Arrival


@dataclass(slots=True)
class StepOutcome:
    """A step is complete.

    Attributes:
        results: The means by chunk, only to be read; [] if nobody had samples; None: this node's own, in place.
        late: What computes the results, until that is done: for the thread that trains, before its next step.
        view: The view of the next step.
    """

    step: int
    commit: Commit
    deal: Deal
    results: list[torch.Tensor] | None
    view: View
    snapshot: TakeSnapshot | None = None  # To be taken once this step has been applied.
    late: Callable[[], list[torch.Tensor]] | None = None

    def settle(self) -> None:
        """Compute the results, if that was left to the thread that trains."""
        if self.late is not None:
            self.results, self.late = self.late(), None

    @property
    def nbytes(self) -> int:
        """Bytes of the results, beside what this node has anyway."""
        return sum(result.nbytes for result in self.results or ())


@dataclass(slots=True)
class StateArrived:
    """All bytes of the state at the beginning of `step` are here."""

    step: int
    arrival: Arrival
    bytes_by_source: dict[str, int]


@dataclass(slots=True)
class StateDiscarded:
    """The state that arrived is void, with the results that waited for it, and so is an admission without it."""


@dataclass(slots=True)
class FoundedAt:
    """This node founds a cluster, as nobody was there to join; its own state counts.

    `addresses`: where others join.
    """

    addresses: tuple[str, ...]


@dataclass(slots=True)
class Admitted:
    """This node is a member in `view`, and contributes from `step` on, once it has adopted all before that."""

    step: int
    deal: Deal
    view: View


@dataclass(slots=True)
class Redo:
    """What was computed of the step under way is void: it begins anew in `view` (StepSync, `recomputes`)."""

    view: View


@dataclass(slots=True)
class Ended:
    """This node is out: "left", "out" (against its will; it may rejoin), "refused" or "broken".

    `last`: it has left, and nobody goes on. `lasting`: it would be refused again, as it is.
    """

    how: str
    reason: str
    spec: bytes = b""
    error: BaseException | None = None
    last: bool = False
    lasting: bool = False


Outcome = StepOutcome | StateArrived | StateDiscarded | FoundedAt | Admitted | Redo | Ended


@dataclass(slots=True)
class Rates:
    """What the training thread tells of itself, for reports; plain numbers, so no lock is needed."""

    samples_per_s: float = 0.0
    sync_delay_s: float = 0.0
    state_bytes: int = 0
    layer_bytes: tuple[int, int] = (0, 0)
    page: str = ""  # Where this process serves the cluster's page.
    pipelines: str = ""  # That run (scheduler/elastic/running.py).
    predicted_s: float = 0.0  # What a step of them should take.
    # Layers whose state each member keeps, where they keep parts.
    kept: dict[str, str] = field(default_factory=dict)
    keepers: int = 0  # See `Status`.
    left_out: dict[str, int] = field(default_factory=dict)  # Samples that nobody trained on, by why.
