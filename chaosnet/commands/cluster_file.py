"""The file that `chaosnet plan` reads: which workers train in which pipelines, on what machines, over which links."""

from __future__ import annotations

import msgspec

from ..protocols.errors import ConfigError, PlanInfeasible
from ..protocols.plain_data import converted
from ..scheduler.elastic.cluster import Cluster, Worker
from ..scheduler.elastic.plan import Pipeline, cuts_of, even
from ..scheduler.elastic.state import State
from ..simulator.scenario import Capacity, Positive, Whole


class MachineEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What differs for a worker: speed (1: as in the profile), memory, and its network card, each way."""

    speed: Positive = 1.0
    memory_gib: Capacity | None = None
    nic_gbps: Capacity | None = None


class MeasuredLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"source": "from"}):
    """The rate between two workers, one way."""

    source: str
    to: str
    rate_gbps: Positive


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of the file.

    Attributes:
        pipelines: Workers in the order of their stages.
        micro_batches: Of a step, over all pipelines, with `samples` each.
        layers: By pipeline, the number of layers of each stage; default: even.
        idle: Workers in no pipeline.
        workers: What differs for a worker, by name.
        memory_gib, rate_gbps: Of workers and links for which nothing else is said.
        links: Measured rates.
        between_faults_hours: The expected time between two faults.
    """

    pipelines: tuple[tuple[str, ...], ...]
    micro_batches: Whole
    samples: Whole = 1
    layers: tuple[tuple[Whole, ...], ...] = ()
    idle: tuple[str, ...] = ()
    workers: dict[str, MachineEntry] = {}
    memory_gib: Capacity = float("inf")
    rate_gbps: Positive = 200.0
    links: tuple[MeasuredLink, ...] = ()
    between_faults_hours: Positive = 1.0


def read(data: object, layers: int, name: str = "cluster") -> tuple[Cluster, State, float]:
    """The cluster, how it trains a model of so many layers, and the expected seconds between faults.

    Args:
        data: The file's content, as YAML or JSON gives it.
        name: The file, for errors.
    Raises: ConfigError that names the key, the value and what was expected; PlanInfeasible for another model.
    """
    file = converted(data, ClusterFile, name)
    busy = [worker for each in file.pipelines for worker in each]
    names = [*busy, *file.idle]
    _check(name, file, names, layers)
    workers = {worker: _worker(file, worker) for worker in names}
    rates = {(each.source, each.to): each.rate_gbps * 1e9 for each in file.links}
    sizes = file.layers or tuple(even(layers, len(each)) for each in file.pipelines)
    pipelines = tuple(Pipeline(each, cuts_of(of)) for each, of in zip(file.pipelines, sizes, strict=True))
    counts = even(file.micro_batches, len(pipelines))
    state = State(pipelines, counts, file.samples, idle=frozenset(file.idle))
    return Cluster(workers, file.rate_gbps * 1e9, rates_bps=rates), state, file.between_faults_hours * 3600


def _worker(file: ClusterFile, name: str) -> Worker:
    machine = file.workers.get(name, MachineEntry())
    nic_bps = (machine.nic_gbps or float("inf")) * 1e9
    memory_gib = file.memory_gib if machine.memory_gib is None else machine.memory_gib
    return Worker(machine.speed, memory_gib * 2**30, nic_bps, nic_bps)


def _check(name: str, file: ClusterFile, names: list[str], layers: int) -> None:
    twice = sorted({worker for worker in names if names.count(worker) > 1})
    if twice:
        raise ConfigError(f"{name}: {twice[0]!r} is there twice (expected one place for each worker)")
    mentioned = [*file.workers, *(end for each in file.links for end in (each.source, each.to))]
    unknown = sorted({*mentioned} - {*names})
    if unknown:
        known = ", ".join(names)
        raise ConfigError(f"{name}: {unknown[0]!r} (expected a worker of pipelines or idle: {known})")
    if not file.pipelines or any(not 1 <= len(each) <= layers for each in file.pipelines):
        raise ConfigError(f"{name}: pipelines (expected at least one, of 1 to {layers} workers, one a stage)")
    if file.layers and [len(each) for each in file.layers] != [len(each) for each in file.pipelines]:
        raise ConfigError(f"{name}: layers (expected a number for each stage of each pipeline)")
    for number, each in enumerate(file.layers):
        if sum(each) != layers:
            raise PlanInfeasible(
                f"{name}: layers of pipeline {number}: {sum(each)} (the profile has {layers})"
            )
    if file.micro_batches < len(file.pipelines):
        raise ConfigError(
            f"{name}: micro_batches: {file.micro_batches} (expected one for each pipeline: {len(file.pipelines)})"
        )
