"""A link of a mesh becomes slow while gradients of real size go over it: the others take its share.

Run with -s for the figures.
"""

import statistics
from pathlib import Path

import pytest
from overlay import HAS_NAMESPACES, overlay

from chaosnet.netem.netns import Netns
from chaosnet.netem.relay import RelayTestbed
from chaosnet.netem.topology import LinkSpec, mesh

WORKER = Path(__file__).with_name("large_worker.py")
MBIT, SLOW_MBIT = 100.0, 10.0
STEPS = 6  # In which it is known how long one takes.
WITHIN = 6  # Steps after the change.

pytestmark = [pytest.mark.realtime, pytest.mark.slow]


def test_within_six_steps_the_slow_link_is_not_what_they_wait_for(tmp_path, monkeypatch):
    topology, backend = mesh(4, LinkSpec(rate_mbit=MBIT)), Netns if HAS_NAMESPACES else RelayTestbed
    nodes = topology.nodes
    with overlay(backend, topology, tmp_path, monkeypatch, routes=False) as run:
        for node in nodes:
            run.start(node, WORKER, CHAOSNET_NEIGHBORS="3")
        run.until_told(1, nodes, patience_s=120.0)
        (tmp_path / "go").touch()
        run.until_told(2 + STEPS, nodes, patience_s=120.0)
        begun = len(run.told("n0"))
        run.testbed.change({("n1", "n2"): LinkSpec(rate_mbit=SLOW_MBIT)})
        run.until_told(begun + WITHIN + STEPS, ["n0"], patience_s=120.0)
        run.stop()
    step_s = [record["step_s"] for record in run.told("n0")[2:]]
    changed = begun - 2
    before_s = statistics.median(step_s[changed - STEPS // 2 : changed])
    after_s = statistics.median(step_s[changed + WITHIN :])
    print(f"before {before_s:.2f} s, then {[round(each, 2) for each in step_s[changed:]]}")
    assert max(step_s[changed : changed + WITHIN]) > 1.5 * before_s, (
        "the change was not felt: it was not real"
    )
    assert after_s <= 1.4 * before_s, run.story()
    hashes = run.hashes()
    assert len(hashes) >= 2 and all(len(each) == 1 for each in hashes)
