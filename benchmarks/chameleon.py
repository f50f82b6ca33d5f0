"""The experiments of Chameleon (Sec. V), on its planner, estimator and Restorer.

Fig. 7 and 8: `chameleon_churn`; Sec. V-F: `chameleon_search`.

Nothing here is measured on accelerators: the model is a made-up profile of Llama 2 7B (`profile.llama2`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from ..scheduler.elastic import roles
from ..scheduler.elastic.cluster import Cluster, alike
from ..scheduler.elastic.estimator import Estimator, Execution, ProfiledCosts
from ..scheduler.elastic.layouts import best_layout
from ..scheduler.elastic.plan import Pipeline, Plan, cuts_of, even, of_pipelines
from ..scheduler.elastic.profile import Profile, llama2
from ..scheduler.elastic.recoveries import FAMILIES, Recoveries, Recovery
from ..scheduler.elastic.splits import PipelineTimes
from ..scheduler.elastic.state import State
from ..scheduler.elastic.sync_rounds import Bucket
from ..scheduler.elastic.transfers import busiest_s, plan_transfers
from ..settings.options import Amount, Several, Whole
from .chameleon_churn import NPU_GIB, fig7_command, fig8_command
from .chameleon_search import NUMBERS, search_time_command
from .discrete import Leg, Step, Sum
from .figures import Found, bars, legend_below, outputs, publish, table
from .recoveries_of import began, fastest, step_s

__all__ = [
    "fig6_command", "fig7_command", "fig8_command", "fig9_command", "fig10_command", "fig11_command",
    "fig12_command", "search_time_command",
]  # fmt: skip

CHAMELEON = ("reroute", "layout")
Counts = Sequence[int]


# --- Fig. 6 ---

LOSSES = (  # NPUs before and after, (PP, DP, TP), workers lost, the paper's share.
    (8, 7, (4, 2, 1), 1, 0.9622),
    (16, 15, (4, 4, 1), 1, 0.8900),
    (32, 24, (2, 2, 8), 1, 0.7438),
)
OPEN_6 = (
    "which batch of 16 to 64 a bar is of, sequence length, which stage was hit, step times in seconds; 96.22 % is"
    " above the capacity of 7/8, and only bubbles of the original leave room for that."
)


def measure_fig6(batches: Sequence[int]) -> Found:
    """Throughput after a loss over that before, by family; the worst place to be hit counts.

    `capacity`: what is left of the workers. `bound`: what they could do without bubbles and with their clocks as they
    were, which `chaosnet` raises and "no clocks" does not.
    """
    rows = []
    for before, after, (stages, pipelines, tensor_parallel), lost, paper in LOSSES:
        profile = llama2("7b", tensor_parallel=tensor_parallel)
        for batch in batches:
            recoveries, state = began(profile, stages, pipelines, batch, memory_gib=NPU_GIB * tensor_parallel)
            whole_s = step_s(recoveries, state)
            places = [fastest(recoveries, state.after((f"p0s{s}",), ())) for s in range(stages)]
            families = {
                family: min(whole_s / found[family].step_s if family in found else 0.0 for found in places)
                for family in sorted({family for found in places for family in found})
            }
            work_s = batch * sum(profile.seconds(0, len(profile.layers), 1)) / (stages * pipelines - lost)
            rows.append({
                "npus": f"{before} to {after}", "batch": batch, "families": families,
                "chameleon": _worst(whole_s, places, CHAMELEON),
                "chaosnet": _worst(whole_s, places, FAMILIES),
                "no clocks": _worst(whole_s, places, [each for each in FAMILIES if each != "clocks"]),
                "capacity": after / before, "bound": whole_s / work_s, "paper": paper,
            })  # fmt: skip
    return {"rows": rows, "paper": [each[-1] for each in LOSSES], "open": OPEN_6}


def _worst(whole_s: float, places: Sequence[dict[str, Recovery]], families: Sequence[str]) -> float:
    """Share of the throughput with the best of these families, in the place where that is least."""
    return min(
        max((whole_s / found[family].step_s for family in families if family in found), default=0.0)
        for found in places
    )


def _draw_fig6(figure: Any, found: Found) -> None:
    axes, rows = figure.subplots(), found["rows"]
    groups = [f"{row['npus']}\nbatch {row['batch']}" for row in rows]
    series = {
        name: [row[name] for row in rows]
        for name in ("chameleon", "no clocks", "chaosnet", "capacity", "bound", "paper")
    }
    bars(axes, groups, series)
    axes.set(ylabel="throughput after / before", title="Chameleon, Fig. 6 (bound: no bubbles after the loss)")
    legend_below(figure, axes)


@click.command("chameleon-fig6")
@click.option(
    "--batches", type=NUMBERS, default="16,32,64", show_default=True, help="Micro-batches of one sample."
)
@outputs
def fig6_command(batches: Sequence[int], json_file: Path | None, plot_file: Path | None) -> None:
    """Throughput after a loss, as a share of what it was."""
    found = measure_fig6(batches)
    families = sorted({family for row in found["rows"] for family in row["families"]})
    names = ("chameleon", "no clocks", "chaosnet", "capacity", "bound", "paper")
    head = ("NPUs", "batch", *families, *names)
    table(
        head,
        [
            (row["npus"], row["batch"], *(row["families"].get(each) for each in families),
             *(row[name] for name in names))
            for row in found["rows"]
        ],
    )  # fmt: skip
    publish(found, json_file, plot_file, _draw_fig6)


# --- Fig. 9 ---

LAYOUTS = ((4, 2), (2, 4), (4, 4), (8, 4))  # PP, DP.
OPEN_9 = (
    "which configurations, and whether communication is in the estimate; there the machine is the judge, here a"
    " simulation with contention, ring rounds and jitter, so the errors are of two models."
)


def measure_fig9(
    batches: Sequence[int], layouts: Sequence[tuple[int, int]], jitter: float, seeds: int
) -> Found:
    """Estimates beside simulated steps, before a loss and after it: rerouted, and with another layout."""
    rows: list[Found] = []
    profile = llama2("7b")
    for stages, pipelines in layouts:
        for batch in batches:
            recoveries, state = began(profile, stages, pipelines, batch)
            recoveries.estimator = Estimator(recoveries.estimator.costs)
            hit = state.after((f"p0s{stages // 2}",), ())
            found = fastest(recoveries, hit, CHAMELEON)
            states = {"whole": state, **{f"after: {family}": each.state for family, each in found.items()}}
            for name, each in states.items():
                estimated_s = step_s(recoveries, each)
                simulated_s = [
                    _simulated(each.plan, profile, recoveries.cluster, jitter, seed).run()
                    for seed in range(seeds)
                ]
                mean_s = sum(simulated_s) / len(simulated_s)
                rows.append({
                    "layout": f"PP {stages}, DP {pipelines}", "batch": batch, "state": name,
                    "estimated_s": estimated_s, "simulated_s": mean_s,
                    "error": max(abs(estimated_s - each_s) / each_s for each_s in simulated_s),
                })  # fmt: skip
    worst = max(row["error"] for row in rows)
    return {"rows": rows, "jitter": jitter, "worst": worst, "paper": 0.0802, "open": OPEN_9}


def _simulated(plan: Plan, profile: Profile, cluster: Cluster, jitter: float, seed: int) -> Step:
    """The same step, put to the other simulation."""
    routes = []
    for each in sorted(plan.micro_batches, key=lambda each: each.turn):
        route = []
        for hop in each.route:
            forward_s, backward_s = profile.seconds(hop.start, hop.stop, each.samples)
            size = profile.boundary_bytes(hop.stop) * each.samples if hop.stop < plan.layers else 0.0
            route.append(Leg(hop.worker, forward_s, backward_s, size))
        routes.append(route)
    sums = [
        [Sum(bucket.holders, sum(profile.layers[i].gradient_bytes for i in range(bucket.start, bucket.stop)))
         for bucket in each]
        for each in plan.sync
    ]  # fmt: skip
    return Step(routes, sums, cluster.rate_bps, cluster.latency_s, jitter, seed)


def _draw_fig9(figure: Any, found: Found) -> None:
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(row["state"] for row in found["rows"]):
        of = [row for row in found["rows"] if row["state"] == name]
        left.plot([row["simulated_s"] for row in of], [row["estimated_s"] for row in of], "o", label=name)
        right.plot([row["simulated_s"] for row in of], [100 * row["error"] for row in of], "o", label=name)
    longest = max(row["simulated_s"] for row in found["rows"])
    left.plot([0, longest], [0, longest], "k:", label="equal")
    left.set(xlabel="simulated step, s", ylabel="estimated step, s", title="Chameleon, Fig. 9")
    right.axhline(100 * found["paper"], color="black", label="paper, at most")
    right.set(xlabel="simulated step, s", ylabel="error, %", ylim=(0, None))
    right.set_title(f"worst {100 * found['worst']:.2f} %, jitter {100 * found['jitter']:g} %")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


@click.command("chameleon-fig9")
@click.option("--batches", type=NUMBERS, default="16,32,64", show_default=True)
@click.option(
    "--jitter",
    type=Amount(0, 1),
    default=0.03,
    show_default=True,
    help="Of a computation, standard deviation.",
)
@click.option(
    "--seeds", type=Whole(1, 10_000), default=3, show_default=True, help="Simulated steps of each state."
)
@outputs
def fig9_command(
    batches: Counts, jitter: float, seeds: int, json_file: Path | None, plot_file: Path | None
) -> None:
    """The estimator beside a simulation that shares no code with it."""
    found = measure_fig9(batches, LAYOUTS, jitter, seeds)
    rows = [(*row.values(),) for row in found["rows"]]
    table(("layout", "batch", "state", "estimated s", "simulated s", "worst error"), rows)
    click.echo(f"worst error {100 * found['worst']:.2f} % (paper: 8.02 %)")
    publish(found, json_file, plot_file, _draw_fig9)


# --- Fig. 10 ---

PAPER_TOTAL_S, PAPER_OPTIMISED_S, PAPER_LESS = 11.2, 8.2, 0.3235
PAPER_TRANSFER_S = (PAPER_TOTAL_S - PAPER_OPTIMISED_S) / PAPER_LESS
OPEN_10 = (
    "the links, what a layer weighs, who sends and who takes which role without the optimisation (here: by name, from"
    " the first holder), and the new layout; so shares can be compared and seconds cannot."
)


def measure_fig10(layers: Sequence[int], micro_batches: int) -> Found:
    """Weights that move after one of DP 4, PP 2 is lost: the mean over who that is.

    `total_s`: on the paper's scale, where moving without optimisation takes 3.0 s / 32.35 % of 11.2 s.
    """
    rows = []
    for count in layers:
        whole = llama2("7b")
        profile = Profile(whole.model, whole.layers[:count])
        taken: dict[str, list[tuple[float, float]]] = {"naive": [], "matched": [], "optimised": []}
        recoveries, state = began(profile, 2, 4, micro_batches)
        for lost in sorted(state.held):
            hit = state.after((lost,), ())
            for name, cost in _moved(recoveries, hit).items():
                taken[name].append(cost)
        means = {name: [sum(each) / len(of) for each in zip(*of, strict=True)]
                 for name, of in taken.items()}  # fmt: skip
        share = means["optimised"][1] / means["naive"][1]
        restart_s = PAPER_TOTAL_S - PAPER_TRANSFER_S
        rows.append({
            "layers": count,
            **{f"{name}_bytes": of[0] for name, of in means.items()},
            **{f"{name}_s": of[1] for name, of in means.items()},
            "less": 1 - share, "less_matched": 1 - means["matched"][1] / means["naive"][1],
            "total_s": restart_s + PAPER_TRANSFER_S * share,
            "paper_less": PAPER_LESS if count == 16 else None,
            "paper_total_s": PAPER_OPTIMISED_S if count == 16 else None,
        })  # fmt: skip
    return {"rows": rows, "paper": {"less": PAPER_LESS, "total_s": [PAPER_TOTAL_S, PAPER_OPTIMISED_S]},
            "open": OPEN_10}  # fmt: skip


def _moved(recoveries: Recoveries, hit: State) -> dict[str, tuple[float, float]]:
    """(bytes, seconds) of moving to the best layout, by how it is done. In all ways each worker has one NIC."""
    cuts, _ = recoveries.best_cuts(hit)
    sums, cluster = recoveries.profile.state_bytes, _with_nics(recoveries.cluster)
    names = iter(sorted(hit.held))
    by_name = [Pipeline(tuple(next(names) for _ in each[1:]), each) for each in cuts]
    matched = roles.staff(cuts, hit.held, sums, hit.pipelines)
    plan = plan_transfers(hit.held, _wanted(matched), sums, cluster)
    return {
        "naive": _from_the_first(hit.held, _wanted(by_name), sums, cluster),
        "matched": _from_the_first(hit.held, _wanted(matched), sums, cluster),
        "optimised": (float(plan.bytes_total), plan.time_s),
    }


def _with_nics(cluster: Cluster) -> Cluster:
    """As fast as one link: who sends to two, or receives from two, does so one after another."""
    rate_bps = cluster.rate_bps
    workers = {
        name: replace(each, nic_out_bps=rate_bps, nic_in_bps=rate_bps)
        for name, each in cluster.workers.items()
    }
    return replace(cluster, workers=workers)


def _wanted(pipelines: Sequence[Pipeline]) -> dict[str, range]:
    return {hop.worker: range(hop.start, hop.stop) for each in pipelines for hop in each.stages}


def _from_the_first(
    held: dict[str, range], wanted: dict[str, range], sums: Sequence[float], cluster: Cluster
) -> tuple[float, float]:
    """Each layer that somebody lacks comes from the first, by name, who has it."""
    sent: dict[tuple[str, str], float] = {}
    sizes = [stop - start for start, stop in pairwise(sums)]
    for worker, layers in wanted.items():
        for layer in layers:
            if layer not in held[worker]:
                source = next(name for name in sorted(held) if layer in held[name])
                sent[source, worker] = sent.get((source, worker), 0.0) + sizes[layer]
    return sum(sent.values()), busiest_s(sent, cluster)


def _draw_fig10(figure: Any, found: Found) -> None:
    left, right = figure.subplots(1, 2)
    groups = [f"{row['layers']} layers" for row in found["rows"]]
    names = ("naive", "matched", "optimised")
    bars(left, groups, {name: [row[f"{name}_s"] for row in found["rows"]] for name in names})
    left.set(ylabel="moving weights, s", title="Chameleon, Fig. 10")
    left.legend()
    series = {"roles matched": [100 * row["less_matched"] for row in found["rows"]],
              "and sources chosen": [100 * row["less"] for row in found["rows"]],
              "paper": [row["paper_less"] and 100 * row["paper_less"] for row in found["rows"]]}  # fmt: skip
    bars(right, groups, series)
    right.set(ylabel="less time to move, %", ylim=(0, 115))
    right.legend(ncols=3, fontsize="small", columnspacing=1.0)


@click.command("chameleon-fig10")
@click.option("--layers", type=Several(Whole(2, 32)), default="4,8,16", show_default=True)
@click.option("--micro-batches", type=Whole(4, 10_000), default=16, show_default=True)
@outputs
def fig10_command(layers: Counts, micro_batches: int, json_file: Path | None, plot_file: Path | None) -> None:
    """Moving weights, with and without choosing roles (Kuhn-Munkres) and sources."""
    found = measure_fig10(layers, micro_batches)
    head = ("layers", "naive GB", "matched GB", "naive s", "matched s", "+ sources s", "matched: less %",
            "+ sources: less %", "paper %", "total s*", "paper s")  # fmt: skip
    rows = [
        (row["layers"], row["naive_bytes"] / 1e9, row["matched_bytes"] / 1e9, row["naive_s"], row["matched_s"],
         row["optimised_s"], 100 * row["less_matched"], 100 * row["less"],
         row["paper_less"] and 100 * row["paper_less"], row["total_s"], row["paper_total_s"])
        for row in found["rows"]
    ]  # fmt: skip
    table(head, rows)
    click.echo(f"* if naive moving takes {PAPER_TRANSFER_S:.2f} of 11.2 s, as the paper's figures say")
    publish(found, json_file, plot_file, _draw_fig10)


# --- Fig. 11 ---

LESS_BY_BATCH = {16: 0.1144, 32: 0.1544, 64: 0.0552}
OPEN_11 = (
    "links (hence several rates here), sequence length, the layout after the loss (here [2, 2, 3], of Fig. 12), and"
    " what is summed one after another without rounds (here: layer by layer). As sums wait for all backwards here,"
    " their share falls with the batch; in the paper it is largest at 32."
)


def measure_fig11(batches: Sequence[int], rates_gbps: Sequence[int]) -> Found:
    """A step of pipelines [2, 2, 3] with gradients summed in rounds, and layer after layer."""
    rows = []
    profile = llama2("7b")
    for rate_gbps, batch in itertools.product(rates_gbps, batches):
        plan, cluster = _two_two_three(profile, batch, rate_gbps)
        costs = ProfiledCosts(profile, cluster)
        in_rounds_s = sum(max(costs.reduce_s(bucket) for bucket in each) for each in plan.sync)
        serial_s = sum(
            costs.reduce_s(Bucket(layer, layer + 1, holders)) for layer, holders in enumerate(plan.holders)
        )
        rounds_step_s = Estimator(costs).estimate(plan).step_s
        serial_step_s = rounds_step_s - in_rounds_s + serial_s
        rows.append({
            "rate_gbps": rate_gbps, "batch": batch, "rounds": len(plan.sync), "sums_in_rounds_s": in_rounds_s,
            "sums_serial_s": serial_s, "step_in_rounds_s": rounds_step_s, "step_serial_s": serial_step_s,
            "less": 1 - rounds_step_s / serial_step_s, "sums_less": 1 - in_rounds_s / serial_s,
            "paper_less": LESS_BY_BATCH.get(batch),
        })  # fmt: skip
    paper = {"less": LESS_BY_BATCH, "sums_less": 0.3535}
    return {"rows": rows, "paper": paper, "open": OPEN_11}


def _two_two_three(profile: Profile, batch: int, rate_gbps: float = 200.0) -> tuple[Plan, Cluster]:
    """Pipelines of 2, 2 and 3 workers, each with the split and the share that are fastest."""
    lengths, names = (2, 2, 3), iter("abcdefg")
    layout = best_layout(PipelineTimes(profile), 7, [3], [2, 3], batch)
    pipelines, counts = layout.pipelines([*names])
    assert sorted(len(each.workers) for each in pipelines) == list(lengths)
    cluster = alike([name for each in pipelines for name in each.workers], rate_bps=rate_gbps * 1e9)
    return of_pipelines(pipelines, counts, 1), cluster


def _draw_fig11(figure: Any, found: Found) -> None:
    left, right = figure.subplots(1, 2)
    groups = [f"{row['batch']}\n{row['rate_gbps']}" for row in found["rows"]]
    bars(left, groups, {"one after another": [row["step_serial_s"] for row in found["rows"]],
                        "in rounds": [row["step_in_rounds_s"] for row in found["rows"]]})  # fmt: skip
    left.set(ylabel="step, s", title="Chameleon, Fig. 11", xlabel="batch, Gbit/s of a link")
    left.legend()
    bars(right, groups, {"ours": [100 * row["less"] for row in found["rows"]],
                         "paper": [row["paper_less"] and 100 * row["paper_less"]
                                   for row in found["rows"]]})  # fmt: skip
    right.set(ylabel="less time of a step, %", xlabel="batch, Gbit/s of a link")
    right.margins(y=0.2)  # Room for the legend.
    right.legend(ncols=2)


@click.command("chameleon-fig11")
@click.option("--batches", type=NUMBERS, default="16,32,64", show_default=True)
@click.option("--rates-gbps", type=NUMBERS, default="200,100,50", show_default=True, help="Of links.")
@outputs
def fig11_command(
    batches: Counts, rates_gbps: Counts, json_file: Path | None, plot_file: Path | None
) -> None:
    """Sums of gradients in rounds, and one after another."""
    found = measure_fig11(batches, rates_gbps)
    head = (
        "Gbit/s",
        "batch",
        "rounds",
        "serial s",
        "in rounds s",
        "less %",
        "paper %",
        "sums less %",
        "paper %",
    )
    rows = [
        (row["rate_gbps"], row["batch"], row["rounds"], row["step_serial_s"], row["step_in_rounds_s"],
         100 * row["less"], row["paper_less"] and 100 * row["paper_less"], 100 * row["sums_less"], 35.35)
        for row in found["rows"]
    ]  # fmt: skip
    table(head, rows)
    publish(found, json_file, plot_file, _draw_fig11)


# --- Fig. 12 ---

OPEN_12 = (
    "sequence length (here 2,048: with 4,096 the original layout would not fit 64 GB), ZeRO, batch, and numbers:"
    " the text only says that the peak does not increase, and in some cases decreases."
)


def measure_fig12(batch: int, sequence: int) -> Found:
    """Peaks of DP 4, PP 2, and of [2, 2, 3] after a loss; with optimizer state whole, and shared (ZeRO-1)."""
    profile = llama2("7b", sequence=sequence)
    names = [f"{each}{stage}" for each in "abcd" for stage in range(2)]
    cuts = cuts_of(even(len(profile.layers), 2))
    pipelines = [Pipeline((names[i], names[i + 1]), cuts) for i in range(0, 8, 2)]
    before = of_pipelines(pipelines, even(batch, 4), 1)
    after, cluster = _two_two_three(profile, batch)
    everybody = alike([*names, *cluster.workers])
    found: Found = {
        "limit_gib": NPU_GIB,
        "batch": batch,
        "sequence": sequence,
        "paper": None,
        "open": OPEN_12,
    }
    for key, zero in (("whole", False), ("zero", True)):
        estimator = Estimator(ProfiledCosts(profile, everybody), zero, (Execution(),))
        found[key] = {
            name: [peak / 2**30 for peak in estimator.estimate(plan).peak_bytes.values()]
            for name, plan in (("before", before), ("after", after))
        }
    return found


def _draw_fig12(figure: Any, found: Found) -> None:
    both = figure.subplots(1, 2, sharey=True)
    for axes, key, title in zip(both, ("whole", "zero"), ("optimizer state whole", "ZeRO-1"), strict=True):
        before, after = found[key]["before"], found[key]["after"]
        series = {"before: DP 4, PP 2": before, "after: [2, 2, 3]": [*after, None]}
        bars(axes, [str(number) for number in range(len(before))], series)
        axes.axhline(found["limit_gib"], color="black", linestyle=":", label="memory of an NPU")
        axes.set(xlabel="worker", title=f"Chameleon, Fig. 12: {title}")
    both[0].set_ylabel("peak, GiB")
    legend_below(figure, both[0])


@click.command("chameleon-fig12")
@click.option("--batch", type=Whole(1, 10_000), default=16, show_default=True)
@click.option(
    "--sequence", type=Whole(1, 10_000_000), default=2048, show_default=True, help="Tokens of a sample."
)
@outputs
def fig12_command(batch: int, sequence: int, json_file: Path | None, plot_file: Path | None) -> None:
    """Memory of each worker before and after a loss."""
    found = measure_fig12(batch, sequence)
    rows = [
        (key, name, *found[key][name], *([None] if name == "after" else []))
        for key in ("whole", "zero")
        for name in ("before", "after")
    ]
    table(("optimizer", "GiB of worker", *map(str, range(8))), rows)
    publish(found, json_file, plot_file, _draw_fig12)
