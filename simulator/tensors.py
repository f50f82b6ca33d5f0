"""Training in which nodes need tensors of each other within a step, as where they compute different layers.

In such lives a node waits for one tensor of the member before it, in the order of the view, and sends one to the
member after it; only then is its part of the step done. A part says in which view it was computed, so a sum that
mixes views shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..protocols import events as ev
from ..protocols.messages import Contribution, Tensor, View, ViewKey
from .nodes import SimNode

Attempt = tuple[ViewKey, int]  # Key of the view, and step.
Later = Callable[[float, Callable[[], None]], None]
Tell = Callable[[SimNode, ev.Event], None]


@dataclass(slots=True)
class Attempted:
    """One attempt of a node: what it waits for, and what it contributes once nothing is missing."""

    attempt: Attempt
    chunks: int
    contribution: Contribution
    waits: bool  # For the tensor of the member before it.
    busy: bool = True


@dataclass(slots=True)
class Tensors:
    """The tensors of all nodes of a life. `later`, `tell`: functions of the cluster."""

    later: Later
    tell: Tell
    work: dict[SimNode, Attempted] = field(default_factory=dict)
    came: dict[SimNode, set[Attempt]] = field(default_factory=dict)

    def compute(
        self, node: SimNode, view: View, step: int, chunks: int, contribution: Contribution, took_s: float
    ) -> None:
        """`node` begins with a step in `view`, which takes `took_s` beside what it waits for."""
        attempt = view.key, step
        before, after = _around(view, node.name)
        came = self.came.setdefault(node, set())
        came -= {each for each in came if each < attempt}
        self.work[node] = Attempted(attempt, chunks, contribution, waits=bool(before) and attempt not in came)
        if after:
            tensor = Tensor(key=view.key, step=step, target=after, way="a", micro_batch=0, layer=1)
            self._do(node, took_s / 2, lambda: self.tell(node, ev.TensorMade(tensor, node.name)))
        self._do(node, took_s, lambda: self._worked(node, attempt))

    def handed_over(self, node: SimNode, message: Tensor, payload: object) -> None:
        """A tensor has come to its target."""
        attempt = message.key, message.step
        self.came.setdefault(node, set()).add(attempt)
        work = self.work.get(node)
        if work is not None and work.attempt == attempt:
            work.waits = False
            self._contribute(node, work)

    def check_part(self, node: SimNode, step: int, key: ViewKey | None) -> None:
        """Check a part of `node` that goes into a sum: computed for this step, in this view (None: not known)."""
        attempt = self.work[node].attempt
        assert attempt == (key or attempt[0], step), (
            f"{node.name} adds what it computed in {attempt} to a sum of step {step} in view {key}"
        )

    def _worked(self, node: SimNode, attempt: Attempt) -> None:
        work = self.work[node]
        if work.attempt == attempt:
            work.busy = False
            self._contribute(node, work)

    def _contribute(self, node: SimNode, work: Attempted) -> None:
        if work.busy or work.waits or self._lacks_parts(node):
            return
        # The next attempt may have begun by then: then it is void.
        self._do(node, 0.001, lambda: self._hand_over(node, work))

    def _lacks_parts(self, node: SimNode) -> bool:
        """Does the node wait for parts of the state? Not here, where all have all of it."""
        return False

    def _hand_over(self, node: SimNode, work: Attempted) -> None:
        key = work.attempt[0]
        self.tell(node, ev.Contributed(tuple(range(work.chunks)), work.contribution.weight, key))
        self.tell(node, ev.LocalReady(work.contribution, key))

    def _do(self, node: SimNode, delay_s: float, what: Callable[[], None]) -> None:
        """Do something on the training thread of `node`, which stands still while the node is paused."""

        def when_awake() -> None:
            if node.paused:
                self.later(0.01, when_awake)
            elif node.alive and not node.done:
                what()

        self.later(delay_s, when_awake)


def _around(view: View, me: str) -> tuple[str, str]:
    """The members before and after `me`; "" at the ends."""
    ids = view.member_ids
    at = ids.index(me)
    return (ids[at - 1] if at else ""), (ids[at + 1] if at + 1 < len(ids) else "")
