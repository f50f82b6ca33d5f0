"""Chameleon, Fig. 7 and 8: 32 workers that fail for nine hours.

Fig. 8 has two parts. In the first everybody has the same costs, and step times are those of compiled programs. In
the second, *calibrated* one step times are those of the paper's equations, and the two parameters that its text
leaves out are set to values with which its ratios come out; a sweep around them says how much hangs on them.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from pathlib import Path
from typing import Any

import click
import msgspec

from ..protocols.errors import ConfigError
from ..settings.options import Amount, Whole
from ..simulator.many_runs import in_processes
from ..simulator.scenario import Failures, Overhead, Scenario, events_of, interval, run, summary
from ..simulator.training import HOUR_S, TrainingRun
from .figures import COLOURS, Found, outputs, publish, table

PAPER = {"chameleon/oobleck": 1.229, "chameleon/recycle": 1.355}
BUBBLE = 0.55
"""Of Eq. 13's last term, what is left of it in ReCycle's (and everybody's) rerouting: calibrated."""
OOBLECK_S = 240.0
"""Seconds of an Oobleck reconfiguration beside the overheads of all: calibrated."""
SWEEP_BUBBLES = (0.1, 0.3, 0.55, 1.0)
SWEEP_OOBLECK_S = (0.0, 120.0, 240.0, 320.0)
NPU_GIB, TEMPLATES = 64.0, (3, 16)
"""Without ZeRO three workers are the fewest that hold the model; Oobleck has templates from there on."""
SYSTEMS = ("fault-free", "chaosnet", "chameleon", "elaswave", "recycle", "oobleck")
OPEN_7 = "whether workers come back (here: never), and the seed; at 10 % an hour 12.4 of 32 are left after 9 hours."
OPEN_8 = (
    "layout (here PP 4, DP 8), batch (64), seeds, what an Oobleck reconfiguration takes, and how much of rerouted"
    " work ReCycle hides in bubbles: with Eq. 13 as printed, or with equal costs for all, other ratios come out."
)


def scenario(
    workers: int, stages: int, micro_batches: int, hours: float, per_hour: float, seeds: int
) -> Scenario:
    """Equal costs for everybody. Raises: ConfigError if nobody could begin."""
    if workers < stages:
        raise ConfigError(
            f"--workers: {workers} for a pipeline of {stages} stages (expected as many at least)"
        )
    return Scenario(
        name="equal costs", model="llama2-7b", pipelines=workers // stages, stages=stages,
        micro_batches=micro_batches, hours=hours, failures=Failures(per_hour=per_hour), systems=SYSTEMS,
        seeds=seeds, memory_gib=NPU_GIB, templates=TEMPLATES,
    )  # fmt: skip


def calibrated(equal: Scenario, bubble: float, oobleck_s: float, seeds: int) -> Scenario:
    """Step times of the paper's equations, and the two parameters."""
    return msgspec.structs.replace(
        equal, name=f"calibrated: bubble {bubble:g}, Oobleck {oobleck_s:g} s", bubble=bubble, seeds=seeds,
        overheads=Overhead(more_s={"oobleck": oobleck_s}),
    )  # fmt: skip


# --- Fig. 7 ---


def measure_fig7(equal: Scenario) -> Found:
    """Workers that are left at every hour."""
    hours = [min(float(hour), equal.hours) for hour in range(int(equal.hours) + 1)]
    total, per_hour = len(equal.workers), equal.failures.per_hour
    curves = [
        [(event.at_s, total - number) for number, event in enumerate(events_of(equal, seed), 1)]
        for seed in range(equal.seeds)
    ]
    at_hours = [[_left_at(curve, hour * HOUR_S, total) for hour in hours] for curve in curves]
    return {
        "workers": total, "hours": hours, "seeds": equal.seeds, "one_seed": curves[0],
        "mean": [statistics.fmean(column) for column in zip(*at_hours, strict=True)],
        "least": [min(column) for column in zip(*at_hours, strict=True)],
        "most": [max(column) for column in zip(*at_hours, strict=True)],
        "expected": [total * (1 - per_hour) ** hour for hour in hours],
        "paper": None, "open": OPEN_7,
    }  # fmt: skip


def _left_at(curve: list[tuple[float, int]], at_s: float, total: int) -> int:
    return min((left for when_s, left in curve if when_s <= at_s), default=total)


def _draw_fig7(figure: Any, found: Found) -> None:
    axes = figure.subplots()
    one = [(0.0, found["workers"]), *((at / HOUR_S, left) for at, left in found["one_seed"])]
    one.append((found["hours"][-1], one[-1][1]))
    axes.step(*zip(*one, strict=True), where="post", label="seed 0", color="tab:blue")
    axes.fill_between(found["hours"], found["least"], found["most"], alpha=0.15, label="all seeds")
    axes.plot(found["hours"], found["mean"], "o", color="tab:blue", label="mean of seeds")
    axes.plot(found["hours"], found["expected"], "k:", label="expected")
    axes.set(xlabel="hours", ylabel="workers that are left", ylim=(0, None), title="Chameleon, Fig. 7")
    axes.grid(alpha=0.3)
    axes.legend()


# --- Fig. 8 ---


def measure_fig8(
    equal: Scenario, bubble: float, oobleck_s: float, sweep_seeds: int, processes: int | None = None
) -> Found:
    """Both parts, with one seed's throughput over time; then the sweep (none of 0 seeds)."""
    parts: Found = {}
    for name, each in (("equal", equal), ("calibrated", calibrated(equal, bubble, oobleck_s, equal.seeds))):
        runs = list(run(each, processes))
        parts[name] = {
            **summary(each, runs),
            "against_best": interval([_against_best(of) for of in runs]),
            "over_time": {
                system: [(span.from_s / HOUR_S, span.samples_per_s) for span in of.spans]
                for system, of in runs[0].items()
            },
            "hours": each.hours,
        }
    points = [*itertools.product(SWEEP_BUBBLES, SWEEP_OOBLECK_S)] if sweep_seeds else []
    swept = functools.partial(_swept, equal=equal, seeds=sweep_seeds)
    sweep = list(in_processes(swept, points, processes))
    parameters = {"bubble": bubble, "oobleck_s": oobleck_s}
    return {**parts, "parameters": parameters, "sweep": sweep, "paper": PAPER, "open": OPEN_8}


def _against_best(runs: dict[str, TrainingRun]) -> float:
    """Of ours over the better one of Chameleon and ElasWave, in one seed."""
    return runs["chaosnet"].samples / max(runs["chameleon"].samples, runs["elaswave"].samples)


def _swept(point: tuple[float, float], equal: Scenario, seeds: int) -> Found:
    bubble, oobleck_s = point
    few = msgspec.structs.replace(
        calibrated(equal, bubble, oobleck_s, seeds), systems=("chaosnet", "chameleon", "recycle", "oobleck")
    )
    ratios = summary(few, run(few, 1))["ratios"]
    names = (*PAPER, "chaosnet/chameleon")
    return {"bubble": bubble, "oobleck_s": oobleck_s, **{name: ratios[name]["mean"] for name in names}}


def _draw_fig8(figure: Any, found: Found) -> None:
    both = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(both, ("equal", "calibrated"), strict=True):
        part = found[name]
        for system, spans in part["over_time"].items():
            at, values = zip(*spans, (part["hours"], spans[-1][1]), strict=True)
            width = 2.0 if system == "chaosnet" else 1.2
            axes.step(
                at, values, where="post", label=system, color=COLOURS[system], linewidth=width, alpha=0.8
            )
        ratios = "\n".join(f"{of}: {part['ratios'][of]['mean']:.3f} (paper {PAPER[of]})" for of in PAPER)
        axes.set_title(f"{part['scenario']}\n{ratios}", fontsize=9)
        axes.set_xlabel("hours (seed 0)")
        axes.grid(alpha=0.3)
    both[0].set(ylabel="samples a second", ylim=(0, None))
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)


def _tell_fig8(found: Found) -> None:
    for name in ("equal", "calibrated"):
        part = found[name]
        click.echo(f"\n{part['scenario']}, {part['seeds']} seeds")
        rows = [
            (system, of["samples_per_s"], 100 * of["stood_share"], _recoveries(of["recoveries"]))
            for system, of in part["systems"].items()
        ]
        table(("system", "samples/s", "stood %", "recoveries a run"), rows)
        click.echo("")
        shown = {**part["ratios"], "chaosnet/best of chameleon, elaswave": part["against_best"]}
        ratios = [(of, each["mean"], each["low"], each["high"], PAPER.get(of)) for of, each in shown.items()]
        table(("ratio of averages", "mean", "95 % from", "to", "paper"), ratios)
    if found["sweep"]:
        click.echo("\nSweep of what was calibrated (means)")
        table(
            ("bubble", "Oobleck s", *PAPER, "chaosnet/chameleon"),
            [tuple(each.values()) for each in found["sweep"]],
        )
    click.echo("")


def _recoveries(counts: dict[str, float]) -> str:
    return ", ".join(f"{family} {count:.1f}" for family, count in counts.items())


def _churned(command: Any) -> Any:
    for name, kind, default, of in (
        ("seeds", Whole(1, 100_000), 100, "Runs, from seed 0 on."),
        ("per-hour", Amount(0, 0.999), 0.10, "Of each worker, probability to fail."),
        ("hours", Amount(0.01, 100_000), 9.0, "Of training."),
        ("micro-batches", Whole(1, 100_000), 64, "Of all pipelines, one sample each."),
        ("stages", Whole(1, 32), 4, "Of a pipeline."), ("workers", Whole(1, 100_000), 32, "At the beginning."),
    ):  # fmt: skip
        command = click.option(f"--{name}", type=kind, default=default, show_default=True, help=of)(command)
    return command


@click.command("chameleon-fig7")
@_churned
@outputs
def fig7_command(
    workers: int, stages: int, micro_batches: int, hours: float, per_hour: float, seeds: int,
    json_file: Path | None, plot_file: Path | None,
) -> None:  # fmt: skip
    """Workers that are left over time, from failures alone."""
    found = measure_fig7(scenario(workers, stages, micro_batches, hours, per_hour, seeds))
    head = ("hour", "mean", "least", "most", "expected", "paper")
    columns = (found[each] for each in ("hours", "mean", "least", "most", "expected"))
    table(head, [(*row, None) for row in zip(*columns, strict=True)])
    publish(found, json_file, plot_file, _draw_fig7)


@click.command("chameleon-fig8")
@_churned
@click.option(
    "--bubble",
    type=Amount(0, 1000),
    default=BUBBLE,
    show_default=True,
    help="Calibrated part of Eq. 13's last term.",
)
@click.option(
    "--oobleck-s",
    type=Amount(0, 100_000),
    default=OOBLECK_S,
    show_default=True,
    help="Calibrated, per reconfiguration.",
)
@click.option(
    "--sweep-seeds",
    type=Whole(0, 10_000),
    default=6,
    show_default=True,
    help="Of each point of the sweep; 0: none.",
)
@click.option("--processes", type=Whole(1, 1024), help="Default: one per core.")
@outputs
def fig8_command(
    workers: int, stages: int, micro_batches: int, hours: float, per_hour: float, seeds: int, bubble: float,
    oobleck_s: float, sweep_seeds: int, processes: int | None, json_file: Path | None, plot_file: Path | None,
) -> None:  # fmt: skip
    """Throughput under failures: equal costs, and calibrated to the paper's ratios."""
    equal = scenario(workers, stages, micro_batches, hours, per_hour, seeds)
    found = measure_fig8(equal, bubble, oobleck_s, sweep_seeds, processes)
    _tell_fig8(found)
    publish(found, json_file, plot_file, _draw_fig8)
