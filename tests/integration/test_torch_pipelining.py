"""Two pipelines of two train as those of `torch.distributed.pipelining` do, but for roundings of single precision.

Ours are exact: sums of gradients in double precision, on a grid. Theirs are in single precision, in their order.
"""

import pipeline_worker
import pytest
import torch
import torch_pipelining
from cluster import cluster_of, context

pytestmark = pytest.mark.realtime

STEPS, SAMPLES = 40, 96  # All batches are whole.
CLOSE = 1e-6


def of_torch(folder):
    """Weights by name, and losses."""
    arguments = str(folder), SAMPLES, STEPS
    ranks = [context.Process(target=torch_pipelining.run, args=(rank, *arguments)) for rank in range(4)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(120)
        assert each.exitcode == 0
    weights = {}
    for stage in range(2):
        named, losses = torch.load(folder / f"torch-{stage}.pt")
        weights |= named
    return weights, losses


@pytest.mark.slow
def test_losses_and_weights_are_those_of_torch_distributed_pipelining(tmp_path):
    weights, losses = of_torch(tmp_path)
    own = {"plain": True, "dropout": 0.0, "samples": SAMPLES, "saves_at": STEPS, "saves_to": str(tmp_path)}
    with cluster_of(0, tmp_path, script=pipeline_worker.train, layout="2+2", **own) as cluster:
        a = cluster.start()
        for _ in range(3):
            cluster.start().last("joined")
        a.last("saved")
        ran = [each["layout"].count(">") for each in a.told("layout")]
        cluster.leave()
        steps = cluster.steps()
    assert 2 in ran, "two pipelines of two were there"
    ours = torch.load(tmp_path / "a.pt")
    assert {name for name in ours if "feed" in name} <= weights.keys()
    assert [steps[n + 1]["means"]["loss"] for n in range(STEPS)] == pytest.approx(losses, rel=CLOSE)
    assert losses[-1] < 0.9 * losses[0]  # They train.
    for name, theirs in weights.items():
        assert float((ours[name] - theirs).norm()) <= CLOSE * max(float(theirs.norm()), 1e-3), name
