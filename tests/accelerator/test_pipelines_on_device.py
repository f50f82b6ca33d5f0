"""PipelineTrainer on devices: between members everything crosses this machine's memory."""

import queue

import pytest
import torch
from members import CPU, PATIENCE_S, alone, data, results_of, together
from torch import nn

from chaosnet import Callbacks, Cluster, PipelineTrainer
from chaosnet.node.sums.layer_sums import LayerSums

SIZES = {"batch": 8, "micro_batch": 2}


def layers(device, dropout=0.0):
    torch.manual_seed(0)
    made = (
        nn.Linear(6, 16),
        nn.Sequential(nn.Tanh(), nn.Dropout(dropout)),
        nn.Linear(16, 16),
        nn.Linear(16, 3),
    )
    return nn.ModuleList(made).to(device)


def trainer(device, dropout=0.0, **settings):
    model = layers(device, dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return PipelineTrainer(list(model), optimizer, nn.functional.cross_entropy, **SIZES, **settings)


def losses_of_one(device, epochs, dropout=0.0, **settings):
    with trainer(device, dropout, **alone(**settings)) as t:
        return [step.metrics["loss"] for step in t.steps(data(), epochs=epochs)]


def test_layers_draw_from_the_generator_of_their_own_device(device, last_device):
    """The same, on whichever of them they are, and whichever is that of now."""
    torch.rand(5, device=last_device)
    assert losses_of_one(last_device, 2, 0.5) == losses_of_one(device, 2, 0.5)


def member(name, device, join, entered, over, losses, **settings):
    """Trains until it was in nine steps of the pipelines that are wanted, or the others have gone."""
    where = {"join": join} if join else {"new": True}
    cluster = Cluster(name=name, listen="127.0.0.1:0", **where)
    told, hops = {}, int(settings["layout"]) - 1
    with trainer(device, cluster=cluster, quiet=True, **settings) as t:
        entered.put(t.session.loop.transport.address)
        in_all = 0
        for step in t.steps(data(), epochs=10**6):
            told[step.step] = step.metrics["loss"]
            in_all += t.layout.count(">") == hops
            is_left = in_all > 0 and t.layout.count(">") < hops
            if in_all >= 9 or is_left or over.is_set():
                break
    losses[name] = told
    return in_all


@pytest.mark.parametrize("kinds", ["two devices", "a CPU and a device"])
def test_two_members_hand_on_tensors_and_train_as_one(device, last_device, kinds):
    exact = kinds == "two devices"
    devices = [device, last_device] if exact else [CPU, device]
    entered, losses = queue.SimpleQueue(), {}
    with together() as (threads, over):
        told = {"layout": "2", "exact": exact}
        first = threads.submit(member, "a", devices[0], "", entered, over, losses, **told)
        join = entered.get(timeout=PATIENCE_S)
        second = threads.submit(member, "b", devices[1], join, entered, over, losses, **told)
        assert sorted(results_of(first, second))[1] >= 9
    most = max(*losses["a"], *losses["b"])
    wanted = losses_of_one(device, -(-most // 3), exact=exact)
    for told in losses.values():
        for step, loss in told.items():
            assert loss == wanted[step - 1] if exact else loss == pytest.approx(wanted[step - 1], rel=1e-3)


def test_three_members_keep_parts_of_the_state_and_train_as_one(device, last_device):
    entered, losses = queue.SimpleQueue(), {}
    told = {"layout": "3", "keepers": 2}
    with together() as (threads, over):
        members = [threads.submit(member, "a", device, "", entered, over, losses, **told)]
        join = entered.get(timeout=PATIENCE_S)
        for name, where in ("b", last_device), ("c", device):
            members.append(threads.submit(member, name, where, join, entered, over, losses, **told))
        assert max(results_of(*members)) >= 9
    most = max(map(max, losses.values()))
    wanted = losses_of_one(device, -(-most // 3))
    for each in losses.values():
        for step, loss in each.items():
            assert loss == wanted[step - 1]


def test_layers_are_waited_for_where_they_are_timed(device, monkeypatch):
    waits, plain = [], torch.accelerator.synchronize
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *a: (waits.append(a), plain(*a)))
    by_step = {}
    callbacks = Callbacks(on_step=lambda event: by_step.update({event.round: len(waits)}))
    losses_of_one(device, 3, callbacks=callbacks)
    counts = {number: by_step[number] - by_step.get(number - 1, 0) for number in by_step if number > 1}
    assert {number: bool(count) for number, count in counts.items()} == {
        number: number < 4 or number % 8 == 0 for number in counts
    }


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("largest", [1.0, 1e6], ids=["fits", "does not fit"])
def test_gradients_of_layers_are_added_up_on_their_device_as_in_this_machines_memory(device, exact, largest):
    parts, told = torch.randn(4, 3, 5, generator=torch.Generator("cpu").manual_seed(0)), []
    parts[2, 1, 1] = largest
    for where in CPU, device:
        layer = nn.Linear(5, 3, bias=False, device=where)
        sums = LayerSums([layer], micro_batches=len(parts), exact=exact)
        for _ in range(2):  # Steps.
            sums.begin([0])
            for part in parts:
                layer.weight.grad = part.to(where)
                sums.add(layer, samples=2)
            assert (sums.groups[0].on_device is not None) is (where is device)
            [(chunks, samples)] = sums.finish([0])
        assert samples == 8
        told.append((sums.present, sums.contribution(chunks).clone()))
    (here, total), (there, crossed) = told
    assert here == there
    if largest == 1.0 or not exact:  # Else it counts for nothing.
        assert torch.equal(total, crossed) if exact else torch.allclose(total, crossed)
