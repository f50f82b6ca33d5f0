"""A training state survives the way to a joiner: through bytes, in any order, to the bit."""

import math
import random
import weakref
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as schedules

from chaosnet.node.state.flat_state import Arrival, Manifest, StateChanged
from chaosnet.node.state.training_state import MANY, TrainingState, first_difference
from chaosnet.protocols.errors import ConfigError, MalformedMessage
from chaosnet.training.named_updates import NamedOptimizers


class Odd(nn.Module):
    """Every kind of tensor that has ever made trouble."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.narrow = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.frozen = nn.Parameter(torch.randn(5)[::2], requires_grad=False)
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("phases", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("cache", torch.randn(2), persistent=False)

    def forward(self, images):
        value = self.norm(self.conv(images)).mean() * self.scale + self.a(torch.ones(4)).sum()
        return value + self.b(torch.ones(4)).mean() + self.narrow.float().sum() + self.wide.float().prod()


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    "tensor lr": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.01)),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.01),
}

SCHEDULERS = {
    "none": lambda o: None,
    "step": lambda o: schedules.StepLR(o, 2, 0.5),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=40, cycle_momentum=False),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 10),
    "multi step": lambda o: schedules.MultiStepLR(o, [2, 4, 4], 0.3),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=3), schedules.MultiStepLR(o, [2, 3])], milestones=[3]
    ),
    "other sequence": lambda o: schedules.SequentialLR(
        o, [schedules.StepLR(o, 2), schedules.ConstantLR(o)], milestones=[3]
    ),
    "chain": lambda o: schedules.ChainedScheduler([schedules.StepLR(o, 2), schedules.ConstantLR(o)]),
    "function": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
}


class Run:
    """One replica, with the model and the optimizer of its choice."""

    def __init__(self, optimizer="adam", scheduler="none", seed=0, extra_state=None):
        torch.manual_seed(seed)
        self.model = net()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.extra_state = extra_state
        self.state = TrainingState(self.model, self.optimizer, self.scheduler, extra_state)

    def train(self, steps, seed):
        """Inputs from `seed`; dropout from the global generator."""
        data = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            x, y = torch.randn(5, 6, generator=data), torch.randn(5, 3, generator=data)
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            if isinstance(self.scheduler, schedules.ReduceLROnPlateau):
                self.scheduler.step(loss.item())
            elif self.scheduler is not None:
                self.scheduler.step()


def snapshot_of(state, step=0, runtime=None):
    capture = state.begin_capture(step, runtime or {})
    capture.run()
    return capture.wait()


def arrival_of(snapshot, pieces=1):
    arrival = Arrival(Manifest.from_bytes(snapshot.manifest.to_bytes()))
    total = snapshot.manifest.total_bytes
    for piece in range(pieces):
        start, stop = total * piece // pieces, total * (piece + 1) // pieces
        arrival.write(start, bytes(snapshot.slice(start, stop)))
    return arrival


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_joiner_trains_on_to_the_same_bits(optimizer, scheduler):
    old, new = Run(optimizer, scheduler, seed=1), Run(optimizer, scheduler, seed=2)
    old.train(5, seed=3)
    arrival = arrival_of(snapshot_of(old.state, 5, {"cursor": [7, 2**70]}), pieces=3)
    old.train(4, seed=4)
    assert new.state.load(arrival) == {"cursor": [7, 2**70]}
    new.train(4, seed=4)
    assert new.state.state_hash() == old.state.state_hash()
    for a, b in zip(old.model.state_dict().values(), new.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_what_a_scheduler_shares_with_the_optimizer_is_one_tensor_after_loading_too():
    """So it is in torch 2.6. Two tensors that are equal would give another hash than one."""
    old, new = Run("tensor lr", "step", seed=1), Run("tensor lr", "step", seed=2)
    old.scheduler.base_lrs = [group["initial_lr"] for group in old.optimizer.param_groups]
    new.state.load(arrival_of(snapshot_of(old.state)))
    assert new.state.state_hash() == old.state.state_hash()


def test_a_joiner_that_has_trained_already_takes_over_an_optimizer_that_has_not():
    old, new = Run("sgd", seed=1), Run("sgd", seed=2)
    new.train(2, seed=5)
    new.state.load(arrival_of(snapshot_of(old.state)))
    assert not new.optimizer.state
    assert new.state.state_hash() == old.state.state_hash()


def test_optimizer_state_of_only_some_parameters_arrives_at_the_same_ones():
    old, new = Run("adam", seed=1), Run("adam", seed=2)
    old.model[4].weight.grad = torch.ones(3, 8)
    old.optimizer.step()
    new.state.load(arrival_of(snapshot_of(old.state)))
    assert list(new.optimizer.state) == [new.model[4].weight]
    assert new.state.state_hash() == old.state.state_hash()


@settings(max_examples=25)
@given(data=st.data())
def test_ranges_of_any_size_in_any_order_give_the_same_state(data):
    old, new = odd_run(seed=1), odd_run(seed=2)
    snapshot = snapshot_of(old)
    total = snapshot.manifest.total_bytes
    cuts = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=40)))
    ranges = data.draw(st.permutations(list(zip([0, *cuts], [*cuts, total], strict=True))))
    arrival = Arrival(Manifest.from_bytes(snapshot.manifest.to_bytes()))
    for start, stop in ranges:
        assert (start, stop) in arrival.missing or any(a <= start and stop <= b for a, b in arrival.missing)
        arrival.write(start, snapshot.slice(start, stop))
    assert arrival.complete
    assert new.state_hash() != old.state_hash()
    new.load(arrival)
    assert new.state_hash() == old.state_hash()


def odd_run(seed):
    torch.manual_seed(seed)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 2, 5, 5)).backward()
    optimizer.step()
    return TrainingState(model, optimizer)


def test_odd_tensors_arrive_with_their_type_shape_and_ties():
    old, new = odd_run(1), odd_run(2)
    new.load(arrival_of(snapshot_of(old), pieces=7))
    theirs = dict(new.model.named_parameters()) | dict(new.model.named_buffers())
    for name, tensor in [*old.model.named_parameters(), *old.model.named_buffers()]:
        assert theirs[name].dtype == tensor.dtype
        assert torch.equal(theirs[name], tensor), name
    assert new.model.a.weight is new.model.b.weight
    assert new.model.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_cache_that_is_expanded_arrives():
    runs = [Run(seed=seed) for seed in (0, 1)]
    for number, run in enumerate(runs):
        run.model.register_buffer("cache", torch.tensor([number]).expand(3), persistent=False)
    runs[1].state.load(arrival_of(snapshot_of(runs[0].state)))
    assert runs[1].model.cache.tolist() == [0, 0, 0]


def test_a_tied_parameter_is_shipped_once():
    names = [entry.name for entry in snapshot_of(odd_run(1)).manifest.entries]
    assert "a.weight" in names
    assert "b.weight" not in names


def test_float32_state_of_a_bfloat16_parameter_is_not_rounded():
    def run():
        model = nn.Linear(3, 3).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.weight] = {"master": torch.full((3, 3), 1 / 3), "note": "as is"}
        return TrainingState(model, optimizer)

    old, new = run(), run()
    new.optimizer.state[new.model.weight]["master"].zero_()
    new.load(arrival_of(snapshot_of(old)))
    assert torch.equal(new.optimizer.state[new.model.weight]["master"], torch.full((3, 3), 1 / 3))
    assert new.optimizer.state[new.model.weight]["note"] == "as is"


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)])
def test_optimizer_state_has_the_memory_format_of_its_parameter(optimizer):
    """Fused optimizers pair elements as they lie in memory."""

    def convolution():
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, TrainingState(model, optimizer(model.parameters(), lr=0.1, fused=True))

    def train(model, state):
        model(torch.ones(1, 3, 5, 5)).square().sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()

    old, new = convolution(), convolution()
    train(*old)
    new[1].load(arrival_of(snapshot_of(old[1])))
    train(*old)
    train(*new)
    assert new[1].state_hash() == old[1].state_hash()


def test_a_cache_buffer_may_differ_in_shape_and_does_not_count():
    old, new = odd_run(1), odd_run(1)
    new.model.cache = torch.randn(9)
    assert new.state_hash() == old.state_hash()
    assert first_difference(new.spec(), old.spec()) is None
    new.load(arrival_of(snapshot_of(old)))
    assert torch.equal(new.model.cache, old.model.cache)


def test_random_generators_continue_where_the_sender_was():
    old, new = Run(seed=1), Run(seed=2)
    random.seed(3)
    np.random.seed(4)
    np.random.standard_normal()  # Leaves a second number cached.
    arrival = arrival_of(snapshot_of(old.state))
    expected = torch.rand(2).tolist(), random.gauss(0, 1), np.random.standard_normal(3).tolist()
    new.state.load(arrival)
    assert (torch.rand(2).tolist(), random.gauss(0, 1), np.random.standard_normal(3).tolist()) == expected


def test_extra_state_is_filled_in_place():
    shadow = torch.zeros(4)
    mine = {"ema": {"w": shadow}, "history": [1], "best": math.inf, "stale": 1}
    theirs = {"history": [1.5, "two"], "ema": {"w": torch.arange(4.0)}, "best": 0.25, "new": (1, b"x")}
    old, new = Run(seed=1, extra_state=theirs), Run(seed=2, extra_state=mine)
    ema, history = mine["ema"], mine["history"]
    new.state.load(arrival_of(snapshot_of(old.state)))
    assert ema["w"] is shadow and mine["ema"] is ema and mine["history"] is history
    assert torch.equal(shadow, torch.arange(4.0))
    assert (history, mine["best"], mine["new"], "stale" in mine) == ([1.5, "two"], 0.25, (1, b"x"), False)
    assert new.state.state_hash() == old.state.state_hash()


def test_extra_state_that_is_read_only_is_replaced():
    def state(value):
        model = nn.Linear(2, 2)
        with torch.inference_mode():
            made = torch.full((3,), value)
        extra = {"made": made, "expanded": torch.tensor(value).expand(3)}
        return TrainingState(model, torch.optim.SGD(model.parameters(), 0.1), extra_state=extra)

    source, joiner = state(1.0), state(2.0)
    joiner.load(arrival_of(snapshot_of(source)))
    assert [each.tolist() for each in joiner.extra_state.values()] == [[1.0] * 3] * 2
    assert joiner.state_hash() == source.state_hash()


def test_a_capture_in_the_background_shows_the_state_at_the_boundary():
    run, twin = Run("adam", "cosine", 1, {"seen": 1}), Run("adam", "cosine", 2, {"seen": 0})
    run.train(3, seed=1)
    expected = run.state.state_hash()
    capture = run.state.begin_capture(3, {})
    run.model(torch.randn(5, 6)).sum().backward()  # Moves the running means.
    run.extra_state["seen"] = 2
    run.scheduler.step()
    capture.run()  # As late as it may come: before the optimizer steps.
    run.optimizer.step()
    assert run.state.state_hash() != expected
    twin.state.load(arrival_of(capture.wait()))
    assert twin.state.state_hash() == expected


def test_a_capture_reports_its_failure_and_its_absence():
    capture = Run().state.begin_capture(4, {})
    with pytest.raises(TimeoutError, match="step 4"):
        capture.wait(0)
    capture._late = [None]  # No tensor.
    capture.run()
    with pytest.raises(AttributeError):
        capture.wait()


def test_a_copy_of_the_state_is_gone_with_who_wanted_it():
    run = Run("adam")
    snapshot = snapshot_of(run.state)
    copied = weakref.ref(snapshot)
    del snapshot
    assert copied() is None


def test_a_slice_of_a_snapshot_is_no_copy():
    snapshot = snapshot_of(Run().state)
    part, again = snapshot.slice(4, 8), snapshot.slice(0, 8)
    again[4] = part[0] ^ 1
    assert part[0] == again[4]


def test_nor_is_one_of_many_tensors_that_are_copied():
    """There may be thousands of small ones in a piece."""
    snapshot = snapshot_of(Run().state)
    total = snapshot.manifest.total_bytes
    whole, last = snapshot.slice(0, total), snapshot.slice(total - 1, total)
    whole[total - 1] = last[0] ^ 1
    assert last[0] == whole[total - 1] and len(snapshot.manifest.entries) > 3


def test_loading_an_optimizer_takes_no_longer_for_each_of_many_parameters(monkeypatch):
    """torch looks for each tensor's index in its group's: where that is a list, from the front."""
    seen = []
    load = torch.optim.Adam.load_state_dict
    monkeypatch.setattr(
        torch.optim.Adam,
        "load_state_dict",
        lambda self, told: (seen.append(told["param_groups"]), load(self, told)),
    )
    there, here = Run("adam"), Run("adam")
    there.train(1, seed=1)
    here.state.load(arrival_of(snapshot_of(there.state)))
    (groups,) = seen
    assert [group["params"] for group in groups] == [range(len(there.optimizer.param_groups[0]["params"]))]
    assert here.state.state_hash() == there.state.state_hash()


def test_nor_does_loading_optimizers_that_have_names(monkeypatch):
    seen = []
    load = torch.optim.Adam.load_state_dict
    monkeypatch.setattr(
        torch.optim.Adam,
        "load_state_dict",
        lambda self, told: (seen.extend(each["params"] for each in told["param_groups"]), load(self, told)),
    )
    states = []
    for _ in range(2):
        models = nn.ModuleDict({name: nn.Linear(3, 2) for name in ("D", "G")})
        parts = {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}
        states.append(TrainingState(models, NamedOptimizers(parts)))
    states[1].load(arrival_of(snapshot_of(states[0])))
    assert seen == [range(2), range(2)]
    assert states[1].state_hash() == states[0].state_hash()


def test_a_frozen_parameter_is_served_from_where_it_lies_and_a_trained_one_from_a_copy():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    state = TrainingState(model, optimizer)
    state.watch()
    snapshot = snapshot_of(state)
    start_by_name = {entry.name: entry.start for entry in snapshot.manifest.entries}
    for name, parameter in model.named_parameters():
        sent = np.frombuffer(snapshot.slice(start_by_name[name], start_by_name[name] + 4), np.float32)
        assert np.shares_memory(sent, parameter.detach().numpy()) == (name == "0.weight")


def test_a_frozen_parameter_that_changes_all_the_same_is_not_sent_but_copied_from_then_on():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    state = TrainingState(model, torch.optim.SGD(model[1].parameters(), 0.1))
    state.watch()
    snapshot = snapshot_of(state)
    model[0].weight.data[0, 0] += 1.0  # Leaves no trace in its version.
    with pytest.raises(StateChanged, match=r"0\.weight is frozen, and was changed nevertheless"):
        snapshot.slice(0, 4)
    expected, later = state.state_hash(), snapshot_of(state)
    model[0].weight.data[0, 0] += 1.0
    joiner = TrainingState(model, torch.optim.SGD(model[1].parameters(), 0.1))
    joiner.load(arrival_of(later))
    assert joiner.state_hash() == expected


def wide_run():
    model = nn.Linear(256, 256)
    state = TrainingState(model, torch.optim.Adam(model.parameters()))
    model(torch.ones(1, 256)).sum().backward()
    state.optimizer.step()
    return model, state


def test_of_a_script_that_waits_only_what_is_small_is_copied():
    model, state = wide_run()
    capture = state.begin_capture(1, {}, held=True)
    capture.run()
    snapshot = capture.wait()
    start_by_name = {entry.name: entry.start for entry in snapshot.manifest.entries}
    for name, parameter in model.named_parameters():
        sent = np.frombuffer(snapshot.slice(start_by_name[name], start_by_name[name] + 4), np.float32)
        assert np.shares_memory(sent, parameter.detach().numpy()) == (name == "weight")
    twin = wide_run()[1]
    twin.load(arrival_of(snapshot, pieces=7))
    assert twin.state_hash() == state.state_hash()


def test_a_frozen_parameter_of_one_element_of_a_slice_is_sent_as_it_is_now():
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.zeros(4)[::4], requires_grad=False)
    state = TrainingState(model, torch.optim.SGD([model.weight, model.bias], 0.1))
    state.watch()
    model.scale.data += 1.0
    snapshot = snapshot_of(state)
    entry = next(entry for entry in snapshot.manifest.entries if entry.name == "scale")
    assert np.frombuffer(snapshot.slice(entry.start, entry.stop), np.float32) == 1.0


def test_what_replaces_a_frozen_parameter_is_what_a_joiner_gets():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    state = TrainingState(model, torch.optim.SGD(model[1].parameters(), 0.1))
    state.watch()
    model[0].weight.data = torch.ones(4, 4)
    assert bytes(snapshot_of(state).slice(0, 64)) == bytes(torch.ones(16).numpy().data)


def replaced(parameter):
    """As averages of weights are swapped in for an evaluation."""
    parameter.data = parameter.data * 2


@pytest.mark.parametrize("change", [lambda parameter: parameter.detach().mul_(2), replaced])
def test_parameters_that_the_script_changes_while_they_are_copied_are_copied_at_once_from_then_on(change):
    run = Run("adam")
    run.train(1, seed=1)
    capture = run.state.begin_capture(1, {})
    change(next(run.model.parameters()))
    capture.run()
    with pytest.raises(StateChanged, match="the script has changed parameters"):
        capture.wait()
    expected = run.state.state_hash()
    capture = run.state.begin_capture(1, {})
    with torch.no_grad():
        next(run.model.parameters()).mul_(2)
    capture.run()
    twin = Run("adam", seed=2)
    twin.state.load(arrival_of(capture.wait()))
    assert twin.state.state_hash() == expected


def test_a_state_may_arrive_in_the_parameters_themselves():
    source, joiner = Run().state, Run().state
    snapshot = snapshot_of(source)
    arrival = Arrival(snapshot.manifest, joiner.places())
    arrival.write(0, snapshot.slice(0, snapshot.manifest.total_bytes))
    joiner.load(arrival)
    assert joiner.state_hash() == source.state_hash()


def test_a_parameter_of_one_element_of_a_slice_arrives_too():
    def state(value):
        model = nn.Module()
        model.weight = nn.Parameter(torch.full((4,), value, dtype=torch.bfloat16)[::4])
        return TrainingState(model, torch.optim.SGD(model.parameters(), 0.1))

    source, joiner = state(1.0), state(2.0)
    snapshot = snapshot_of(source)
    arrival = Arrival(snapshot.manifest, joiner.places())
    arrival.write(0, snapshot.slice(0, snapshot.manifest.total_bytes))
    joiner.load(arrival)
    assert joiner.model.weight.tolist() == [1.0]


def test_what_has_arrived_side_by_side_changes_by_itself():
    """A cache that forward writes into is no change of what the optimizer keeps."""

    class Cached(nn.Module):
        def __init__(self, length):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("cache", torch.zeros(length), persistent=False)

    def state(length):
        model = Cached(length)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        model.weight.sum().backward()
        optimizer.step()
        return TrainingState(model, optimizer, None, {})

    source, joiner = state(5), state(0)
    source.extra_state["mean"] = torch.zeros(3)
    joiner.load(arrival_of(snapshot_of(source)))
    for change in (joiner.model.cache, joiner.extra_state["mean"]):
        capture = joiner.begin_capture(1, {})
        change.add_(1)
        capture.run()
        capture.wait()
    weight = joiner.model.weight
    joiner.model.cache[:3] = weight * 2  # As forward may do it, with gradients.
    assert joiner.model.cache.requires_grad


def test_the_hash_sees_every_part_of_the_state():
    run = Run("adam", "step", extra_state={"n": 0})
    run.train(1, seed=0)
    seen = {run.state.state_hash()}
    changes = [
        lambda: run.model[0].weight.data[0, 0].add_(1e-6),
        lambda: run.model[1].running_mean[0].neg_(),
        lambda: next(iter(run.optimizer.state.values()))["step"].add_(1),
        lambda: run.optimizer.param_groups[0].update(lr=0.5),
        lambda: run.scheduler.step(),
        lambda: run.extra_state.update(n=0.0),
    ]
    for number, change in enumerate(changes):
        change()
        seen.add(run.state.state_hash())
        assert len(seen) == number + 2


def test_the_hash_ignores_the_order_of_dicts_and_random_generators():
    a, b = Run(extra_state={"x": 1, "y": torch.ones(1)}), Run(extra_state={"y": torch.ones(1), "x": 1})
    torch.rand(1)
    assert a.state.state_hash() == b.state.state_hash()


def test_sizes_are_those_of_the_tensors():
    run = Run("sgd")
    parameters = 4 * (6 * 8 + 8 + 8 + 8 + 8 * 3 + 3)
    assert run.state.layer_bytes() == (4 * 3, 4 * 6 * 8)
    assert run.state.state_bytes() == parameters + 4 * (8 + 8) + 8
    run.train(1, seed=0)
    assert run.state.state_bytes() == 2 * parameters + 4 * (8 + 8) + 8
    assert run.state.state_bytes() == snapshot_of(run.state).manifest.total_bytes


def test_the_first_difference_is_named():
    def spec(outputs, frozen=False, schedule="none"):
        model = nn.Sequential(OrderedDict(fc=nn.Linear(84, outputs)))
        model.requires_grad_(not frozen)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainingState(model, optimizer, SCHEDULERS[schedule](optimizer)).spec()

    assert first_difference(spec(10), spec(10)) is None
    here, there = spec(10), spec(12)
    assert first_difference(here, there) == "'fc.weight' is float32 [10, 84] here, float32 [12, 84] there"
    message = "'fc.weight' is float32 [10, 84] here, frozen float32 [10, 84] there"
    assert first_difference(here, spec(10, frozen=True)) == message
    message = "'lr_scheduler' is None here, StepLR there"
    assert first_difference(here, spec(10, schedule="step")) == message
    assert first_difference(here[1:], here) == "'fc.weight' is absent here, float32 [10, 84] there"
    assert first_difference(here[::-1], here) == "tensor 0 is 'extra_state' here, 'fc.weight' there"


def test_spec_digests_agree_exactly_where_specs_do():
    assert Run(seed=1).state.spec_digest() == Run(seed=2).state.spec_digest()
    assert Run("adam").state.spec_digest() != Run("sgd").state.spec_digest()


def test_a_state_of_another_run_is_refused_and_changes_nothing():
    old, new = Run("adam", "step"), Run("adam", "none", seed=5)
    before = new.state.state_hash()
    with pytest.raises(ConfigError, match="'lr_scheduler' is None here, StepLR there"):
        new.state.load(arrival_of(snapshot_of(old.state)))
    assert new.state.state_hash() == before


@pytest.mark.parametrize(
    ("theirs", "ours", "difference"),
    [
        (("sgd", "none"), ("adam", "none"), r"'optimizer' is Adam \[6\] here, SGD \[6\] there"),
        (("adam", "none"), ("sgd", "none"), r"'optimizer' is SGD \[6\] here, Adam \[6\] there"),
        (("sgd", "step"), ("sgd", "sequence"), "is SequentialLR of LinearLR, MultiStepLR here, StepLR there"),
        (("sgd", "other sequence"), ("sgd", "sequence"), "here, SequentialLR of StepLR, ConstantLR there"),
    ],
)
def test_the_state_of_another_optimizer_or_scheduler_is_refused_and_changes_nothing(theirs, ours, difference):
    old, new = Run(*theirs), Run(*ours, seed=5)
    old.train(2, seed=1)
    before = new.state.state_hash()
    with pytest.raises(ConfigError, match=difference):
        new.state.load(arrival_of(snapshot_of(old.state)))
    assert new.state.state_hash() == before


def test_an_optimizer_that_lists_its_parameters_in_another_order_is_refused_and_changes_nothing():
    """Their state goes by their place in its groups: with these it would go to the wrong ones, which it fits."""

    def state_of(order):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        first, second = (list(layer.parameters()) for layer in model)
        params = {"model": first + second, "groups": [{"params": second}, {"params": first}]}[order]
        return TrainingState(model, torch.optim.Adam(params))

    old, new = state_of("groups"), state_of("model")
    before = new.state_hash()
    assert old.spec() == state_of("groups").spec()
    assert "in an order of its own" in str(first_difference(new.spec(), old.spec()))
    snapshot = snapshot_of(old)
    with pytest.raises(
        ConfigError, match=r"'optimizer' is Adam \[4\] here, Adam with parameters in an order of"
    ):
        new.load(arrival_of(snapshot))
    assert new.state_hash() == before
    state_of("groups").load(arrival_of(snapshot))


def test_an_order_tells_two_groups_of_one_size_apart():
    def state_of(first):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        named = sorted(model.named_parameters(), key=lambda pair: not pair[0].endswith(first))
        params = [parameter for _, parameter in named]
        return TrainingState(model, torch.optim.Adam([{"params": params[:2]}, {"params": params[2:]}]))

    with pytest.raises(
        ConfigError, match=r"in an order of its own .* here, .* in an order of its own .* there"
    ):
        state_of("weight").load(arrival_of(snapshot_of(state_of("bias"))))


def test_what_cannot_be_shipped_is_refused_by_name():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ConfigError, match=r"extra_state\['foo'\]\[2\] is a numpy.ndarray; expected plain data"
    ):
        TrainingState(model, optimizer, extra_state={"foo": [0, 1, np.zeros(2)]})
    optimizer.state[model.weight]["sum"] = torch.ones(2, 2).to_sparse()
    with pytest.raises(ConfigError, match=r"optimizer.state\[0\]\['sum'\] is a sparse tensor"):
        TrainingState(model, optimizer)
    odd = nn.Linear(2, 2)
    odd.register_parameter("half of a letter \ud800", nn.Parameter(torch.zeros(1)))
    with pytest.raises(ConfigError, match="surrogates not allowed"):
        TrainingState(odd, torch.optim.SGD(odd.parameters(), lr=0.1))
    words = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0))
    with pytest.raises(ConfigError, match=r"'0' has max_norm=1.0: forward would change rows"):
        TrainingState(words, torch.optim.SGD(words.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="optimizer: LBFGS computes the loss itself"):
        TrainingState(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match="no parameter of the model"):
        TrainingState(nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=0.1))
    complex_model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ConfigError, match="parameter 'weight' is complex64"):
        TrainingState(complex_model, torch.optim.SGD(complex_model.parameters(), lr=0.1))
    lazy = nn.LazyLinear(2)
    with pytest.raises(ConfigError, match="'weight' has no shape yet"):
        TrainingState(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))


def test_ranges_outside_the_state_are_refused():
    arrival = Arrival(snapshot_of(Run().state).manifest)
    total = arrival.manifest.total_bytes
    for start, size in ((-1, 2), (total, 1), (total - 1, 2)):
        with pytest.raises(MalformedMessage):
            arrival.write(start, bytes(size))
    arrival.write(total, b"")
    assert arrival.missing == [(0, total)]


def test_a_tensor_where_none_is_expected_is_refused():
    with pytest.raises(ConfigError, match=r"runtime\['loss'\] is a torch.Tensor"):
        Run().state.begin_capture(0, {"loss": torch.ones(1)})


def test_a_capture_of_some_tensors_copies_only_those():
    run = Run("adam")
    run.train(2, seed=1)
    whole = snapshot_of(run.state)
    sizes = []

    def odd(given, alike):
        sizes.extend(entry.stop - entry.start for entry in given)
        return range(1, len(given), 2)

    capture = run.state.begin_capture(2, {}, odd)
    capture.run()
    part, entries = capture.wait(), whole.manifest.entries
    assert sizes == [entry.stop - entry.start for entry in entries]
    for index, entry in enumerate(entries):
        if index % 2:
            assert part.slice(entry.start, entry.stop) == whole.slice(entry.start, entry.stop)
        elif entry.stop > entry.start:
            with pytest.raises(AssertionError, match="was not copied"):
                part.slice(entry.start, entry.stop)
    assert capture._target.nbytes == sum(sizes[1::2])


def test_many_small_tensors_are_copied_at_the_boundary():
    """Another thread would only take turns with the training thread."""
    model = nn.ParameterList(nn.Parameter(torch.full((2,), float(index))) for index in range(MANY))
    state = TrainingState(model, torch.optim.SGD(model.parameters(), 1.0))
    expected = state.state_hash()
    capture = state.begin_capture(1, {})
    with torch.no_grad():
        model[7].mul_(2)  # Before the rest is copied: there is no rest.
    capture.run()
    twin = TrainingState(
        copy := nn.ParameterList(map(torch.zeros_like, model)), torch.optim.SGD(copy.parameters(), 1.0)
    )
    twin.load(arrival_of(capture.wait()))
    assert twin.state_hash() == expected
