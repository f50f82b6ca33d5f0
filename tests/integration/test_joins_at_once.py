"""Nodes with a state of real size that start at once, over links that take seconds for it, and do not all meet."""

from pathlib import Path

import pytest
from overlay import both_backends, overlay

from chaosnet.netem.topology import LinkSpec, Topology

WORKER = Path(__file__).with_name("large_worker.py")
MBIT = 160.0
STEPS = 15

pytestmark = [pytest.mark.realtime, pytest.mark.slow]


@both_backends
def test_all_that_start_at_once_are_in_and_pass_the_state_on_to_each_other(backend, tmp_path, monkeypatch):
    """n3 has no link to a member before n1 or n2 is one; n0's links carry the state once, not once for each."""
    links = {("n0", "n1"): 1, ("n0", "n2"): 1, ("n1", "n2"): 4, ("n1", "n3"): 4, ("n2", "n3"): 4}
    nodes = ("n0", "n1", "n2", "n3")
    topology = Topology({each: LinkSpec(rate_mbit=MBIT * share) for each, share in links.items()}, nodes)
    with overlay(backend, topology, tmp_path, monkeypatch, routes=False) as run:
        for node in nodes:
            run.start(node, WORKER)
        run.until_told(1, nodes, patience_s=120.0)  # All have imported torch.
        (tmp_path / "go").touch()
        run.until_told(STEPS, nodes, patience_s=120.0)
        run.stop()
    records = {node: run.told(node) for node in nodes}
    joins = {node: records[node][1] for node in nodes[1:]}
    state = max(join["bytes"] for join in joins.values())
    founders = sum(join["from"].get("n0", 0) for join in joins.values())
    step_s = sorted(record["step_s"] for record in records["n0"][-STEPS // 2 :])[STEPS // 4]
    bound_s = 8 * state / (2 * MBIT * 1e6)  # Both links of the founder, once.
    print(f"{state / 1e6:.0f} MB, bound {bound_s:.2f} s, a step {step_s:.2f} s, {joins}")
    assert founders <= 1.5 * state, "what n0 has sent once, the others have from each other"
    assert max(join["took_s"] for join in joins.values()) <= 3 * bound_s + 3 * step_s + 4.0, run.story()
    hashes = run.hashes()
    assert len(hashes) >= 2 and all(len(each) == 1 for each in hashes)
