"""What the planner knows of the workers and the links between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...protocols.errors import PlanInfeasible


@dataclass(frozen=True, slots=True)
class Worker:
    """`speed`: 1 is what the profile was taken on; half of it takes twice as long.

    `nic_out_bps`, `nic_in_bps`: what all its links together can send and receive, bits per second.
    """

    speed: float = 1.0
    memory_bytes: float = float("inf")
    nic_out_bps: float = float("inf")
    nic_in_bps: float = float("inf")

    def __post_init__(self) -> None:
        if not self.speed > 0 or not self.memory_bytes > 0:
            raise PlanInfeasible(
                f"worker: speed {self.speed:g}, memory {self.memory_bytes:g} bytes (expected > 0)"
            )
        if not self.nic_out_bps > 0 or not self.nic_in_bps > 0:
            raise PlanInfeasible(
                f"worker: nic_out {self.nic_out_bps:g}, nic_in {self.nic_in_bps:g} bit/s (expected > 0)"
            )


@dataclass(frozen=True)
class Cluster:
    """Workers by name. Links without a measurement are as `rate_bps` and `latency_s` say.

    `rates_bps`: measured, from the first to the second; 0: there is no link, and whatever needs one never ends.
    """

    workers: Mapping[str, Worker]
    rate_bps: float = 200e9
    latency_s: float = 1e-5
    rates_bps: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def rate(self, source: str, to: str) -> float:
        """Bits per second."""
        return self.rates_bps.get((source, to), self.rate_bps)

    def clocked(self, clocks: Mapping[str, float]) -> Cluster:
        """With clocks raised, by worker."""
        if not clocks:
            return self
        workers = dict(self.workers)
        for name, by in clocks.items():
            workers[name] = replace(workers[name], speed=workers[name].speed * by)
        return replace(self, workers=workers)

    def transfer_s(self, source: str, to: str, size_bytes: float) -> float:
        """Seconds until `size_bytes` have come over an idle link."""
        return self.latency_s + seconds(size_bytes, self.rate(source, to)) if source != to else 0.0


def seconds(size_bytes: float, rate_bps: float) -> float:
    """That bytes take at a rate; infinite where nothing passes."""
    return 8 * size_bytes / rate_bps if rate_bps else math.inf


def alike(
    names: list[str] | tuple[str, ...], memory_bytes: float = float("inf"), rate_bps: float = 200e9
) -> Cluster:
    """A cluster whose workers differ in nothing."""
    return Cluster(dict.fromkeys(names, Worker(1.0, memory_bytes)), rate_bps)
