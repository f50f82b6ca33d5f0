"""What a member has of the training state where members keep only parts of it."""

import threading

import pytest
import torch
from torch import nn

from chaosnet import ConfigError
from chaosnet.engines.state_parts import StateParts
from chaosnet.node.state.training_state import TrainingState

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def adagrad_makes_its_state_in_a_step():
    """That of torch 2.6 does not."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.Adagrad([parameter])
    optimizer.state.clear()
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


class Member:
    def __init__(self, make=OPTIMIZERS["adamw"]):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 2), nn.Linear(2, 2))
        self.model[0].to(memory_format=torch.channels_last)
        self.optimizer = make(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.groups = [list(layer.parameters()) for layer in self.model]
        self.parts = StateParts(self.model, self.groups, self.optimizer)
        self.parts.check_optimizer()

    def step(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for number, group in enumerate(self.groups):
            for parameter in group:
                grad = torch.randn(parameter.shape, generator=generator)
                parameter.grad = grad if number in self.parts.held else None
        self.optimizer.step()
        self.parts.note_stepped(range(len(self.parts.parameters)))

    def digests(self):
        return {group: self.parts.digest(group) for group in self.parts.held}


def hand_over(source, target, group, whole=True):
    slots = zip(source.parts.slots(group, whole), target.parts.slots(group, whole), strict=True)
    for theirs, mine in slots:
        target.parts.bring(mine, source.parts.content(theirs).clone().contiguous())
    if whole:
        target.parts.brought(group)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_that_move_are_stepped_as_if_they_had_never_moved(name):
    if name == "adagrad" and not adagrad_makes_its_state_in_a_step():
        pytest.skip("this torch's Adagrad makes its state in its constructor only, and is refused")
    alone, a, b = (Member(OPTIMIZERS[name]) for _ in range(3))
    b.parts.start_over(())
    for member in (alone, a):
        member.step(1)
    b.parts.note_stepped(range(6))
    hand_over(a, b, 0)
    hand_over(a, b, 2)
    a.parts.keep({1, 2})
    for seed in (2, 3):
        for member in (alone, a, b):
            member.step(seed)
    hand_over(b, a, 0)
    for member in (alone, a, b):
        member.step(4)
    assert a.digests() == alone.digests()
    assert b.digests().items() <= alone.digests().items() and b.digests().keys() == {0, 2}


def test_what_is_not_here_takes_no_memory_and_reads_as_nan():
    member = Member()
    member.step(1)
    whole = member.parts.held_bytes
    member.parts.keep({1})
    kept = sum(
        3 * p.nbytes + p.nbytes for p in member.groups[1]
    )  # Parameters, and three of AdamW with amsgrad.
    assert kept <= member.parts.held_bytes < kept + 16 < whole
    parameter = member.model[0].weight
    assert parameter.shape == (3, 2, 3, 3) and parameter.isnan().all()
    assert parameter.untyped_storage().nbytes() == 4
    assert member.optimizer.state[parameter]["exp_avg"].untyped_storage().nbytes() == 4


def test_all_members_have_the_same_names_types_and_shapes():
    rows = []
    for kept in ({0, 1, 2}, {0}, ()):
        member = Member()
        member.step(1)
        member.parts.keep(kept)
        state = TrainingState(member.model, member.optimizer, member.schedule)
        state.parted = member.parts.parameters
        rows.append(
            [(e.name, e.dtype, e.shape) for e in state.begin_capture(1, {}, lambda e, a: ()).manifest.entries]
        )
    assert rows[0] == rows[1] == rows[2]
    named = member.parts.owners()
    assert {name for name, _, _ in rows[0]} == named.keys() and {*named.values()} == {0, 1, 2}


def test_an_optimizer_may_keep_something_beside_what_it_knows_of_parameters():
    member = Member()
    member.optimizer.state["all"]["calls"] = 0
    member.step(1)
    state = TrainingState(member.model, member.optimizer, member.schedule)
    plain, state.parted = state.state_bytes(), member.parts.parameters
    assert 0 == state.state_bytes() < plain


def test_a_parameter_keeps_its_layout_in_memory():
    member = Member()
    other = Member()
    strides = member.model[0].weight.stride()
    other.parts.keep({1})
    hand_over(member, other, 0)
    assert other.model[0].weight.stride() == strides


def test_parameters_alone_are_no_part_that_is_held():
    member, other = Member(), Member()
    member.step(1)
    other.parts.start_over(range(6))
    hand_over(member, other, 0, whole=False)
    assert torch.equal(other.model[0].weight, member.model[0].weight) and not other.parts.held


def test_what_is_computed_but_not_kept_does_not_pass_for_the_newest():
    member, other = Member(), Member()
    other.parts.keep({0}, needed={0, 1})
    assert other.model[1].weight.isnan().all()
    hand_over(member, other, 1, whole=False)
    assert torch.equal(other.model[1].weight, member.model[1].weight)


def test_settings_of_the_optimizer_may_come_with_the_state():
    """Amsgrad is no part of what members compare when one joins."""
    theirs = lambda p: torch.optim.AdamW(p, lr=0.1)  # noqa: E731
    source, target = Member(theirs), Member()
    source.step(1)
    target.optimizer.load_state_dict(theirs(target.model.parameters()).state_dict())
    target.parts.start_over(range(6))
    hand_over(source, target, 0)
    assert target.parts.digest(0) == source.parts.digest(0)


def test_an_optimizer_that_draws_is_refused_and_leaves_the_generator_as_it_was():
    class Noisy(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            torch.rand(1)

    model = nn.Linear(2, 2)
    parts = StateParts(model, [list(model.parameters())], Noisy(model.parameters(), lr=0.1))
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match="Noisy draws random numbers"):
        parts.check_optimizer()
    assert torch.equal(torch.get_rng_state(), before)


def test_what_others_draw_while_an_optimizer_is_tried_is_not_laid_to_it():
    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            other = threading.Thread(target=torch.rand, args=(1,))
            other.start()
            other.join()
            super().step()

    model = nn.Linear(2, 2)
    parts = StateParts(model, [list(model.parameters())], Watched(model.parameters(), lr=0.1))
    before = torch.get_rng_state()
    parts.check_optimizer()
    assert not torch.equal(torch.get_rng_state(), before)


def test_attributes_of_an_optimizer_of_ones_own_are_there_when_it_is_tried():
    class Scaled(torch.optim.SGD):
        def __init__(self, parameters, lr):
            super().__init__(parameters, lr)
            self.scale = 2.0

        def step(self, closure=None):
            assert self.scale == 2.0
            super().step()

    Member(lambda parameters: Scaled(parameters, lr=0.1))


def test_an_optimizer_that_keeps_numbers_is_refused_by_name():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["calls"] = 1

    with pytest.raises(ConfigError, match="Counting keeps 'calls' of a parameter as int"):
        Member(lambda parameters: Counting(parameters, lr=0.1))


def test_an_optimizer_that_makes_some_of_its_state_later_is_refused_by_name():
    class Slow(torch.optim.SGD):
        calls = 0

        def step(self, closure=None):
            super().step()
            self.calls += 1
            for parameter in self.param_groups[0]["params"] if self.calls == 3 else ():
                self.state[parameter]["slow"] = parameter.detach().clone()

    member = Member(lambda parameters: Slow(parameters, lr=0.1))
    for seed in (1, 2):
        member.step(seed)
        member.digests()
    member.step(3)
    with pytest.raises(ConfigError, match="Slow has made or changed 'slow' of a parameter in a later step"):
        member.digests()


def test_an_optimizer_whose_constructor_alone_makes_its_state_is_refused_by_name():
    class Early(torch.optim.SGD):
        def __init__(self, parameters, lr):
            super().__init__(parameters, lr)
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["sum"] = torch.zeros_like(parameter)

        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["sum"] += parameter.grad

    with pytest.raises(ConfigError, match="the step of Early does not make 'sum' of a parameter"):
        Member(lambda parameters: Early(parameters, lr=0.1))


def test_a_trained_parameter_that_is_not_stepped_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="it lacks a trained parameter"):
        StateParts(model, [list(model.parameters())], torch.optim.SGD([model.weight], 0.1)).check_optimizer()


def test_what_the_optimizer_knows_is_counted_here_or_elsewhere():
    member = Member(OPTIMIZERS["sgd"])
    assert member.parts.known_bytes() == (0, 0, 0)
    member.step(1)
    sizes = tuple(sum(p.nbytes for p in group) for group in member.groups)  # A momentum for each.
    assert member.parts.known_bytes() == sizes
    member.parts.keep({1})
    assert member.parts.known_bytes() == sizes
    member.parts.start_over(())
    assert member.parts.known_bytes() == (0, 0, 0)
