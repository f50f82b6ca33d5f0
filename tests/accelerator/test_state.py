"""The training state goes from devices to CPUs and back to the bit, and each device keeps its generator."""

import threading

import pytest
import torch
from members import CPU, data, loss_of, net

from chaosnet.node.devices import name_of
from chaosnet.node.state import flat_state
from chaosnet.node.state.flat_state import Arrival, Manifest
from chaosnet.node.state.generators import get_generators, seed_devices, set_generators
from chaosnet.node.state.state_window import StateWindow
from chaosnet.node.state.training_state import TrainingState
from chaosnet.node.sums.gradients import Gradients

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
}
WAYS = {"there": (False, True), "back": (True, False), "across": (True, True)}


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, data()[:8]).backward()
        optimizer.step()


def transferred(source, target, meanwhile=lambda: None):
    """As a join does it: most is copied by another thread, while `meanwhile` goes on here."""
    capture = source.begin_capture(7, {})
    copying = threading.Thread(target=capture.run)
    copying.start()
    meanwhile()
    snapshot = capture.wait(20)
    copying.join()
    manifest = Manifest.from_bytes(snapshot.manifest.to_bytes())
    arrival = Arrival(manifest, target.places())
    arrival.write(0, bytes(snapshot.slice(0, manifest.total_bytes)))
    target.load(arrival)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_comes_over_to_the_bit(device, way, kind):
    devices = [device if there else CPU for there in WAYS[way]]
    models = [net(each, seed=number) for number, each in enumerate(devices)]
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in models]
    source, target = map(TrainingState, models, optimizers)
    train(models[0], optimizers[0])
    transferred(source, target, lambda: loss_of(models[0].eval(), data()[:8]))
    assert target.state_hash() == source.state_hash()
    assert all(p.device == devices[1] for p in models[1].parameters())
    models[0].train()
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 1)  # What has come can be trained on.


def test_how_an_optimizer_steps_is_each_nodes_own(device):
    """A state of `capturable` or `fused` steps would have the CPU's step counts on no device that steps so."""
    here, there = net(CPU), net(device)
    plain, special = (
        torch.optim.Adam(here.parameters(), lr=0.5),
        torch.optim.Adam(there.parameters(), lr=0.01, capturable=True),
    )
    source, target = TrainingState(there, special), TrainingState(here, plain)
    train(there, special)
    transferred(source, target)
    assert plain.param_groups[0]["lr"] == 0.01 and not plain.param_groups[0]["capturable"]
    assert target.state_hash() == source.state_hash()
    train(here, plain)
    transferred(target, source)
    assert special.param_groups[0]["capturable"]
    assert {state["step"].device for state in special.state.values()} == {device}
    train(there, special)


def test_what_a_stream_of_the_scripts_own_has_stepped_is_copied_by_another_thread(device):
    model, stream = torch.nn.Linear(6, 3, device=device), torch.Stream(device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    source = TrainingState(model, optimizer)
    target = TrainingState(there := torch.nn.Linear(6, 3), torch.optim.Adam(there.parameters()))
    inputs = torch.ones(4, 6, device=device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        model(inputs).sum().backward()
        optimizer.step()  # Nothing here waits for the device: the copy has to.
        transferred(source, target)
        assert target.state_hash() == source.state_hash()
    torch.accelerator.synchronize()


def test_what_is_large_comes_over_in_pieces(device, monkeypatch):
    monkeypatch.setattr(flat_state, "ACCELERATOR_RUN_BYTES", 40)
    source, target = (TrainingState(m, torch.optim.Adam(m.parameters())) for m in (net(device), net(seed=1)))
    transferred(source, target)
    assert target.state_hash() == source.state_hash()


def test_generators_are_those_of_the_devices_of_the_model(last_device):
    """And not those of the device of now, which is another where there are several."""
    state = TrainingState(model := net(last_device), torch.optim.SGD(model.parameters()))
    assert state.accelerators() == (last_device,)
    kept = get_generators(state.accelerators())
    first = torch.rand(4, device=last_device).tolist()
    second = torch.rand(4, device=last_device).tolist()
    set_generators(kept, state.accelerators())
    assert torch.rand(4, device=last_device).tolist() == first != second
    seed_devices(5, [last_device])
    wanted = torch.rand(4, device=last_device).tolist()
    seed_devices(5, [last_device])
    assert torch.rand(4, device=last_device).tolist() == wanted


def test_a_checkpoint_that_holds_one_devices_generator_as_it_is_can_be_resumed(device):
    kept = get_generators([device])
    wanted = torch.rand(4, device=device).tolist()
    kept["accelerator"][1] = kept["accelerator"][1][0]
    set_generators(kept, [device])
    assert torch.rand(4, device=device).tolist() == wanted


def test_generators_of_a_cpu_node_leave_a_devices_alone(device):
    kept = get_generators(())
    torch.manual_seed(3)
    wanted = torch.rand(4, device=device).tolist()
    torch.manual_seed(3)
    set_generators(kept, [device])
    assert torch.rand(4, device=device).tolist() == wanted


def test_states_are_compared_among_devices_of_one_name_only(device, monkeypatch):
    kinds = {}
    for name in (name_of(device), "Another-device"):
        monkeypatch.setattr("chaosnet.node.state.state_window.name_of", lambda _, name=name: name)
        model = net(device)
        state = TrainingState(model, torch.optim.SGD(model.parameters()))
        gradients = Gradients(model)
        kinds[name] = StateWindow(state, gradients).read(0).kind
        gradients.detach()
    assert len({*kinds.values()}) == 2 and " " not in name_of(device)
