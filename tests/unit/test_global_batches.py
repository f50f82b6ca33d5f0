"""`chaosnet.engines.global_batches`: which samples a step takes."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from chaosnet.engines.global_batches import GlobalBatches
from chaosnet.protocols.errors import ConfigError

CPU = torch.device("cpu")


def make(samples=10, batch=4, micro_batch=2):
    batches = GlobalBatches(batch, micro_batch, seed=0)
    batches.give(TensorDataset(torch.arange(samples), torch.arange(samples)), None)
    batches.agree(samples)
    return batches


def taken(batches):
    step = batches.step(CPU, 0)
    return [x for number, count in enumerate(step.samples) if count for x in step.fetch(number)[0].tolist()]


def test_an_epoch_takes_each_sample_once_and_the_next_in_another_order():
    batches, orders = make(), []
    for _ in range(2):
        order = taken(batches)
        while not batches.advance():
            order += taken(batches)
        assert sorted(order) == list(range(10))
        orders.append(order)
    assert orders[0] != orders[1]
    assert batches.epoch == 2


def test_the_last_step_of_an_epoch_has_fewer_samples_or_micro_batches_without_any():
    batches = make(samples=9)
    batches.advance()
    batches.advance()
    assert batches.samples() == [1, 0]


def test_inputs_and_targets_are_of_the_same_samples():
    step = make().step(CPU, 0)
    assert torch.equal(step.fetch(1)[1], step.fetch(1)[0])


def test_a_joiner_goes_on_where_the_others_are():
    batches, joiner = make(), GlobalBatches(4, 2, seed=0)
    batches.advance()
    joiner.from_plain(batches.to_plain())
    joiner.give(TensorDataset(torch.arange(10), torch.arange(10)), None)
    assert taken(joiner) == taken(batches)


@pytest.mark.parametrize(
    ("batch", "micro_batch", "names"),
    [
        (0, 1, "batch: 0"),
        (4, 3, "micro_batch: 3 does not divide the batch of 4"),
        (4, 2.0, "micro_batch: 2.0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(batch, micro_batch, names):
    with pytest.raises(ConfigError, match=names):
        GlobalBatches(batch, micro_batch, seed=0)


def test_another_data_set_takes_the_place_of_the_one_before():
    batches = make()
    before = batches.step(CPU, 0).fetch(0)[0]
    batches.give(TensorDataset(torch.arange(10) + 100, torch.arange(10)), None)
    assert torch.equal(batches.step(CPU, 0).fetch(0)[0], before + 100)


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("data", "names"),
    [(_Stream(), "IterableDataset"), ([], "0 samples"), (TensorDataset(torch.arange(3)), "expected 10")],
)
def test_data_that_cannot_be_dealt_is_refused(data, names):
    batches = make()
    with pytest.raises(ConfigError, match=names):
        batches.give(data, None)


def test_data_of_another_length_than_that_of_a_member_is_refused():
    batches = GlobalBatches(4, 2, seed=0)
    batches.give(TensorDataset(torch.arange(10), torch.arange(10)), None)
    with pytest.raises(ConfigError, match=r"10 samples \(expected 12, as another member has\)"):
        batches.agree(12)


def test_a_batch_that_is_no_pair_is_refused_by_its_type():
    batches = GlobalBatches(4, 2, seed=0)
    batches.give([{"x": 1}] * 10, None)
    batches.agree(10)
    with pytest.raises(ConfigError, match="a batch is dict"):
        batches.step(CPU, 0).fetch(0)[0]


def test_a_member_without_data_says_what_is_missing():
    with pytest.raises(ConfigError, match="call steps"):
        GlobalBatches(4, 2, seed=0).step(CPU, 0)


class _Noisy:
    """Draws with each sample, from all three generators."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        drawn = torch.rand(1), torch.tensor([random.random(), np.random.rand()])
        return torch.cat(drawn), torch.cat(drawn)


def test_a_data_set_that_draws_gives_both_ends_of_a_pipeline_the_same():
    def of_a_member():
        batches = GlobalBatches(4, 2, seed=0)
        batches.give(_Noisy(), None)
        batches.agree(10)
        torch.manual_seed(random.randrange(1000))
        return batches.step(CPU, 7)

    first, last = of_a_member(), of_a_member()
    assert torch.equal(first.fetch(1)[0], last.fetch(1)[1])
    assert not torch.equal(first.fetch(0)[0], first.fetch(1)[0])
