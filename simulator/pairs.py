"""Two members, and the senior dies: may the junior go on without it, and does it?

It may only if the senior cannot have gone on without it before (protocols/deaths.py). Random lives seldom have
the two or three faults, a moment apart, on which that depends; here they are played one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..protocols import events as ev
from ..protocols.liveness import PAIR_PATIENCE_S
from .negotiations import PlayedNegotiation
from .nodes import Clock
from .random_run import Violation

SENIOR, JUNIOR = "n1", "n2"
MOMENT_S = 0.05
DRIFT = 0.06  # Far more than clocks do: PAIR_PROOF_S allows for two of them.
REST_S = 6.0


@dataclass(frozen=True, slots=True)
class Death:
    """How the senior ends, and whether the junior goes on alone after that."""

    name: str
    play: Callable[[PlayedNegotiation], None]
    goes_on: bool


def play(death: Death, seed: int = 0, record: bool = False) -> PlayedNegotiation:
    """One life of two nodes, until the one that is left makes steps, or waits. Raises: Violation with the story.

    `seed`: of the network, so of the delays; `record` keeps the whole story.
    """
    stage = PlayedNegotiation(seed, record=record)
    try:
        stage.grow(2)
        death.play(stage)
        _wait(stage, REST_S)
        _check(stage, death)
    except Exception as error:
        raise Violation(
            f"{death.name}, seed {seed}: {type(error).__name__}: {error}\n{stage.story()}"
        ) from error
    return stage


def _check(stage: PlayedNegotiation, death: Death) -> None:
    complaints = stage.unsettled(stage.now_s - REST_S / 4)
    assert not complaints, "; ".join(complaints)
    waits = stage.nodes[JUNIOR].agent.parked
    assert not (waits and death.goes_on), f"{JUNIOR} waits for one that has died ({waits})"
    assert waits or death.goes_on, f"{JUNIOR} goes on, though the other may have gone on first"


def _wait(stage: PlayedNegotiation, seconds: float) -> None:
    stage.run(stage.now_s + seconds)


def _until_reached(stage: PlayedNegotiation) -> None:
    """Run up to the event in which one node finds that the other's machine is there, and no further."""
    since_s = stage.now_s
    while not any(at_s > since_s and isinstance(what, ev.Reached) for at_s, _, what in stage.told):
        stage.run(stage.queue[0][0])


def _falls_silent(seconds: float) -> Callable[[PlayedNegotiation], None]:
    return lambda stage: stage.fall_silent(SENIOR, seconds)


def _refused_late(seconds: float) -> Callable[[PlayedNegotiation], None]:
    """The machine of the dead one answers slowly."""

    def death(stage: PlayedNegotiation) -> None:
        stage.refuses_after_s = lambda: seconds
        stage.crash(SENIOR)

    return death


def _while_the_junior_sleeps(seconds: float) -> Callable[[PlayedNegotiation], None]:
    """The way between them is gone meanwhile. When the junior wakes, the connection breaks, for nobody is there."""

    def death(stage: PlayedNegotiation) -> None:
        stage.cut(SENIOR, JUNIOR)
        stage.pause(JUNIOR, seconds)
        _wait(stage, seconds - 2 * MOMENT_S)
        stage.crash(SENIOR)
        _wait(stage, MOMENT_S)
        stage.heal(SENIOR, JUNIOR)

    return death


def _on_clocks_that_drift(stage: PlayedNegotiation) -> None:
    """The senior's is fast, so it goes on alone early; the junior's is slow. They lose the way just after a Ping."""
    senior, junior = stage.nodes[SENIOR], stage.nodes[JUNIOR]
    for node, rate in ((senior, 1 + DRIFT), (junior, 1 - DRIFT)):
        node.clock = Clock(node.clock.reads(stage.now_s) - rate * stage.now_s, rate)
    _wait(stage, 1.0)
    answered_s = junior.agent.liveness.peers[SENIOR].known_s
    while junior.agent.liveness.peers[SENIOR].known_s == answered_s:
        stage.run(stage.queue[0][0])
    _while_the_junior_sleeps(PAIR_PATIENCE_S + 2 * MOMENT_S)(stage)


def _after_a_reset(lag_s: float) -> Callable[[PlayedNegotiation], None]:
    """Its end of the connection broke; it found the junior there, and lost the way: it must not go on for that."""

    def death(stage: PlayedNegotiation) -> None:
        stage.reset_lag_s = lambda: lag_s
        stage.reset(SENIOR, JUNIOR)
        _until_reached(stage)
        stage.cut(SENIOR, JUNIOR)
        _wait(stage, lag_s - 2 * MOMENT_S)
        stage.crash(SENIOR)
        stage.heal(SENIOR, JUNIOR)

    return death


def _raises(stage: PlayedNegotiation) -> None:
    """Its script ends with an error: whatever was under way, its farewell comes first."""
    stage.tell(SENIOR, ev.Crashed("ValueError: bad record"))


def _told_to_go_on_in_vain(stage: PlayedNegotiation) -> None:
    """A person tells the junior, which does not wait. Later the way is lost, and the senior goes on alone."""
    stage.go_on(JUNIOR)
    _wait(stage, 1.0)
    stage.cut(SENIOR, JUNIOR)
    _wait(stage, 4.0)
    stage.crash(SENIOR)


DEATHS = {
    each.name: each
    for each in (
        Death("sleep-1.8", _while_the_junior_sleeps(1.8), goes_on=True),
        Death("sleep-4.0", _while_the_junior_sleeps(4.0), goes_on=False),
        Death("drift", _on_clocks_that_drift, goes_on=False),
        Death("reset-1.0", _after_a_reset(1.0), goes_on=True),
        Death("silent-1.0", _falls_silent(1.0), goes_on=True),
        Death("silent-3.0", _falls_silent(3.0), goes_on=False),
        Death("refused-after-1.0", _refused_late(1.0), goes_on=True),
        Death("raises", _raises, goes_on=True),
        Death("go-on-in-vain", _told_to_go_on_in_vain, goes_on=False),
    )
}
