"""`chaosnet.node.sums.layer_sums`: gradients of layers, whose sums hang on no order."""

import functools
import mmap
import operator
import random

import psutil
import pytest
import torch
from torch import nn

from chaosnet.node.sums.layer_sums import GROWS, LayerSums
from chaosnet.protocols.errors import ConfigError

MICRO_BATCHES, SAMPLES = 6, 4


def make_layers(tied=False):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 5, bias=False)]
    if tied:
        layers[2] = _Transposed(layers[0].weight)
    return layers


class _Transposed(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight


def micro_batch(number):
    return torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(number))


def back_through(layers, number, sums, scale=1.0):
    """Layer by layer, as layer_runner.py does. Adds to `sums` the gradients of the layers that it is given."""
    values = [micro_batch(number).requires_grad_()]
    outs = []
    for layer in layers:
        outs.append(layer(values[-1]))
        values.append(outs[-1].detach().requires_grad_())
    loss = scale * outs[-1].square().mean()
    gradient = torch.autograd.grad(loss, outs[-1], retain_graph=True)[0]
    for index in reversed(range(len(layers))):
        outs[index].backward(gradient)
        gradient = values[index].grad
        if index in sums:
            sums[index].add(layers[index], SAMPLES)
        layers[index].zero_grad()


def adopt(sums, present, results, samples):
    """As one who has the sums of all groups does."""
    return sums.adopt(present, results, samples, sums.norms(results, range(len(sums.groups)), True))


def shared(layers, shares, exact=True):
    """The sums of members that take these micro-batches and layers, added as an all-reduce does."""
    for layer in layers:
        layer.zero_grad()
    parts = []
    for share in shares:
        sums = LayerSums(layers, MICRO_BATCHES, exact)
        mine = {layer for _, some in share for layer in some}
        idle = {chunk for chunks in sums.begin(mine) for chunk in chunks}
        for number, some in share:
            back_through(layers, number, dict.fromkeys(some, sums))
        weights = {chunk: weight for chunks, weight in sums.finish(mine) for chunk in chunks}
        values = {
            c.index: sums.contribution(range(c.index, c.index + 1)).clone()
            for c in sums.chunks[:-1]
            if c.index not in idle
        }
        parts.append((values, weights, sums))
    results = []
    for chunk in parts[0][2].chunks[:-1]:
        total = sum(values[chunk.index] for values, _, _ in parts if chunk.index in values)
        weight = sum(weights.get(chunk.index, 0.0) for _, weights, _ in parts)
        results.append(total * (1 / weight))
    masks = [sums.present for _, _, sums in parts]
    present = bytes(_or(masks))
    results.append(torch.zeros(MICRO_BATCHES, dtype=torch.float64))
    sums = LayerSums(layers, MICRO_BATCHES, exact)
    assert adopt(sums, present, results, MICRO_BATCHES * SAMPLES).fits
    return [p.grad.clone() for layer in layers for p in layer.parameters()]


def _or(masks):
    return [functools.reduce(operator.or_, column) for column in zip(*masks, strict=True)]


ALL = (0, 1, 2)
ONE = [[(number, ALL) for number in range(MICRO_BATCHES)]]


@pytest.mark.parametrize("tied", [False, True])
def test_whoever_computes_what_the_sum_is_the_same_to_the_bit(tied):
    layers, rng = make_layers(tied), random.Random(1)
    alone = shared(layers, ONE)
    for _ in range(6):
        members = rng.randint(2, 4)
        shares = [[] for _ in range(members)]
        for number in rng.sample(range(MICRO_BATCHES), MICRO_BATCHES):
            cut = rng.randint(0, 3)
            shares[rng.randrange(members)].append((number, ALL[:cut]))
            shares[rng.randrange(members)].append((number, ALL[cut:]))
        shares = [[part for part in share if part[1]] for share in shares]
        together = shared(layers, [share for share in shares if share])
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("exact", [True, False])
def test_the_sum_is_the_gradient_of_the_whole_batch(exact):
    layers = make_layers()
    found = shared(layers, ONE, exact)
    for layer in layers:
        layer.zero_grad()
    x = torch.cat([micro_batch(number) for number in range(MICRO_BATCHES)])
    nn.Sequential(*layers)(x).square().mean().backward()
    for ours, parameter in zip(found, nn.Sequential(*layers).parameters(), strict=True):
        assert torch.allclose(ours, parameter.grad, rtol=1e-5, atol=1e-7)


def test_gradients_that_do_not_fit_make_the_step_void_once_and_the_grid_coarser():
    layers = make_layers()
    sums = LayerSums(layers, MICRO_BATCHES)
    before = sums.tops
    sums.begin(ALL)
    back_through(layers, 0, dict.fromkeys(ALL, sums), scale=1e6)
    zeros = [torch.zeros(c.stop - c.start, dtype=torch.float64) for c in sums.chunks]
    assert not adopt(sums, sums.present, zeros, SAMPLES).fits
    assert sums.tops == [top + GROWS for top in before]
    sums.begin(ALL)
    back_through(layers, 0, dict.fromkeys(ALL, sums), scale=1e6)
    assert adopt(sums, sums.present, zeros, SAMPLES).fits


def test_the_grid_follows_the_gradients():
    layers = make_layers()
    sums = LayerSums(layers, MICRO_BATCHES)
    small = [torch.full((c.stop - c.start,), 1e-6, dtype=torch.float64) for c in sums.chunks]
    sums.begin(ALL)
    adopt(sums, sums.present, small, SAMPLES)
    assert all(top < 0 for top in sums.tops)


def test_what_is_not_finite_reaches_all():
    layers = make_layers()
    sums = LayerSums(layers, MICRO_BATCHES)
    sums.begin((2,))
    layers[2].weight.grad = torch.full_like(layers[2].weight, float("nan"))
    sums.add(layers[2], SAMPLES)
    ((chunks, weight),) = sums.finish((2,))
    assert weight == SAMPLES
    assert bool(sums.contribution(chunks).isnan().all())


def test_who_has_only_one_layer_of_a_tied_parameter_is_done_with_that():
    layers = make_layers(tied=True)
    sums = LayerSums(layers, MICRO_BATCHES)
    idle = sums.begin((2,))
    back_through(layers, 0, {2: sums})
    assert len(sums.finish((2,))) == 1
    assert len(idle) == len(sums.groups) - 1


def test_a_parameter_without_a_gradient_gets_none():
    layers = make_layers()
    layers[1].bias.grad = None
    sums = LayerSums(layers, MICRO_BATCHES)
    sums.begin(ALL)
    layers[0].weight.grad = torch.ones_like(layers[0].weight)
    sums.add(layers[0], SAMPLES)
    zeros = [torch.zeros(c.stop - c.start, dtype=torch.float64) for c in sums.chunks]
    adopt(sums, sums.present, zeros, SAMPLES)
    assert layers[0].weight.grad is not None
    assert layers[0].bias.grad is None and layers[1].weight.grad is None


def test_no_message_holds_parts_of_two_groups():
    sums = LayerSums(make_layers(tied=True), MICRO_BATCHES)
    firsts = {group.chunks.start for group in sums.groups if group.chunks.start}
    assert firsts <= {*sums.borders}


def test_double_precision_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'weight' of layer 1 is float64"):
        LayerSums([nn.Linear(2, 2), nn.Linear(2, 2).double()], 2)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system takes no memory back")
def test_sums_of_layers_that_others_compute_now_take_no_memory():
    layers = [
        nn.Linear(1000, 2000),
        nn.Linear(2000, 3001),
        nn.Linear(3001, 1000),
    ]  # 16, 48 and 24 MB of float64.
    sums, process = LayerSums(layers, 1), psutil.Process()

    def grows_by(some):
        before = process.memory_info().rss
        sums.begin(some)
        return (process.memory_info().rss - before) / 1e6

    assert grows_by({0, 1, 2}) > 80
    assert grows_by({0, 2}) < -40
    assert grows_by({0, 2}) < 1
    assert grows_by({0, 1, 2}) > 40
