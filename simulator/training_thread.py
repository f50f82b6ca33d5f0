"""A step as the training thread of a node computes it, where nodes need nothing of each other within one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from ..protocols import events as ev
from ..protocols.messages import Contribution
from .nodes import SimNode

Tell = Callable[[SimNode, ev.Event], None]


class Around(Protocol):
    """What a training thread has to know of the cluster."""

    rng: random.Random
    chunks: int
    retract_odds: float
    now_s: float

    def later(self, delay_s: float, action: Callable[[], None]) -> object:
        """Have `action` happen after a delay."""


def train(
    around: Around,
    tell: Tell,
    node: SimNode,
    step: int,
    contribution: Contribution,
    took_s: float,
    eager: int,
) -> None:
    """`node` computes a step for `took_s`; its first `eager` chunks are handed over before it is ready."""
    first, rest = tuple(range(eager)), tuple(range(eager, around.chunks))
    weight = contribution.weight
    events: list[tuple[float, ev.Event]] = []
    if weight:
        events.append((took_s * 0.7, ev.Contributed(first, weight)))
        if first and around.rng.random() < around.retract_odds:
            events.append((took_s * 0.8, ev.Retracted(weight, "one more micro-batch")))
    else:
        rest = tuple(range(around.chunks))
    events += [(took_s, ev.Contributed(rest, weight)), (took_s, ev.LocalReady(contribution))]
    hand_over(around, tell, node, step, [(around.now_s + after_s, event) for after_s, event in events])


def hand_over(
    around: Around, tell: Tell, node: SimNode, step: int, events: list[tuple[float, ev.Event]]
) -> None:
    """Each event at its time, in their order: a thread that was stopped goes on where it was."""

    def go_on() -> None:
        if node.paused:
            around.later(0.01, go_on)
            return
        while events and events[0][0] <= around.now_s:
            _, event = events.pop(0)
            if node.step == step and node.alive and not node.done:
                tell(node, event)
        if events:
            around.later(events[0][0] - around.now_s, go_on)

    around.later(events[0][0] - around.now_s, go_on)
