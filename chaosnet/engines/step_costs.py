"""The time of a step beyond computing: all members measure it, and agree on it as on layers' costs (pace.py).

    bytes     of what each layer gives to the next, for one micro-batch
    links     what each carries (protocols/readings.py), and how long its heartbeats take; told when it is news
    step      the sums' adoption and the optimizer's step: of all members the mean
    rest      the time of a step, from the end of the one before, beyond all of these

Bytes and links choose the pipelines, so they change only by more than noise would. Step and rest are the same for
all pipelines: they are in what is predicted, and not in the choice. They are medians of the last steps.

As long as the pipelines and the trees stay, a step is predicted to take what the last ones took here: layers and
links that are measured anew, after a start above all, make no step longer or shorter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..node.loop import NodeLoop
from ..node.session import Session
from ..node.sums.layer_sums import LayerSums
from ..protocols.errors import ChaosnetError
from ..protocols.messages import LinkReading, View
from ..scheduler.elastic.running import Running
from ..scheduler.elastic.traffic import Pair, Traffic
from .layer_runner import Done
from .pace import Pace, differ

NOTABLE_US = 200  # A delay that has changed by less is as it was.
JUMP = 1.5  # A link whose rate or delay changes by this factor counts as another link.
LAST = 3  # Steps.

Timings = dict[str, tuple[float, float]]
"""(Sum, number) by name."""


class Predicted(NamedTuple):
    """What a step should take, in microseconds.

    `parameters_us`: what waiting for parameters adds; `sums_us`: from the last computation on; `moving_us`: in this
    step alone, for state that goes to other members. `is_guess`: it rests on no measured step, or on no link.
    """

    computing_us: float
    parameters_us: float
    sums_us: float
    step_us: int
    rest_us: int
    moving_us: float = 0.0
    is_guess: bool = False

    @property
    def usual_us(self) -> float:
        """The time of a step in which no state moves."""
        return sum(self[:5])

    @property
    def total_us(self) -> float:
        """The time of this step."""
        return self.usual_us + self.moving_us

    def __str__(self) -> str:
        parts = zip(("computing", "parameters", "sums", "optimizer", "rest"), self[:5], strict=True)
        each = ", ".join(f"{us / 1000:.1f} {name}" for name, us in parts if name == "computing" or us)
        more = (
            f", the first {self.moving_us / 1000:.1f} ms more for state that moves" if self.moving_us else ""
        )
        guess = ", a first guess" if self.is_guess else ""
        return f"predicted {self.usual_us / 1000:.1f} ms a step ({each}){guess}{more}"


class StepCosts:
    """Costs of steps beyond computing; equal on all members but for what is yet to be told, and was timed here."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.out_bytes = [0] * layers
        self.rates_mbit: dict[Pair, int] = {}
        # Pairs whose rate was measured by what was sent: that tells more than a probe.
        self._timed: set[Pair] = set()
        self.delays_us: dict[Pair, int] = {}
        self._steps_us: list[int] = []
        self._rests_us: list[int] = []
        self._ended: tuple[int, object, float] | None = None  # A round, its pipelines, and when it was over.
        # Timed here: what the last steps of the present pipelines, over the present trees, took.
        self._ways: object = None
        self._took_us: list[float] = []
        self._guesses = True  # Was the last prediction a guess?
        self._jumped = False  # Has a link jumped with the step that is about to end?
        self._untold: Timings = {}
        self._seen: dict[str, int] = {}  # What was told of links in the step before.

    @property
    def step_us(self) -> int:
        """The time of adopting the sums."""
        return _middle(self._steps_us)

    @property
    def rest_us(self) -> int:
        """The time that a step takes beyond all else. 0 before it is measured; negative if a step takes less."""
        return _middle(self._rests_us)

    def begin(self, running: Running, trees: Sequence[tuple[Sequence[Pair], float]] = ()) -> Predicted:
        """A step of these pipelines begins, with sums over these trees. Returns: what it should take."""
        if self._ways != (running.laid, trees):
            self._ways = running.laid, trees
            self._took_us.clear()
        parts = running.computing_us, running.parameters_us
        sums_us, step_us = running.predicted_us - sum(parts), self.step_us
        rest_us = self.rest_us
        if self._took_us:
            rest_us = round(statistics.median_low(self._took_us) - running.predicted_us - step_us)
        # No less than computing is left.
        rest_us = max(rest_us, -round(running.parameters_us + sums_us + step_us))
        knows_links = bool(self.rates_mbit) or not any(edges for edges, _ in trees)
        self._guesses = not self._took_us and not (self._rests_us and knows_links)
        return Predicted(*parts, sums_us, step_us, rest_us, running.moving_us, self._guesses)

    # --- what is measured here ---

    def ended(
        self, round: int, running: Running | None, now_s: float, adopted_s: float, torn: bool = False
    ) -> None:
        """A round is over. `running`: its pipelines; None if it counts for nothing. `torn`: was it begun anew?"""
        before, self._ended = self._ended, (round, running and running.laid, now_s)
        jumped, self._jumped = self._jumped, False
        if running is None:
            return
        step_us = 1e6 * adopted_s
        self._untold = {"step": (step_us, 1.0)}
        if before is None or before[0] != round - 1 or torn:
            return
        took_us, is_first = 1e6 * (now_s - before[2]) - running.moving_us, before[1] != running.laid
        if not is_first or self._guesses:  # The first step of new pipelines tells more than a guess.
            self._took_us = [*self._took_us, took_us][-LAST:]
        if not is_first and not jumped:  # Else it was predicted with what the link was taken for.
            self._untold["rest"] = took_us - running.predicted_us - step_us, 1.0

    def measured(
        self, out_bytes: Mapping[int, int], me: str, members: Iterable[str], links: Mapping[str, LinkReading]
    ) -> Timings:
        """What this node tells with its next step; of links only what is news.

        Members are numbered, as names are long.
        """
        said, self._untold = self._untold, {}
        said = said | {f"{layer} bytes": (float(size), 1.0) for layer, size in out_bytes.items()}
        number = {name: place for place, name in enumerate(sorted(members))}
        for peer, each in links.items():
            if peer not in number or me not in number:
                continue
            there, back = (me, peer), (peer, me)
            found = (
                ("sent", there, each.sent_bps / 1e6),
                ("came", back, each.rate_bps / 1e6),
                ("delay", there, 1e6 * each.rtt_min_s / 2),
            )
            for kind, pair, value in found:
                if value and self._is_news(kind, pair, value):
                    said[f"{kind} {number[pair[0]]} {number[pair[1]]}"] = value, 1.0
        return said

    def _is_news(self, kind: str, pair: Pair, value: float) -> bool:
        """Does the value differ enough from what is known to be told?"""
        new = max(round(value), 1)
        if kind == "delay":
            old = self.delays_us.get(pair)
            return old is None or (differ(max(old, 1), new) and abs(new - old) > NOTABLE_US)
        rate = self.rates_mbit.get(pair)
        if kind == "came" and pair in self._timed:
            return False
        return rate is None or differ(rate, new)

    # --- what is agreed ---

    def agree(self, timings: Mapping[str, tuple[float, float]], members: Sequence[str]) -> None:
        """Take over what all have told."""
        means = {
            name: total / weight
            for name, (total, weight) in timings.items()
            if weight and math.isfinite(total)
        }
        for name, last_us in (("step", self._steps_us), ("rest", self._rests_us)):
            if name in means:
                last_us[:] = [*last_us, round(means[name])][-LAST:]
        for layer in range(self.layers):
            self.out_bytes[layer] = round(means.get(f"{layer} bytes", self.out_bytes[layer]))
        ordered = sorted(members)
        for known in (self.rates_mbit, self.delays_us):
            for pair in [each for each in known if not {*each} <= {*ordered}]:
                del known[pair]
        self._timed &= self.rates_mbit.keys()
        seen, self._seen = self._seen, {}
        for name, value in sorted(means.items(), key=lambda item: not item[0].startswith("sent ")):
            kind, *ends = name.split(" ")
            numbers = [int(each) for each in ends if each.isdecimal() and int(each) < len(ordered)]
            if kind in ("sent", "came", "delay") and len(numbers) == 2:
                pair = ordered[numbers[0]], ordered[numbers[1]]
                self._take(kind, pair, value, seen.get(" ".join((kind, *pair))))

    def _take(self, kind: str, pair: Pair, value: float, last: int | None) -> None:
        """Take over a link's value. `last`: what was told in the step before; a known value changes if both agree.

        But the first rate by what was sent takes the place of a probe's at once: that was made beside a start.
        """
        if not self._is_news(kind, pair, value):
            return
        known = self.delays_us if kind == "delay" else self.rates_mbit
        before, new = known.get(pair), max(round(value), 1)
        self._seen[" ".join((kind, *pair))] = new
        is_first = before is None or (kind == "sent" and pair not in self._timed)
        if not is_first and (last is None or differ(last, new)):
            return
        known[pair] = new
        if kind == "sent":
            self._timed.add(pair)
        if before is None or not 1 / JUMP < known[pair] / before < JUMP:
            self._rests_us.clear()  # They were beyond what another link would take.
            self._took_us.clear()
            self._jumped = True

    def traffic(self, view: View, sums: LayerSums) -> Traffic:
        """What planners have to know of bytes, links and trees in a view."""
        inside = view.member_set
        trees = tuple(
            (tuple((c, p) for c, p in sorted(tree.parent.items()) if {c, p} <= inside), tree.share)
            for tree in view.trees
        )
        sizes = tuple((group.users, _bytes(sums, group.chunks)) for group in sums.groups)
        largest = max((_bytes(sums, range(i, i + 1)) for i in range(len(sums.chunks))), default=0)
        return Traffic(
            out_bytes=tuple(self.out_bytes) if all(self.out_bytes[:-1]) else (),
            sums=sizes,
            rates_mbit=dict(self.rates_mbit),
            delays_us=dict(self.delays_us),
            links=tuple(each for each in view.links if inside.issuperset(each)),
            trees=trees,
            message_bytes=largest * view.bundle,
        )

    def to_plain(self) -> list[Any]:
        """All that is agreed, as plain data."""
        links = [
            [[*pair, each] for pair, each in sorted(known.items())]
            for known in (self.rates_mbit, self.delays_us)
        ]
        timed = [[*pair] for pair in sorted(self._timed)]
        return [[*self.out_bytes], *links, timed, [*self._steps_us], [*self._rests_us], dict(self._seen)]

    def from_plain(self, plain: Any) -> None:
        """Take over what `to_plain` gave. If the number of layers differs, their bytes are measured anew."""
        out_bytes, rates, delays, timed, steps_us, rests_us, seen = plain
        self.out_bytes = [*out_bytes] if len(out_bytes) == self.layers else [0] * self.layers
        self.rates_mbit = {(a, b): each for a, b, each in rates}
        self.delays_us = {(a, b): each for a, b, each in delays}
        self._timed = {(a, b) for a, b in timed}
        self._steps_us, self._rests_us = [*steps_us], [*rests_us]
        self._ended, self._untold, self._seen = None, {}, dict(seen)
        self._ways, self._took_us, self._guesses, self._jumped = None, [], True, False


def timings_of(costs: StepCosts, pace: Pace, done: Done, round: int, session: Session, view: View) -> Timings:
    """What this node tells with its part of a step: of layers in some steps, of links and the last step in all."""
    is_timed = pace.is_due(round)
    links = read_links(session.loop, view.member_ids, is_timed)
    said = costs.measured(done.out_bytes if is_timed else {}, session.name, view.member_ids, links)
    return said | (pace.measured(session.name, done) if is_timed else {})


def read_links(loop: NodeLoop, members: Iterable[str], all_of_it: bool) -> dict[str, LinkReading]:
    """What this node knows of its links to members: rates, or all. Nothing once it has left."""
    readings = loop.agent.readings

    def read() -> dict[str, LinkReading]:
        return {peer: readings.of(peer, 0.0) for peer in members if peer in readings.liveness.peers}

    if all_of_it:
        try:
            found: dict[str, LinkReading] = loop.ask(read)
        except ChaosnetError:
            return {}
        return found
    rates = ((peer, *readings.rates_bps(peer)) for peer in members)
    return {peer: LinkReading(rate_bps=came, sent_bps=sent) for peer, came, sent in rates if came or sent}


def _middle(values: Sequence[int]) -> int:
    return statistics.median_low(values) if values else 0


def _bytes(sums: LayerSums, chunks: range) -> int:
    """The bytes of these chunks on the wire."""
    each = (sums.chunks[chunk] for chunk in chunks)
    return sum((chunk.stop - chunk.start) * sums.lanes[chunk.lane].contribution.itemsize for chunk in each)
