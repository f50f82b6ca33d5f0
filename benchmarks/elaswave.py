"""The experiments of ElasWave (Sec. 7) on what losses, traces and a slow worker leave of the throughput.

A worker is four NPUs (TP 4), a node has two workers. Nothing is measured on accelerators: models are made-up profiles
of Llama 2. Pipelines begin with layers split evenly. There are fewer micro-batches than in Table 2
(`--per-pipeline`), so that a table takes a minute: a pipeline's ramp, (P - 1) / M, is then larger for everybody.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from ..scheduler.elastic.profile import llama2
from ..scheduler.elastic.recoveries import FAMILIES, Recoveries
from ..scheduler.elastic.state import State
from ..settings.options import Amount, OneOf, Several, Whole
from ..simulator.many_runs import in_processes
from ..simulator.scenario import Failures, Overhead, Scenario, events_of, interval, summary, systems_of
from ..simulator.systems import Memory
from ..simulator.training import HOUR_S, made_trace, read_trace, train
from .figures import COLOURS, Found, bars, legend_below, outputs, publish, table
from .recoveries_of import began, fastest, step_s


class Workload(NamedTuple):
    """A row of Table 2: workers are TP groups."""

    stages: int
    pipelines: int
    samples: int
    """In a micro-batch."""
    batch: int


WORKLOADS = {
    "7b": Workload(3, 8, 4, 8192), "13b": Workload(6, 4, 2, 2048), "34b": Workload(8, 3, 1, 768),
}  # fmt: skip
TENSOR_PARALLEL, WORKERS_PER_NODE = 4, 2
NPU_GIB = 32.0
SYSTEM_FAMILIES = {
    "elaswave": ("resize", "layers", "clocks"),
    "recycle": ("reroute",),
    "torchft": ("drop",),
    "chaosnet": tuple(each for each in FAMILIES if each != "checkpoint"),
}
TECHNIQUES = {
    "resize": ("resize",),
    "+ layers": ("resize", "layers"),
    "+ clocks": SYSTEM_FAMILIES["elaswave"],
}


MODELS = Several(OneOf(tuple(WORKLOADS)))


def started(model: str, per_pipeline: int) -> tuple[Recoveries, State]:
    """A row of Table 2 with so many micro-batches a pipeline, at most those of the table."""
    work = WORKLOADS[model]
    most = work.batch // work.samples // work.pipelines
    profile = llama2(model, tensor_parallel=TENSOR_PARALLEL)
    total = min(per_pipeline, most) * work.pipelines
    return began(profile, work.stages, work.pipelines, total, work.samples, NPU_GIB)


# --- Fig. 11 and 12a ---

PAPER_11 = {"elaswave/torchft": 1.60, "elaswave/recycle": 1.35}
OPEN_11 = (
    "all bars but one (34B, one node: 1.60 over TorchFT, 1.35 over ReCycle), and on which stages a node's two workers"
    " are. Losing 2 of 24 workers, 22 / 16 = 1.375 is what capacity allows over TorchFT, which keeps 16, unless"
    " clocks are raised or bubbles become fewer."
)
OPEN_12A = (
    "all bars, the definition of LSE (here: share of throughput over share of workers), and which clocks were"
    " raised."
)


def _lost(model: str, nodes: int, per_pipeline: int) -> Found:
    """Shares of the throughput that are left, by family of what the first nodes' loss leaves."""
    recoveries, state = started(model, per_pipeline)
    order = [worker for each in state.pipelines for worker in each.workers]
    gone = order[: nodes * WORKERS_PER_NODE]
    whole_s = step_s(recoveries, state)
    found = fastest(recoveries, state.after(gone, ()))
    families = {family: whole_s / each.step_s for family, each in found.items() if family != "checkpoint"}
    own = _own_clocks(recoveries, state.after(gone, ()), whole_s)
    return {
        "model": model, "nodes": nodes, "lost": len(gone), "workers": len(order), "families": families | own,
        "capacity": 1 - len(gone) / len(order),
    }  # fmt: skip


def _own_clocks(recoveries: Recoveries, hit: State, whole_s: float) -> dict[str, float]:
    """Clocks as ElasWave raises them, without ours on top of other layouts."""
    alone = recoveries.on(recoveries.cluster)
    alone.families = SYSTEM_FAMILIES["elaswave"]
    found = fastest(alone, hit).get("clocks")
    return {"elaswave clocks": whole_s / found.step_s} if found else {}


def _best(row: Found, families: Sequence[str]) -> float | None:
    """Of some families; ElasWave's have its own clocks."""
    shares = row["families"]
    own = "layout" not in families
    names = ["elaswave clocks" if own and each == "clocks" else each for each in families]
    return max((shares[name] for name in names if name in shares), default=None)


def measure_fig11(
    models: Sequence[str], nodes: Sequence[int], per_pipeline: int, processes: int | None
) -> Found:
    """Throughput after losses, as a share of that before, by system.

    `capacity_ratio`: what the workers that are left allow over TorchFT, with clocks as they were.
    """
    cases = [(model, count) for model in models for count in nodes]
    rows = []
    for row in in_processes(functools.partial(_case, per_pipeline=per_pipeline), cases, processes):
        shares = {name: _best(row, families) for name, families in SYSTEM_FAMILIES.items()}
        ours = shares["elaswave"]
        row |= {"systems": shares, "lse": {
            name: share / row["capacity"] for name, share in shares.items() if share is not None
        }}  # fmt: skip
        row["techniques"] = {name: (_best(row, families) or 0.0) / row["capacity"]
                             for name, families in TECHNIQUES.items()}  # fmt: skip
        stands = row["model"] == "34b" and row["nodes"] == 1
        row["ratios"] = {f"elaswave/{name}": _ratio(ours, shares[name]) for name in ("torchft", "recycle")}
        row["capacity_ratio"] = _ratio(row["capacity"], shares["torchft"])
        row["paper"] = PAPER_11 if stands else None
        rows.append(row)
    return {"rows": rows, "per_pipeline": per_pipeline, "paper": PAPER_11, "open": OPEN_11}


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def _case(case: tuple[str, int], per_pipeline: int) -> Found:
    return _lost(*case, per_pipeline)


def _draw_fig11(figure: Any, found: Found) -> None:
    axes, rows = figure.subplots(), found["rows"]
    groups = [f"{row['model']}\n-{row['nodes']} nodes" for row in rows]
    series = {
        name: [row["systems"][name] for row in rows]
        for name in ("torchft", "recycle", "elaswave", "chaosnet")
    }
    bars(axes, groups, {**series, "capacity": [row["capacity"] for row in rows]})
    axes.set(ylabel="throughput after / before", title="ElasWave, Fig. 11")
    legend_below(figure, axes)


def _draw_fig12a(figure: Any, found: Found) -> None:
    axes, rows = figure.subplots(), found["rows"]
    groups = [f"{row['model']}\n-{row['nodes']} nodes" for row in rows]
    bars(axes, groups, {name: [row["techniques"][name] for row in rows] for name in TECHNIQUES})
    axes.axhline(found["paper"], color="black", label="paper: all, at least")
    axes.set(ylabel="linear scaling efficiency", title="ElasWave, Fig. 12a")
    legend_below(figure, axes)


def _sized(command: Any) -> Any:
    command = click.option("--processes", type=Whole(1, 1024), help="Default: one per core.")(command)
    command = click.option(
        "--per-pipeline",
        type=Whole(1, 10_000),
        default=64,
        show_default=True,
        help="Micro-batches; Table 2: 256.",
    )(command)
    command = click.option(
        "--nodes", type=Several(Whole(1, 11)), default="1,2,3", show_default=True, help="Lost, of 12."
    )(command)
    return click.option("--models", type=MODELS, default="7b,13b,34b", show_default=True)(command)


@click.command("elaswave-fig11")
@_sized
@outputs
def fig11_command(
    models: tuple[str, ...], nodes: tuple[int, ...], per_pipeline: int, processes: int | None, json_file: Path | None,
    plot_file: Path | None,
) -> None:  # fmt: skip
    """Throughput after nodes are lost, by system."""
    found = measure_fig11(models, nodes, per_pipeline, processes)
    systems = [*SYSTEM_FAMILIES]
    head = (
        "model",
        "nodes lost",
        *systems,
        "capacity",
        "LSE",
        "E/TorchFT",
        "capacity/TorchFT",
        "paper",
        "E/ReCycle",
        "paper",
    )
    rows = [
        (row["model"], row["nodes"], *(row["systems"][name] for name in systems), row["capacity"],
         row["lse"].get("elaswave"), row["ratios"]["elaswave/torchft"], row["capacity_ratio"],
         (row["paper"] or {}).get("elaswave/torchft"), row["ratios"]["elaswave/recycle"],
         (row["paper"] or {}).get("elaswave/recycle"))
        for row in found["rows"]
    ]  # fmt: skip
    table(head, rows)
    publish(found, json_file, plot_file, _draw_fig11)


@click.command("elaswave-fig12a")
@_sized
@outputs
def fig12a_command(
    models: tuple[str, ...], nodes: tuple[int, ...], per_pipeline: int, processes: int | None, json_file: Path | None,
    plot_file: Path | None,
) -> None:  # fmt: skip
    """Linear scaling efficiency, by technique."""
    found = measure_fig11(models, nodes, per_pipeline, processes)
    found |= {"paper": 0.89, "open": OPEN_12A}
    rows = [
        (row["model"], row["nodes"], *row["techniques"].values(), row["lse"].get("chaosnet"), found["paper"])
        for row in found["rows"]
    ]
    table(("model", "nodes lost", *TECHNIQUES, "chaosnet", "paper, at least"), rows)
    publish(found, json_file, plot_file, _draw_fig12a)


# --- Fig. 14 ---

MADE = ("plateau", "shrink")
NODES, SECONDS, SEED = 12, 32_400.0, 1
TRACE_SYSTEMS = ("fault-free", "chaosnet", "elaswave", "recycle", "torchft")
PAPER_14 = {"elaswave/recycle": (1.10, 1.20), "elaswave/torchft": (1.50, 1.70)}
OPEN_14 = (
    "the traces (ours are made up), how long they are (a restart of 20 s, TorchFT's, is much of 20 minutes and little"
    " of 9 hours), all other costs, and which workers go (drawn from the seed)."
)


def write_made_trace(path: Path, kind: str) -> Path:
    """As in examples/: of 12 nodes and 9 hours, from one seed."""
    lines = [f"{at_s:g},{nodes}\n" for at_s, nodes in made_trace(kind, NODES, SECONDS, SEED)]
    arguments = f'"{kind}", nodes={NODES}, seconds={SECONDS:g}, seed={SEED}'
    path.write_text(
        f"# Made up, by simulator.training.made_trace({arguments}): from no provider.\n"
        + "time_s,nodes\n" + "".join(lines)
    )  # fmt: skip
    return path


def measure_fig14(
    traces: Sequence[Path], models: Sequence[str], minutes: Sequence[float], per_pipeline: int, seeds: int,
    processes: int | None = None,
) -> Found:  # fmt: skip
    """Time-averaged throughput on traces, by system and model.

    `minutes`: a trace is played over so many; 0: as long as it is. What a restart costs hangs on that.
    """
    cases = [(trace, model) for trace in traces for model in models]
    played = functools.partial(_played, minutes=minutes, per_pipeline=per_pipeline, seeds=seeds)
    rows = [row for of in in_processes(played, cases, processes) for row in of]
    paper = {name: list(values) for name, values in PAPER_14.items()}
    return {"rows": rows, "paper": paper, "open": OPEN_14}


def _played(case: tuple[Path, str], minutes: Sequence[float], per_pipeline: int, seeds: int) -> list[Found]:
    """One trace and model, at all speeds: what is proposed after a loss is the same at all of them."""
    trace, model = case
    counts, work = read_trace(trace), WORKLOADS[model]
    known: dict[str, Memory] = {}
    rows = []
    for each in minutes:
        whole_s = counts[-1][0] * (1 + 1 / len(counts))
        seconds = 60 * each or whole_s
        scenario = Scenario(
            name=f"{trace.stem}, {model}, {seconds / 60:.0f} min", model=f"llama2-{model}",
            pipelines=work.pipelines, stages=work.stages, micro_batches=per_pipeline * work.pipelines,
            samples=work.samples, hours=seconds / HOUR_S, tensor_parallel=TENSOR_PARALLEL,
            workers_per_node=WORKERS_PER_NODE, memory_gib=NPU_GIB, failures=Failures(trace=str(trace)),
            systems=TRACE_SYSTEMS, seeds=seeds, overheads=Overhead(more_s={"torchft": 20.0}),
            expected_between_s=seconds / len(counts),
        )  # fmt: skip
        runs = []
        for seed in range(seeds):
            events = [
                event._replace(at_s=event.at_s * seconds / whole_s) for event in events_of(scenario, seed)
            ]
            runs.append({
                system.name: train(system, scenario.workers, events, seconds)
                for system in systems_of(scenario, known)
            })  # fmt: skip
        rows.append({
            **summary(scenario, runs), "trace": trace.stem, "model": model, "minutes": seconds / 60,
            "elaswave": {
                f"elaswave/{name}": interval([of["elaswave"].samples / of[name].samples for of in runs])["mean"]
                for name in ("recycle", "torchft")
            },
            "over_time": {name: [(span.from_s / 60, span.samples_per_s) for span in of.spans]
                          for name, of in runs[0].items()},
        })  # fmt: skip
    return rows


def _draw_fig14(figure: Any, found: Found) -> None:
    rows = found["rows"]
    models = len({row["model"] for row in rows})
    rows = [row for row in rows if row["minutes"] == rows[0]["minutes"]]
    all_axes = figure.subplots(len(rows) // models, models, squeeze=False)
    for axes, row in zip(all_axes.flat, rows, strict=True):
        for system, spans in row["over_time"].items():
            at, values = zip(*spans, (row["minutes"], spans[-1][1]), strict=True)
            axes.step(at, values, where="post", label=system, color=COLOURS[system], alpha=0.8)
        axes.set_title(row["scenario"], fontsize=9)
        axes.set_ylim(0, None)
        axes.grid(alpha=0.3)
    for axes in all_axes[:, 0]:
        axes.set_ylabel("samples a second")
    for axes in all_axes[-1]:
        axes.set_xlabel("minutes (seed 0)")
    legend_below(figure, all_axes[0, 0])


@click.command("elaswave-fig14")
@click.option("--trace", "traces", type=click.Path(exists=True, dir_okay=False, path_type=Path), multiple=True,
              help="CSV of time_s,nodes; may be repeated. Default: those of examples/.")  # fmt: skip
@click.option("--models", type=MODELS, default="7b,13b,34b", show_default=True)
@click.option(
    "--minutes",
    type=Several(Amount(0, 100_000)),
    default="20,0",
    show_default=True,
    help="To play a trace in; 0: its own time.",
)
@click.option(
    "--per-pipeline", type=Whole(1, 10_000), default=8, show_default=True, help="Micro-batches; Table 2: 256."
)
@click.option("--seeds", type=Whole(1, 10_000), default=2, show_default=True)
@click.option("--processes", type=Whole(1, 1024), help="Default: one per core.")
@outputs
def fig14_command(
    traces: tuple[Path, ...], models: tuple[str, ...], minutes: tuple[float, ...], per_pipeline: int,
    seeds: int, processes: int | None, json_file: Path | None, plot_file: Path | None,
) -> None:  # fmt: skip
    """Throughput on traces of spot instances."""
    with tempfile.TemporaryDirectory() as folder:
        files = list(traces) or [write_made_trace(Path(folder) / f"trace-{kind}.csv", kind) for kind in MADE]
        found = measure_fig14(files, models, minutes, per_pipeline, seeds, processes)
    rows = [
        (row["trace"], row["model"], round(row["minutes"]),
         *(row["systems"][name]["samples_per_s"] for name in TRACE_SYSTEMS),
         row["elaswave"]["elaswave/recycle"], "1.10-1.20", row["elaswave"]["elaswave/torchft"], "1.50-1.70",
         row["ratios"]["chaosnet/elaswave"]["mean"])
        for row in found["rows"]
    ]  # fmt: skip
    head = ("trace", "model", "minutes", *TRACE_SYSTEMS, "E/ReCycle", "paper", "E/TorchFT", "paper", "ours/E")
    table(head, rows)
    publish(found, json_file, plot_file, _draw_fig14)


# --- Fig. 15a ---

SLOWED = {"low": (0.931, 0.951), "medium": (0.865, 0.937), "high": (0.809, 0.905)}
OPEN_15A = (
    "model, layout and how slow the worker is: here its speed is such that the throughput falls to what the paper"
    " has, as far as single layers and orders of execution allow."
)


def measure_fig15a(models: Sequence[str], per_pipeline: int) -> Found:
    """One worker slowed until the throughput is the paper's; then what ElasWave, and all families, make of it.

    `capacity`: of all workers' speeds. Raised clocks, and fewer bubbles than there were, may exceed it.
    """
    rows = []
    for model in models:
        recoveries, state = started(model, per_pipeline)
        whole_s = step_s(recoveries, state)
        for level, (degraded, paper) in SLOWED.items():
            speed = _speed(recoveries, state, whole_s / degraded)
            slow = _with_slow(recoveries, state, speed)
            found = fastest(slow, state)
            own = slow.on(slow.cluster)
            own.families = ("stay", *SYSTEM_FAMILIES["elaswave"])
            elaswave = fastest(own, state)
            rows.append({
                "model": model, "level": level, "speed": speed, "degraded": whole_s / step_s(slow, state),
                "layers": whole_s / elaswave["layers"].step_s,
                "elaswave": max(whole_s / each.step_s for each in elaswave.values()),
                "chaosnet": max(whole_s / each.step_s for name, each in found.items() if name != "checkpoint"),
                "capacity": 1 - (1 - speed) / len(state.held), "paper_degraded": degraded, "paper": paper,
            })  # fmt: skip
    return {"rows": rows, "paper": {level: values[1] for level, values in SLOWED.items()}, "open": OPEN_15A}


def _with_slow(recoveries: Recoveries, state: State, speed: float) -> Recoveries:
    victim = state.pipelines[0].workers[len(state.pipelines[0].workers) // 2]
    workers = dict(recoveries.cluster.workers)
    workers[victim] = replace(workers[victim], speed=speed)
    return recoveries.on(replace(recoveries.cluster, workers=workers))


def _speed(recoveries: Recoveries, state: State, target_s: float) -> float:
    """At which a step takes that long: it does not get longer with speed."""
    low, high = 0.3, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        if step_s(_with_slow(recoveries, state, middle), state) > target_s:
            low = middle
        else:
            high = middle
    return high


def _draw_fig15a(figure: Any, found: Found) -> None:
    axes, rows = figure.subplots(), found["rows"]
    groups = [f"{row['model']}\n{row['level']}" for row in rows]
    names = ("degraded", "elaswave", "chaosnet", "paper", "capacity")
    bars(axes, groups, {name: [row[name] for row in rows] for name in names})
    axes.set(ylabel="throughput / that without a slow worker", title="ElasWave, Fig. 15a")
    legend_below(figure, axes)


@click.command("elaswave-fig15a")
@click.option("--models", type=MODELS, default="7b,13b,34b", show_default=True)
@click.option(
    "--per-pipeline",
    type=Whole(1, 10_000),
    default=64,
    show_default=True,
    help="Micro-batches; Table 2: 256.",
)
@outputs
def fig15a_command(
    models: tuple[str, ...], per_pipeline: int, json_file: Path | None, plot_file: Path | None
) -> None:
    """One slow worker, at three levels."""
    found = measure_fig15a(models, per_pipeline)
    head = (
        "model",
        "level",
        "speed",
        "degraded",
        "layers",
        "elaswave",
        "chaosnet",
        "capacity",
        "paper: degraded",
        "paper",
    )
    table(head, [(*row.values(),) for row in found["rows"]])
    publish(found, json_file, plot_file, _draw_fig15a)
