"""The summary of a node's run, printed when it has left: figures are gathered while it trains."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from ..protocols.messages import Notice
from ..protocols.sentences import counted, lasting

WIDTH = 69  # Of a line, so that it has 80 columns behind "[chaosnet] ".
BLOCKS, PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
SPARKS = 24  # Characters of a sparkline.
VALUES_KEPT = 192  # Of a metric; beyond, two neighbours become their mean.
METRICS_KEPT, METRICS_TOLD = 16, 2
NAMES_TOLD = 20  # As JSON; people are told two or three.
GONE = ("node-failure", "expelled")  # Kinds of notices of nodes that did not leave by themselves.


class Curve:
    """A metric's history in bounded memory."""

    def __init__(self) -> None:
        self.first = self.last = math.nan
        self.values: list[float] = []  # Means of so many neighbours: `_each`.
        self._each, self._pending = 1, [0.0, 0]

    def add(self, value: float) -> None:
        """Add the newest value. One that is not finite counts as `last` only."""
        self.last = value
        if not math.isfinite(value):
            return
        if math.isnan(self.first):
            self.first = value
        self._pending = [self._pending[0] + value, self._pending[1] + 1]
        if self._pending[1] < self._each:
            return
        self.values.append(self._pending[0] / self._pending[1])
        self._pending = [0.0, 0]
        if len(self.values) >= VALUES_KEPT:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
            self._each *= 2


def sparkline(values: Sequence[float], blocks: str = BLOCKS) -> str:
    """At most `SPARKS` characters, each the mean of its part of the finite `values`; "" for fewer than two."""
    if len(values) < 2:
        return ""
    count = min(SPARKS, len(values))
    borders = [len(values) * n // count for n in range(count + 1)]
    means = [sum(values[start:stop]) / (stop - start) for start, stop in pairwise(borders)]
    low, high = min(means), max(means)
    if low == high:
        return blocks[0] * count
    return "".join(blocks[round((mean - low) / (high - low) * (len(blocks) - 1))] for mean in means)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Figures of one node's run. Times in seconds.

    Attributes:
        steps: Of the cluster while this node was a member; `steps_here`: with samples from here.
        samples: Behind `steps`, of all nodes; `samples_here`: of this one.
        summing: Until a step's sum was here, also as others had yet to compute theirs, but not `waiting`, which was
            told: for members that could not be reached.
        joined, left, lost: Other nodes, since this one is a member.
        void_steps: Parts of steps that were computed here, and did not count; `lost_updates`: of the model, which
            this node has seen and the cluster does not have; `dealt_again`: samples that lost nodes
            had in hand, at most.
        checkpoint: The newest complete one that this node has written its part of; "" for none.
    """

    node: str
    step: int
    seconds: float
    steps: int
    steps_here: int
    samples: float
    samples_here: float
    computing: float
    summing: float
    updating: float
    waiting: float
    members: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    rejoins: int = 0
    void_steps: int = 0
    lost_updates: int = 0
    dealt_again: float = 0.0
    samples_set_aside: int = 0
    samples_dropped: int = 0
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)  # First, last, then the history.
    checkpoint: str = ""
    checkpoint_step: int = 0

    def fields(self) -> dict[str, Any]:
        """The figures for JSON, which has no numbers that are not finite: these are None.

        Of nodes the first names, and how many there are: after a long run they would be a wall.
        """
        told = asdict(self)
        del told["node"]
        for kind in ("members", "joined", "left", "lost"):
            told[f"{kind}_count"], told[kind] = len(told[kind]), told[kind][:NAMES_TOLD]
        told["metrics"] = {
            name: dict(zip(("first", "last"), map(_finite, (first, last)), strict=True))
            | {"history": history}
            for name, (first, last, *history) in self.metrics.items()
        }
        return told


def lines(summary: RunSummary, blocks: str = BLOCKS) -> list[str]:
    """The summary for people: at most seven lines of 69 characters; only a checkpoint's long path may exceed that."""
    s = summary
    told = [
        f"run: {counted(s.steps, 'step')}, {s.steps_here:,} with samples from here "
        f"({s.samples_here:,.0f} of {s.samples:,.0f})",
        _times(s),
        _members(s),
        _losses(s),
    ]
    names = sorted(s.metrics, key=lambda name: (name != "loss", name))
    for name in names[:METRICS_TOLD]:
        first, last, *history = s.metrics[name]
        spark = sparkline(history, blocks)
        told.append(f"{name[:24]}: {last:.4g}" + (f", from {first:.4g}  {spark}" if spark else ""))
    if s.checkpoint:
        told.append(f"newest checkpoint: step {s.checkpoint_step:,} in {s.checkpoint}")
        return [_clipped(line) for line in told[:-1]] + told[-1:]
    return [_clipped(line) for line in told]


def _times(s: RunSummary) -> str:
    spent = {"compute": s.computing, "sum": s.summing, "optimizer": s.updating, "wait": s.waiting}
    whole = max(s.seconds, sum(spent.values()), 1e-9)
    spent["other"] = whole - sum(spent.values())
    return f"time {lasting(s.seconds)}: " + ", ".join(
        f"{100 * seconds / whole:.0f}% {phase}" for phase, seconds in spent.items() if seconds >= whole / 200
    )


def _members(s: RunSummary) -> str:
    changes = [("joined", s.joined), ("left", s.left), ("lost", s.lost)]
    said = "".join(f"; {what} {_names(names, 2)}" for what, names in changes if names)
    return f"members: {_names(s.members, 3)} at the end{said}"


def _names(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name[:16] for name in names[:most]) + more


def _losses(s: RunSummary) -> str:
    said = []
    if s.lost_updates:
        said.append(counted(s.lost_updates, "update") + " of the model")
    if s.samples_set_aside:
        said.append(f"{counted(s.samples_set_aside, 'sample')} set aside")
    if s.samples_dropped:
        said.append(f"{counted(s.samples_dropped, 'sample')} dropped")
    again = []
    if s.void_steps:
        again.append(f"{counted(s.void_steps, 'step')} here")
    if s.dealt_again:
        again.append(f"at most {counted(round(s.dealt_again), 'sample')} of others")
    return f"work lost: {', '.join(said) or 'none'}" + (f"; done over: {', '.join(again)}" if again else "")


def _clipped(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class RunRecord:
    """Gathers a run's figures. `heard` and `parked` are called on the thread that serves the links, all else on the
    training thread.

    Attributes:
        began_s: When the node began to join, by the clock of `now_s`.
    """

    def __init__(self, node: str) -> None:
        self.node, self.began_s = node, 0.0
        self.is_member = False
        self.computing = self.summing = self.updating = 0.0
        self.samples_here, self.void_steps, self.lost_updates = 0.0, 0, 0
        self.members: tuple[str, ...] = ()
        self.curves: dict[str, Curve] = {}
        self.names: dict[str, dict[str, None]] = {"joined": {}, "left": {}, "lost": {}}  # In their order.
        self._step = self._steps = 0
        self._samples_before = 0.0
        self._shares: dict[str, float] = {}  # What each is dealt for a step, as last known.
        self._dealt_again = 0.0
        self._waited_s, self._parked_at_s = 0.0, math.nan

    def entered(self, step: int, samples: float) -> None:
        """The node is a member; the model has had `step` updates, with `samples`."""
        self.is_member, self._step, self._samples_before = True, step, samples

    def stepped(self, step: int, members: Collection[str], deal: Mapping[str, float]) -> None:
        """A step is complete; the model has had `step` updates.

        `deal`: who gets how many samples in the next step.
        """
        self._steps += max(step - self._step, 0)
        self._step, self.members = step, tuple(sorted(members))
        self._shares |= deal

    def void(self, step: int, computed: bool) -> None:
        """What this node had for a step does not count; the model has had `step` updates.

        `computed`: had it anything?
        """
        self.void_steps += computed
        self.lost_updates += max(self._step - step, 0)
        self._step = step

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Add the cluster's means of a step to the curves."""
        for name, value in metrics.items():
            if name in self.curves or len(self.curves) < METRICS_KEPT:
                self.curves.setdefault(name, Curve()).add(value)

    def heard(self, notice: Notice) -> None:
        """Note which other nodes joined, left or were lost, once this one is a member."""
        kind = "lost" if notice.kind in GONE else notice.kind
        if not self.is_member or kind not in self.names:
            return
        for name in notice.node.split(", "):
            if name == self.node:
                continue
            self.names[kind][name] = None
            share = self._shares.pop(name, 0.0) if kind != "joined" else 0.0
            self._dealt_again += share if kind == "lost" else 0.0

    def parked(self, waits: bool, now_s: float) -> None:
        """Training waits for members that cannot be reached, or goes on."""
        if not math.isnan(self._parked_at_s):
            self._waited_s += now_s - self._parked_at_s
        self._parked_at_s = now_s if waits else math.nan

    def summary(self, samples: float, steps_here: int, now_s: float, **facts: Any) -> RunSummary | None:
        """None for a node that was in no step. `facts`: other fields of `RunSummary`."""
        self.parked(False, now_s)
        if not self._steps and not steps_here:
            return None
        return RunSummary(
            node=self.node,
            step=self._step,
            seconds=now_s - self.began_s,
            steps=self._steps,
            steps_here=steps_here,
            samples=max(samples - self._samples_before, 0.0),
            samples_here=self.samples_here,
            computing=self.computing,
            summing=max(self.summing - self._waited_s, 0.0),
            updating=self.updating,
            waiting=self._waited_s,
            members=self.members,
            joined=tuple(self.names["joined"]),
            left=tuple(self.names["left"]),
            lost=tuple(self.names["lost"]),
            void_steps=self.void_steps,
            lost_updates=self.lost_updates,
            dealt_again=self._dealt_again,
            metrics={name: (each.first, each.last, *each.values) for name, each in self.curves.items()},
            **facts,
        )
