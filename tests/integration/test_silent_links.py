"""Links of a mesh die silently, one after the other, under a training run: for real, over both back ends."""

import itertools
import json
import time
from pathlib import Path

import pytest
from overlay import both_backends, overlay

from chaosnet.netem.topology import LinkSpec, mesh
from chaosnet.protocols.liveness import DEAD_LINK_S

NODES = 5
PAUSE_S = 1.0  # That a dead link may cost.
CUT_S, HEALED_S = 2.0, 2.5  # Long enough to notice, and to take the link up again.
WORKER = Path(__file__).with_name("overlay_worker.py")

pytestmark = pytest.mark.realtime


def longest_pause_s(told, from_s, until_s):
    """Between two steps of which the second is in the window."""
    times = [each["at_s"] for each in told]
    return max(b - a for a, b in itertools.pairwise(times) if from_s <= b <= until_s)


@pytest.mark.slow
@both_backends
def test_each_link_of_a_mesh_dies_in_turn(backend, tmp_path, monkeypatch):
    topology = mesh(NODES, LinkSpec(rate_mbit=200.0))
    with overlay(backend, topology, tmp_path, monkeypatch) as run:
        for node in topology.nodes:
            run.start(node, WORKER, CHAOSNET_NEIGHBORS=str(NODES - 1))
            run.until_told(20, [node], patience_s=30.0)
        started_s = time.monotonic()
        time.sleep(2.0)
        windows = {None: (started_s, time.monotonic())}  # Nothing is cut: how busy is this machine?
        for link in topology.links:
            cut_s = time.monotonic()
            run.testbed.cut(link)
            time.sleep(CUT_S)
            windows[link] = (cut_s, time.monotonic())
            run.testbed.heal(link)
            time.sleep(HEALED_S)
        run.stop()
        told = {node: run.told(node) for node in topology.nodes}
    pauses = {
        link: max(longest_pause_s(told[node], *window) for node in topology.nodes)
        for link, window in windows.items()
    }
    for link, pause_s in pauses.items():
        print(f"{link}: {pause_s:.2f} s")
    usual_s = pauses.pop(None)
    assert max(pauses.values()) <= PAUSE_S + usual_s
    assert max(pauses.values()) > DEAD_LINK_S / 2, "no cut was felt: none of them was real"

    for node, records in told.items():  # Nobody was lost, for a short while either; no step was.
        steps = [record["step"] for record in records]
        assert steps == list(range(steps[0], steps[-1] + 1)), node
    hashes = run.hashes()
    assert len(hashes) > 10 and all(len(each) == 1 for each in hashes)
    said = (tmp_path / f"{topology.nodes[0]}.err").read_text().splitlines()
    links = next(json.loads(line)["links"] for line in said if line.startswith('{"links"'))
    assert len(links) >= len(topology.links) - 1  # The last may still be about to come back.
