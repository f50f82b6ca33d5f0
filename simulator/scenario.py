"""A scenario in YAML: a model, a cluster, what happens to it, and the systems that go through it side by side."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from scipy import stats

from ..protocols.errors import ConfigError
from ..protocols.plain_data import converted
from ..scheduler.elastic.cluster import Cluster, Worker
from ..scheduler.elastic.plan import Pipeline, cuts_of, even
from ..scheduler.elastic.policy import FaultClock
from ..scheduler.elastic.profile import LLAMA2, Profile, llama2, read
from ..scheduler.elastic.recoveries import Overheads, Recoveries
from ..scheduler.elastic.state import State
from .many_runs import in_processes
from .systems import (
    CHOOSES_BY,
    FAMILIES_OF,
    SYSTEMS,
    ByEquations,
    Choosing,
    FaultFree,
    Memory,
    Oobleck,
    Varuna,
)
from .training import HOUR_S, Incident, System, TrainingRun, failures, read_trace, trace_events, train

# Bounds beyond which sums of times are infinite or no numbers, or the work has no end.
Whole = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Positive = Annotated[float, msgspec.Meta(ge=1e-6, le=1e9)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Capacity = Annotated[float, msgspec.Meta(ge=1e-6)]
"""May be .inf: as much as is needed."""


class Failures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Either `per_hour`, the probability of each worker, or `trace`, a CSV of how many nodes there are."""

    per_hour: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    repair_hours: NotNegative = 0.0
    trace: str = ""


class SlowWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At `at_hours`, worker `worker` (a number) has this speed; 1 is the profile's."""

    worker: Annotated[int, msgspec.Meta(ge=0)]
    speed: Positive
    at_hours: NotNegative = 0.0


class Overhead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `recoveries.Overheads`, for all systems; `more_s`: by system, what each transition takes beside them."""

    edit_s: NotNegative = Overheads.edit_s
    restart_s: NotNegative = Overheads.restart_s
    checkpoint_s: NotNegative = Overheads.checkpoint_s
    redo_s: NotNegative = Overheads.redo_s
    hidden: bool = True
    more_s: dict[str, NotNegative] = {}


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of the file.

    `model`: llama2-7b, -13b, -34b or the path of a profile. `micro_batches`: of all pipelines together, of
    `samples` each. `workers_per_node`: go and come together in a trace. `bubble`: makes step times those of the
    papers' equations, as `systems.ByEquations` says; without it they are those of compiled programs.
    """

    name: str
    model: str
    pipelines: Whole
    stages: Whole
    micro_batches: Whole
    hours: Positive
    samples: Whole = 1
    tensor_parallel: Whole = 1
    workers_per_node: Whole = 1
    memory_gib: Capacity = math.inf
    rate_gbps: Positive = 200.0
    failures: Failures = Failures()
    slow: tuple[SlowWorker, ...] = ()
    overheads: Overhead = Overhead()
    systems: tuple[str, ...] = SYSTEMS
    templates: tuple[int, int] = (2, 16)
    bubble: NotNegative | None = None
    expected_between_s: Positive | None = None
    seeds: Whole = 1

    @property
    def workers(self) -> list[str]:
        return [f"w{number}" for number in range(self.pipelines * self.stages)]


def read_yaml(path: Path) -> Any:
    """Raises: ConfigError in one line that names the file."""
    try:
        return yaml.safe_load(path.read_bytes())  # Of bytes it says what is no UTF-8.
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML ({' '.join(str(error).split())})") from None


def load(path: Path) -> Scenario:
    """Raises: ConfigError that names the file, the key and what was expected."""
    plain = read_yaml(path)
    scenario = converted(plain, Scenario, str(path))
    unknown = {*scenario.systems, *scenario.overheads.more_s} - {*SYSTEMS}
    if unknown:
        raise ConfigError(f"{path}: systems: {sorted(unknown)} (expected of {', '.join(SYSTEMS)})")
    if any(each.worker >= len(scenario.workers) for each in scenario.slow):
        raise ConfigError(f"{path}: slow: worker (expected below {len(scenario.workers)})")
    if scenario.micro_batches < scenario.pipelines:
        raise ConfigError(
            f"{path}: micro_batches: {scenario.micro_batches}"
            f" (expected one for each of {scenario.pipelines} pipelines)"
        )
    if scenario.failures.trace:
        trace = path.parent / scenario.failures.trace
        failing = msgspec.structs.replace(scenario.failures, trace=str(trace))
        scenario = msgspec.structs.replace(scenario, failures=failing)
        # Else a trace that cannot be read, or of another cluster, is told by a process.
        events_of(scenario, seed=0)
    return scenario


def profile_named(name: str, tensor_parallel: int = 1) -> Profile:
    """A made-up profile (llama2-7b), or that in a file. Raises: ConfigError if it is neither."""
    size = name.removeprefix("llama2-")
    if size in LLAMA2:
        return llama2(size, tensor_parallel=tensor_parallel)
    path = Path(name)
    if not path.is_file():
        known = ", ".join(f"llama2-{each}" for each in LLAMA2)
        raise ConfigError(f"profile {name!r}: no such file (expected one, or a made-up one: {known})")
    return read(path.read_bytes(), name)


def first_state(scenario: Scenario, profile: Profile) -> State:
    """All pipelines alike, as far as the numbers allow."""
    names = iter(scenario.workers)
    cuts = cuts_of(even(len(profile.layers), scenario.stages))
    pipelines = tuple(
        Pipeline(tuple(next(names) for _ in range(scenario.stages)), cuts) for _ in range(scenario.pipelines)
    )
    return State(pipelines, even(scenario.micro_batches, scenario.pipelines), scenario.samples)


def events_of(scenario: Scenario, seed: int) -> list[Incident]:
    """What happens, by seed; the same for all systems."""
    workers = scenario.workers
    slow = [
        Incident(each.at_hours * HOUR_S, slow=((workers[each.worker], each.speed),)) for each in scenario.slow
    ]
    if scenario.failures.trace:
        size = scenario.workers_per_node
        nodes = [workers[start : start + size] for start in range(0, len(workers), size)]
        file = Path(scenario.failures.trace)
        return sorted(trace_events(read_trace(file), nodes, seed, str(file)) + slow)
    failing = scenario.failures
    return sorted(failures(workers, failing.per_hour, scenario.hours, seed, failing.repair_hours) + slow)


def systems_of(scenario: Scenario, known: dict[str, Memory] | None = None) -> Iterator[System]:
    """Each begins from the same state.

    Args:
        known: what systems of the same scenario have worked out so far, which they add to.
    """
    known = {} if known is None else known
    profile = profile_named(scenario.model, scenario.tensor_parallel)
    state = first_state(scenario, profile)
    between_s = scenario.expected_between_s or _between_s(scenario)
    for name in scenario.systems:
        if name not in known:
            known[name] = Memory(_recoveries(name, scenario, profile))
        if name == "fault-free":
            yield FaultFree(known[name].recoveries, state)
            continue
        more_s, by = scenario.overheads.more_s.get(name, 0.0), CHOOSES_BY.get(name, "step")
        yield Choosing(name, known[name], state, FaultClock(between_s), more_s, by)


def _recoveries(name: str, scenario: Scenario, profile: Profile) -> Recoveries:
    worker = Worker(1.0, scenario.memory_gib * 2**30)
    cluster = Cluster(dict.fromkeys(scenario.workers, worker), scenario.rate_gbps * 1e9)
    settings = msgspec.structs.asdict(scenario.overheads)
    settings.pop("more_s")
    base = {"oobleck": Oobleck, "varuna": Varuna}.get(name, Recoveries)
    kind = base if scenario.bubble is None else type(f"{base.__name__}ByEquations", (ByEquations, base), {})
    fewest, most = scenario.templates
    options: dict[str, Any] = {"fewest": fewest, "most": most} if base is Oobleck else {}
    found = kind(profile, cluster, Overheads(**settings), FAMILIES_OF.get(name, ("stay",)), **options)
    if isinstance(found, ByEquations):
        found.bubble = scenario.bubble or 0.0
    return found


def _between_s(scenario: Scenario) -> float:
    per_hour = -math.log1p(-scenario.failures.per_hour) * len(scenario.workers)
    return HOUR_S / per_hour if per_hour else HOUR_S


# --- running it ---


@functools.cache
def _memories(scenario: bytes) -> dict[str, Memory]:
    """Of this process, by scenario."""
    return {}


def run_seed(seed: int, scenario: Scenario) -> dict[str, TrainingRun]:
    """All systems through the same events, by name."""
    events, known = events_of(scenario, seed), _memories(msgspec.json.encode(scenario))
    return {
        each.name: train(each, scenario.workers, events, scenario.hours * HOUR_S)
        for each in systems_of(scenario, known)
    }


def runs_of(scenario: Scenario, processes: int | None = None) -> Iterator[dict[str, TrainingRun]]:
    """Every seed from 0 on, as they are done."""
    yield from in_processes(functools.partial(run_seed, scenario=scenario), range(scenario.seeds), processes)


def run(scenario: Scenario, processes: int | None = None) -> list[dict[str, TrainingRun]]:
    """Every seed from 0 on."""
    return list(runs_of(scenario, processes))


def summary(scenario: Scenario, runs: Sequence[dict[str, TrainingRun]]) -> dict[str, Any]:
    """Means over seeds, and how chaosnet compares with each: ratios of averages, with their 95 % intervals."""
    systems = {}
    for name in scenario.systems:
        of = [each[name] for each in runs]
        families: Counter[str] = sum((each.families for each in of), Counter())
        systems[name] = {
            "samples_per_s": statistics.fmean(each.samples_per_s for each in of),
            "stood_share": statistics.fmean(each.stood_s / each.seconds for each in of),
            "recoveries": {family: count / len(of) for family, count in sorted(families.items())},
        }
    ratios = {
        f"{ours}/{name}": interval([each[ours].samples / max(each[name].samples, 1e-9) for each in runs])
        for ours in ("chaosnet", "chameleon")
        for name in scenario.systems
        if ours in scenario.systems and name not in (ours, "fault-free")
    }
    return {"scenario": scenario.name, "seeds": len(runs), "systems": systems, "ratios": ratios}


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and 95 % confidence interval (Student's t); of one value, that value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": mean, "low": mean, "high": mean}
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}
