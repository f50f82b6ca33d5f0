"""`chaosnet.training.nan_watch`: a model that has become NaN is told once."""

import torch
from torch import nn

from chaosnet.training.guard import Guard
from chaosnet.training.nan_watch import LOOK_EVERY, NanWatch


def watched(guard=None, every=0):
    """A model with gradients, a watch over it, and what is told."""
    told = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    return model, NanWatch(model, guard, every, told.append), told


def spoil(parameter, value=torch.nan):
    with torch.no_grad():
        parameter.view(-1)[0] = value


def test_the_first_parameter_that_is_nan_is_named_once_with_what_helps():
    model, watch, told = watched()
    watch.look(LOOK_EVERY)
    spoil(model[1].weight)
    for step in range(LOOK_EVERY + 1, 4 * LOOK_EVERY):
        watch.look(step)
    assert told == [
        "the model has become NaN, on all nodes: '1.weight', seen after step 32; "
        'Trainer(..., guard="skip") leaves out a gradient that is not finite'
    ]


def test_it_looks_before_each_checkpoint_and_tells_that_none_is_written():
    model, watch, told = watched(Guard("skip", 10.0), every=10)
    watch.look(1)
    spoil(model[0].bias)
    watch.look(9)
    assert not watch.found
    watch.look(10)
    assert watch.found and told == [
        "the model has become NaN, on all nodes: '0.bias', seen after step 10; no more checkpoints are written, "
        "and those from before are kept: --resume goes back to them"
    ]


def test_a_parameter_without_a_gradient_and_infinities_are_not_nan():
    model, watch, told = watched()
    model[0].weight.grad = None
    spoil(model[0].weight)
    spoil(model[1].weight, torch.inf)
    spoil(model[1].bias, -torch.inf)
    watch.look(LOOK_EVERY)
    assert not told and not watch.found


def test_a_state_that_has_come_from_elsewhere_is_looked_at_anew_after_its_first_step():
    model, watch, told = watched()
    spoil(model[0].bias)
    watch.look(7)
    watch.forget()
    watch.look_again(7)
    assert not watch.found and len(told) == 1
    watch.look(8)
    assert watch.found and len(told) == 2
