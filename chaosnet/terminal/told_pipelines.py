"""Parses what a status says of pipelines, and of who keeps which layers, for those who show it; pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..protocols.status import Status


@dataclass(frozen=True, slots=True)
class StageTold:
    """A stage of a pipeline: its node, and its first and last layer. `gone`: others do its work for now."""

    node: str
    first: int
    last: int
    gone: bool


@dataclass(frozen=True, slots=True)
class PipelineTold:
    """A pipeline. `micro_batches`: how many a step; None if that is not told."""

    stages: tuple[StageTold, ...]
    micro_batches: int | None


def lines(told: str) -> list[PipelineTold]:
    """The pipelines of "a 0-3 > b 4 x8 | ..."; [] for a text in another form, as of another version."""
    found = []
    for line in told.split(" | ") if told else ():
        chain, _, count = line.rpartition(" x")
        stages = []
        for part in chain.split(" > "):
            words = part.removesuffix(" (gone)")
            node, _, layers = words.rpartition(" ")
            first, _, last = layers.partition("-")
            if not (first.isdigit() and (last or first).isdigit()):
                return []
            stages.append(StageTold(node, int(first), int(last or first), words != part))
        found.append(PipelineTold(tuple(stages), int(count) if count.isdigit() else None))
    return found


def micro_batches_per_s(status: Status, step_s: float | None) -> float | None:
    """The rate of all pipelines together if a step takes `step_s`; None if that is unknown, or there are none."""
    counts = [line.micro_batches for line in lines(status.pipelines)]
    return sum(count or 0 for count in counts) / step_s if counts and step_s else None


def pace(status: Status) -> str:
    """What a step of the pipelines should take, and what it took; "" before it is known."""
    took_s, rate = status.step_s, micro_batches_per_s(status, status.step_s)
    parts = [f"predicted: {1000 * status.predicted_s:,.1f} ms a step"] if status.predicted_s else []
    parts += [f"took {1000 * took_s:,.1f} ms (median of the last 21)"] if parts and took_s else []
    parts += [f"{rate:,.1f} micro-batches/s"] if rate else []
    return ", ".join(parts)


def kept(status: Status) -> list[tuple[str, list[tuple[int, int]]]]:
    """Members with the layers whose state they keep, each range by its first and last; [] where all keep all."""
    return [(row.node, _ranges(row.keeps)) for row in status.active if row.keeps]


def _ranges(told: str) -> list[tuple[int, int]]:
    """The ranges of "0-2, 5", as (first, last); [] for a text in another form."""
    found = []
    for part in told.split(", "):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            return []  # Of another version.
        found.append((int(first), int(last or first)))
    return found


def how_safe(keepers: int) -> str:
    """How safe the state is, for people. `keepers`: members that keep the layer which the fewest keep."""
    return f"each layer at {keepers} members or more" if keepers > 1 else "some layers at one member only"
