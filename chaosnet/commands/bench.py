"""`chaosnet bench`: one command for each measurement."""

from __future__ import annotations

import importlib
from typing import Any

import click

from ..extras import brings, demand
from ..protocols.errors import ConfigError

BENCHMARKS = {
    "join": "Join a large state over loopback: how long, how close to the bound, who waits.",
    "start": "Machines that are started together, with states of real size: when all are in (root).",
    "allreduce": "All-reduce over loopback, beside Gloo.",
    "overlay": "All-reduce over an overlay of shaped links, beside the bound that no plan can beat (root).",
    "replan": "Training while the rates of all links change, beside plans that knew them (root).",
    "step": "Steps of training, beside DistributedDataParallel over Gloo.",
    "checkpoint": "Steps with and without a checkpoint, in one run.",
    "agreement": "Steps that compare the replicas, and steps that do not, in one run.",
    "strangers": "Steps while strangers try to get in, and while they do not.",
    "page": "What the page costs the node that serves it, with one viewer.",
    "probe": "Rates of shaped links as the monitor sees them, beside iperf3 (root).",
    "peers": "Joins and deaths, beside torchft and hivemind (root, or --loopback).",
    "pipelines": "Steps of pipelines, beside their program, one process, and after kill -9.",
    "pipelines-size": "Pipelines of GPT-2 small in true size over shaped links: kill, join, slow link (root).",
    "policy": "Recoveries of 256 workers: worked out beforehand, then looked up.",
    "chaos-fig1": "Chaos, Fig. 1: its example: a state from one node, from many, from neighbours.",
    "chaos-fig3": "Chaos, Fig. 3: how long each part of a state takes over one link (root).",
    "chaos-fig7": "Chaos, Fig. 7: what a scale-out takes, by system (root).",
    "chaos-fig8": "Chaos, Fig. 8: what it takes with GPT-2 (root).",
    "chaos-fig9": "Chaos, Fig. 9: what opening a link takes, by the size of the cluster (root).",
    "chaos-table1": "Chaos, Table I: what scaling and changing links takes (root).",
    "chaos-fig10": "Chaos, Fig. 10: how long all nodes are idle in a scale-out, by system (root).",
    "chaos-fig11": "Chaos, Fig. 11: accuracy on pictures with a node that joins.",
    "chaos-fig12": "Chaos, Fig. 12: accuracy on pictures with a node that leaves.",
    "chaos-fig13": "Chaos, Fig. 13: fine-tuning on text with a node that joins.",
    "chaos-fig14": "Chaos, Fig. 14: fine-tuning on text with a node that leaves.",
    "chaos-fig15": "Chaos, Fig. 15: a state from one node, from all nodes, from neighbours (root).",
    "chaos-fig16": "Chaos, Fig. 16: how neighbours share a state: equally, greedily, optimally (root).",
    "chameleon-fig6": "Chameleon, Fig. 6: throughput after a loss, as a share of what it was.",
    "chameleon-fig7": "Chameleon, Fig. 7: workers that are left over 9 hours of failures.",
    "chameleon-fig8": "Chameleon, Fig. 8: throughput over 9 hours of failures, beside Oobleck and ReCycle.",
    "chameleon-fig9": "Chameleon, Fig. 9: the estimator beside a simulation that shares no code with it.",
    "chameleon-fig10": "Chameleon, Fig. 10: moving weights, with and without choosing who moves what.",
    "chameleon-fig11": "Chameleon, Fig. 11: sums of gradients in rounds, and one after another.",
    "chameleon-fig12": "Chameleon, Fig. 12: memory of each worker before and after a loss.",
    "chameleon-search-time": "Chameleon, Sec. V-F: how long the search for a plan takes.",
    "elaswave-fig11": "ElasWave, Fig. 11: throughput after nodes are lost, by system.",
    "elaswave-fig12a": "ElasWave, Fig. 12a: linear scaling efficiency, by technique.",
    "elaswave-fig14": "ElasWave, Fig. 14: throughput on traces of spot instances.",
    "elaswave-fig15a": "ElasWave, Fig. 15a: one slow worker.",
}


class Benchmarks(click.Group):
    """Imports a benchmark (and torch) only when it is to run.

    `chameleon-fig8` is `fig8_command` of the module `chameleon`; `join` is `join_command` of `join`, else `command`.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BENCHMARKS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in BENCHMARKS:
            raise click.UsageError(f"{cmd_name!r} is no benchmark (expected one of {', '.join(BENCHMARKS)})")
        name, _, part = cmd_name.partition("-")
        try:
            module = importlib.import_module(f"chaosnet.benchmarks.{name}")
        except ModuleNotFoundError as error:
            if extra := brings(error.name or ""):
                demand(extra, f"chaosnet bench {cmd_name}")
            raise click.ClickException(f"bench {cmd_name}: {error} in this installation") from None
        command = getattr(module, f"{(part or name).replace('-', '_')}_command", None) or module.command
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run it; SIGTERM ends it as Ctrl+C does, so that it removes its processes and namespaces."""
        from ..netem.backend import TestbedError
        from ..terminal.progress import going_on
        from ..trials.node_processes import sigterm_as_ctrl_c

        try:
            with sigterm_as_ctrl_c(), going_on("it runs"):
                return super().invoke(ctx)
        except TestbedError as error:
            raise ConfigError(f"bench {ctx.invoked_subcommand}: {error}") from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Benchmarks"):
            formatter.write_dl(list(BENCHMARKS.items()))


@click.group(cls=Benchmarks)
def bench() -> None:
    """Measure, and compare with others."""
