"""How links change over time: the paper's random rates every three minutes, or whatever a CSV file says."""

from __future__ import annotations

import csv
import io
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .backend import TestbedError
from .topology import Link, LinkSpec, Topology, link_name, random_rate, read_text

PAPER_PERIOD_S = 180.0  # Chaos, Sec. VI-A.
MAX_PERIODS = 100_000
HEADER = ["time_s", "a", "b", "field", "value"]
CUT = "cut"  # Of a link; value 1 cuts, 0 heals.


@dataclass(frozen=True, slots=True)
class SpecChange:
    """At `time_s` after the start, `field` of `link` becomes `value`. Fields: those of LinkSpec, and "cut"."""

    time_s: float
    link: Link
    field: str
    value: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Changes in the order of their times."""

    changes: tuple[SpecChange, ...]

    @classmethod
    def random_rates(
        cls, topology: Topology, seed: int, until_s: float, period_s: float = PAPER_PERIOD_S
    ) -> Trace:
        """The paper's: each link gets another rate, 100 to 1000 Mbit/s, every three minutes."""
        rng = random.Random(seed)
        times = [period_s * number for number in range(1, math.floor(until_s / period_s) + 1)]
        return cls(
            tuple(
                SpecChange(time_s, link, "rate_mbit", random_rate(rng))
                for time_s in times
                for link in topology.links
            )
        )

    @classmethod
    def read(cls, path: Path, topology: Topology) -> Trace:
        """Read CSV; every row is checked against `topology`. Raises TestbedError that names the line."""
        return cls.from_text(read_text(path), topology, str(path))

    @classmethod
    def from_text(cls, text: str, topology: Topology, where: str = "trace") -> Trace:
        """As `read`, of a text."""
        try:
            rows = list(csv.reader(io.StringIO(text)))
        except csv.Error as error:
            raise TestbedError(f"{where}: not CSV ({error})") from None
        if not rows or [name.strip() for name in rows[0]] != HEADER:
            raise TestbedError(f"{where}: line 1: expected the header {','.join(HEADER)}")
        changes = []
        for number, row in enumerate(rows[1:], 2):
            if row:
                changes.append(_change(row, topology, f"{where}: line {number}"))
        return cls(tuple(sorted(changes, key=lambda change: change.time_s)))

    def to_text(self) -> str:
        """As CSV."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(HEADER)
        for change in self.changes:
            writer.writerow([f"{change.time_s:g}", *change.link, change.field, f"{change.value:g}"])
        return out.getvalue()

    def moments(self) -> Iterator[tuple[float, list[SpecChange]]]:
        """Changes that come at the same time, together."""
        moment: list[SpecChange] = []
        for change in self.changes:
            if moment and change.time_s != moment[0].time_s:
                yield moment[0].time_s, moment
                moment = []
            moment.append(change)
        if moment:
            yield moment[0].time_s, moment


def specs_after(topology: Topology, changes: list[SpecChange]) -> dict[Link, LinkSpec]:
    """The links whose properties these changes touch, as they are afterwards; cuts and heals aside."""
    specs: dict[Link, LinkSpec] = {}
    for change in changes:
        if change.field != CUT:
            old = specs.get(change.link) or topology.spec(change.link)
            specs[change.link] = old.with_value(change.field, change.value)
    return specs


def _change(row: list[str], topology: Topology, where: str) -> SpecChange:
    if len(row) != len(HEADER):
        raise TestbedError(f"{where}: {len(row)} columns (expected {len(HEADER)}: {','.join(HEADER)})")
    time_text, a, b, field, value_text = (cell.strip() for cell in row)
    try:
        time_s, value = float(time_text), float(value_text)
    except ValueError:
        raise TestbedError(
            f"{where}: time_s={time_text!r}, value={value_text!r} (expected two numbers)"
        ) from None
    if not 0 <= time_s < math.inf:
        raise TestbedError(f"{where}: time_s is {time_text} (expected seconds since the start)")
    try:
        spec = topology.spec((a, b))
        if field != CUT:
            spec.with_value(field, value)
        elif value not in (0.0, 1.0):
            raise TestbedError(f"cut={value:g} (expected 1 to cut, 0 to heal)")
    except TestbedError as error:
        raise TestbedError(f"{where}: {error}") from None
    if a > b and field.startswith("rate"):
        raise TestbedError(
            f"{where}: {field} has a direction, and links are named in order (name this one {b},{a})"
        )
    return SpecChange(time_s, link_name(a, b), field, value)
