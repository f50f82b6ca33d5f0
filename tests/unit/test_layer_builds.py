"""`chaosnet.engines.layer_builds`: layers that functions build, with and without parameters."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from chaosnet import Cluster, ConfigError, PipelineTrainer
from chaosnet.engines.layer_builds import LayerBuilds


class Drawn(nn.Module):
    """`before`: is its buffer drawn before its parameter is?"""

    def __init__(self, before: bool):
        super().__init__()
        if before:
            self.register_buffer("noise", torch.rand(3))
        self.inner = nn.Linear(3, 3)
        if not before:
            self.register_buffer("noise", torch.rand(3))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        weight = nn.Parameter(torch.ones(2, 2))
        self.first, self.second = weight, weight


def attention():
    return nn.MultiheadAttention(8, 2)


def of(*functions, seed=7, others=()):
    builds = LayerBuilds(dict(enumerate(functions)), seed, others)
    return builds, [builds.empty(number) for number in range(len(functions))]


def test_a_layer_without_parameters_shows_all_but_their_values():
    builds, (layer,) = of(attention)
    for (name, shown), (there, full) in zip(
        layer.named_parameters(), builds.full(0).named_parameters(), strict=True
    ):
        assert (name, shown.shape, shown.dtype, shown.device) == (there, full.shape, full.dtype, full.device)
        assert shown.isnan().all() and shown.untyped_storage().nbytes() == shown.element_size()
        assert builds.shapes[shown].stride() == full.stride()


def test_first_values_hang_on_the_seed_and_the_layer_alone():
    builds, (first, *_) = of(attention, attention)
    torch.manual_seed(1)
    other, _ = of(lambda: nn.Linear(2, 2), attention)
    values = [[value for _, value in each.values(1)] for each in (builds, other, builds)]
    assert all(torch.equal(a, b) for each in values for a, b in zip(each, values[0], strict=True))
    mine, at_0 = next(builds.values(0))
    assert mine is next(first.parameters()) and not torch.equal(at_0, values[0][0])
    assert torch.equal(next(builds.full(1).parameters()), values[0][0])
    seeded, _ = of(attention, attention, seed=8)
    assert not torch.equal(next(seeded.values(1))[1], values[0][0])


def test_generators_go_on_as_if_nothing_was_built():
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    builds, _ = of(lambda: Drawn(True))
    list(builds.values(0))
    assert torch.equal(torch.rand(2), wanted) and torch.initial_seed() == 3


def test_a_parameter_that_a_layer_has_twice_stays_one():
    builds, (layer,) = of(Tied)
    assert layer.first is layer.second
    assert len(list(builds.values(0))) == 1


def test_what_others_make_meanwhile_has_values():
    made = []
    thread_made = lambda: made.append(nn.Linear(2, 2))  # noqa: E731

    def function():
        import threading

        thread = threading.Thread(target=thread_made)
        thread.start()
        thread.join()
        return nn.Linear(2, 2)

    of(function)
    assert not made[0].weight.is_meta


WORDS = nn.Linear(3, 3)


def with_weight_of(module):
    layer = nn.Linear(3, 3)
    layer.weight = module.weight
    return layer


@pytest.mark.parametrize(
    ("functions", "others", "why"),
    [
        ([lambda: WORDS], (), "parameter 'weight' was there before it"),
        ([lambda: with_weight_of(WORDS)], [WORDS], "parameter 'weight' is another layer's"),
        ([lambda: with_weight_of(WORDS)] * 2, (), "layer 1, .* parameter 'weight' is another layer's"),
        ([lambda: nn.Linear(2, 2).requires_grad_(False)], (), "parameter 'weight' is frozen"),
        ([lambda: nn.Linear(2, 2).to("cpu").weight.sum().item() or nn.ReLU()], (), "without values of its"),
        ([lambda: 3], (), "its function gives int"),
    ],
)
def test_what_cannot_be_built_without_parameters_is_refused(functions, others, why):
    with pytest.raises(ConfigError, match=why):
        of(*functions, others=others)


def test_what_is_built_otherwise_the_second_time_is_refused():
    sizes = iter((2, 3))
    for function, why in (
        (lambda: nn.Linear(2, next(sizes)), "other parameters the second time"),
        (lambda: Drawn(False), "its buffers are drawn after its parameters"),
    ):
        builds, _ = of(function)
        with pytest.raises(ConfigError, match=why):
            list(builds.values(0))


@pytest.mark.realtime
def test_one_member_trains_functions_as_their_modules_with_keepers_or_without():
    data = TensorDataset(torch.ones(4, 8), torch.arange(4) % 3)
    functions = [lambda: nn.Linear(8, 8), nn.ReLU, lambda: nn.Linear(8, 3)]
    found = []
    for keepers in (None, 2):
        with PipelineTrainer(
            functions, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy,
            lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), keepers=keepers,
            batch=4, micro_batch=2, cluster=Cluster(new=True, listen="127.0.0.1:0"), quiet=True,
        ) as trainer:  # fmt: skip
            trainer.gather()  # Before anything is trained.
            first = [each.detach().clone() for each in trainer.model.parameters()]
            losses = [step.metrics["loss"] for step in trainer.steps(data, epochs=3)]
            trainer.gather()
            found.append((losses, first, [each.detach().clone() for each in trainer.model.parameters()]))
    (losses, *parameters), (with_keepers, *others) = found
    assert losses == with_keepers and losses[-1] < losses[0]
    for mine, theirs in zip(parameters, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_first_members_is_a_number():
    with pytest.raises(ConfigError, match="first_members: 0 "):
        PipelineTrainer(
            [nn.Linear], None, nn.functional.mse_loss, batch=1, micro_batch=1, first_members=0,
            cluster=Cluster(new=True, listen="127.0.0.1:0"),
        )  # fmt: skip
