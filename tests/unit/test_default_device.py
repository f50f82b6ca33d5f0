"""A script may have tensors made on another device than the CPU, by `torch.set_default_device`. Ours are not.

Here that is `meta`, which has no numbers at all.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chaosnet.data.loading import Ahead
from chaosnet.data.share import EpochOrder
from chaosnet.engines.tensor_bytes import joined
from chaosnet.node.memory import fresh
from chaosnet.node.state.flat_state import Arrival, Manifest
from chaosnet.node.state.training_state import TrainingState
from chaosnet.node.sums.compression import BFloat16
from chaosnet.node.sums.gradients import Gradients
from chaosnet.node.sums.layer_sums import LayerSums
from chaosnet.protocols.messages import Tensor

ELSEWHERE = torch.device("meta")
CHUNK_BYTES = 64


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.randn(4, 6)


@pytest.mark.parametrize("eager", [False, True])
def test_gradients_travel(eager):
    model, _, x = made()
    with ELSEWHERE:
        gradients = Gradients(model, CHUNK_BYTES)
        gradients.arm(2 if eager else None)
        model(x).pow(2).sum().backward()
        expected = [p.grad.clone() for p in model.parameters()]
        finished = gradients.finish(2)
        assert not finished.retracted
        parts = [gradients.contribution(range(chunk.index, chunk.index + 1)) for chunk in gradients.chunks]
        means = [gradients.lanes[chunk.lane].op == "mean" for chunk in gradients.chunks]
        gradients.adopt(
            finished.present, [p / 2 if mean else p.clone() for p, mean in zip(parts, means, strict=True)]
        )
        gradients.revert_buffers()
        assert gradients.spoilt() is None
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))


def test_a_state_is_copied_and_loaded():
    model, optimizer, x = made()
    with ELSEWHERE:
        model(x).pow(2).sum().backward()
        optimizer.step()
        state = TrainingState(
            model, optimizer, extra_state={"ema": [p.detach().clone() for p in model[0].parameters()]}
        )
        expected = state.state_hash()
        capture = state.begin_capture(1, {})
        capture.run()
        snapshot = capture.wait()
        arrival = Arrival(Manifest.from_bytes(snapshot.manifest.to_bytes()))
        arrival.write(0, snapshot.slice(0, snapshot.manifest.total_bytes))
        optimizer.step()
        state.load(arrival)
        assert state.state_hash() == expected


def test_gradients_are_compressed():
    """In another thread than the script's, for which `torch.set_default_tensor_type` counts, too."""
    values = np.arange(5, dtype=np.float32)
    with ELSEWHERE:
        assert BFloat16().decode(BFloat16().encode(values)).tolist() == values.tolist()


@pytest.mark.parametrize("size", [0, 100, 8 << 20])
def test_memory_is_this_machines(size):
    with ELSEWHERE:
        assert fresh(size).device.type == "cpu"


def test_samples_are_dealt():
    with ELSEWHERE:
        orders = [EpochOrder(10, 1, in_order) for in_order in (False, True)]
        found = [(order.indices(0, [(0, 10)]), order.positions(0, [1, 2])) for order in orders]
    assert found == [
        (EpochOrder(10, 1, each).indices(0, [(0, 10)]), found[number][1])
        for number, each in enumerate((False, True))
    ]
    assert [sorted(indices[place] for place in places) for indices, places in found] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_fetches(workers):
    """Its seed is of a generator of the CPU, which torch refuses to draw of anywhere else."""
    ahead = Ahead(DataLoader(TensorDataset(torch.arange(8.0)), num_workers=workers), torch.Generator())
    with ELSEWHERE:
        ahead.begin(lambda: iter([[3, 1]]))
        assert ahead.fetch([3, 1], lambda number: None)[0].tolist() == [3, 1]
        ahead.end()


def test_layers_add_up_what_they_are_sent():
    model, _, x = made()
    rows = (("float32", (4, 6)), ("float32", (0, 2)))
    message = Tensor(key=(1, 1), step=0, target="b", way="a", micro_batch=0, layer=1, rows=rows)
    with ELSEWHERE:
        came, nothing = joined([(message, x.numpy().tobytes())])
        assert torch.equal(came, x) and nothing.shape == (0, 2) and nothing.device.type == "cpu"
        sums = LayerSums([model[0]], micro_batches=1)
        sums.begin([0])
        model[0](came).sum().backward()
        sums.add(model[0], 4)
        sums.tell_loss(0, 2.0, 4)
        assert sums.loss_sum() == 8.0
