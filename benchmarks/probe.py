"""`chaosnet bench probe`: what the monitor's in-band probe says of shaped links, beside iperf3 (Linux, root).

For each rate a link between two namespaces; a node trains at one end, and at the other one node after the other
joins, leaves, and reports what it had measured: by turns in-band and with iperf3.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from ..extras import demand
from ..netem.netns import Netns
from ..netem.topology import GOODPUT, LinkSpec, Topology
from ..protocols.errors import ConfigError
from ..settings.options import Amount, Several, Whole
from ..terminal.outputs import json_option, write_json
from .overlay import namespaces, need_root

FOUNDER = "founder"
READY = "trains"
PATIENCE_S = 60.0


def measure(rate_mbit: float, joins: int) -> dict[str, Any]:
    """Rates in Mbit/s that the joiner receives at, by each method; seconds that measuring both directions took."""
    pair = Topology({(FOUNDER, "joiner"): LinkSpec(rate_mbit=rate_mbit)})
    with namespaces(pair) as testbed, _start(testbed, FOUNDER, "in-band") as founder:
        assert founder.stdout is not None
        if founder.stdout.readline().strip() != READY.encode():
            raise ConfigError("bench probe: the founder did not come up")
        try:
            found = {kind: [_join(testbed, kind) for _ in range(joins)] for kind in ("in-band", "iperf3")}
        finally:
            founder.terminate()
    rates = {kind: statistics.median(turn["mbit"] for turn in turns) for kind, turns in found.items()}
    return {
        "set_mbit": rate_mbit,
        "goodput_mbit": GOODPUT * rate_mbit,
        "probe_mbit": [turn["mbit"] for turn in found["in-band"]],
        "iperf3_mbit": [turn["mbit"] for turn in found["iperf3"]],
        "ratio": rates["in-band"] / rates["iperf3"],
        "probe_seconds": statistics.median(turn["seconds"] for turn in found["in-band"]),
        "iperf3_seconds": statistics.median(turn["seconds"] for turn in found["iperf3"]),
    }


def _join(testbed: Netns, kind: str) -> dict[str, Any]:
    with _start(testbed, "joiner", kind) as joiner:
        try:
            out, _ = joiner.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            joiner.kill()
            raise ConfigError(f"bench probe: no join within {PATIENCE_S:g} s") from None
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    if found["source"] != {"in-band": "probe"}.get(kind, kind):
        raise ConfigError(f"bench probe: the link was not measured by {kind} (is libiperf installed?)")
    return found


def _start(testbed: Netns, node: str, kind: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "chaosnet.benchmarks.probe", node]
    env = {"CHAOSNET_PROBE": kind, "OMP_NUM_THREADS": "1"}
    return testbed.start(node, command, stdout=subprocess.PIPE, env=env)


def _worker(node: str) -> None:
    """A node of the two."""
    import torch

    from ..script.exit_event import capture_exit_event
    from ..trainer import Trainer

    model = torch.nn.Linear(64, 64)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 1e-3), quiet=True)
    print(READY, flush=True)
    while not capture_exit_event():
        model(torch.randn(8, 64)).square().mean().backward()
        trainer.update()
        trainer.check_state_replication()
        if node != FOUNDER:
            break
        time.sleep(0.02)
    if node != FOUNDER:
        agent = trainer.session.loop.agent
        reading = agent.readings.of(FOUNDER, time.monotonic())
        told = {"mbit": reading.rate_bps / 1e6, "source": reading.rate_source, "seconds": agent.prober.took_s}
        print(json.dumps(told), flush=True)
    trainer.request_node_exit()


@click.command("probe")
@click.option(
    "--rates", type=Several(Amount(1, 100_000)), default="100,200,500,900,1000", show_default=True,
    help="Of the links, Mbit/s.",
)  # fmt: skip
@click.option(
    "--repeat",
    type=Whole(1, 100),
    default=3,
    show_default=True,
    help="Joins with each method; medians count.",
)
@json_option
def probe_command(rates: tuple[float, ...], repeat: int, json_file: Path | None) -> None:
    """The monitor's in-band probe of shaped links, beside iperf3."""
    demand("iperf3", "chaosnet bench probe")
    need_root("probe")
    found = []
    click.echo("set Mbit/s   in-band    iperf3   ratio   probe s   iperf3 s")
    for rate in rates:
        row = measure(rate, repeat)
        found.append(row)
        probe, iperf3 = (statistics.median(row[f"{kind}_mbit"]) for kind in ("probe", "iperf3"))
        click.echo(
            f"{rate:>10.0f} {probe:>9.1f} {iperf3:>9.1f} {row['ratio']:>7.3f} "
            f"{row['probe_seconds']:>9.3f} {row['iperf3_seconds']:>10.2f}"
        )
    write_json(json_file, found)


if __name__ == "__main__":
    _worker(sys.argv[1])
