"""`chaosnet.engines.global_batches`: which samples a step takes."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from chaosnet.engines.global_batches import GlobalBatches
from chaosnet.protocols.errors import ConfigError
from chaosnet.protocols.messages import Contribution, Strike

CPU = torch.device("cpu")


def make(samples=10, batch=4, micro_batch=2):
    batches = GlobalBatches(batch, micro_batch, seed=0)
    batches.give(TensorDataset(torch.arange(samples), torch.arange(samples)), None)
    batches.agree(samples)
    return batches


def advance(batches, applied=True, strikes=()):
    """A step is done. Returns: whether it was the last of an epoch."""
    epoch = batches.epoch
    batches.completed(Contribution(weight=1.0, dataset=batches.length, strikes=strikes), applied)
    return batches.epoch > epoch


def taken(batches):
    step = batches.step(CPU, 0)
    return [x for number, count in enumerate(step.samples) if count for x in step.fetch(number)[0].tolist()]


def test_an_epoch_takes_each_sample_once_and_the_next_in_another_order():
    batches, orders = make(), []
    for _ in range(2):
        order = taken(batches)
        while not advance(batches):
            order += taken(batches)
        assert sorted(order) == list(range(10))
        orders.append(order)
    assert orders[0] != orders[1]
    assert batches.epoch == 2


def test_the_last_step_of_an_epoch_has_fewer_samples_or_micro_batches_without_any():
    batches = make(samples=9)
    advance(batches)
    advance(batches)
    assert batches.samples() == [1, 0]


def test_inputs_and_targets_are_of_the_same_samples():
    step = make().step(CPU, 0)
    assert torch.equal(step.fetch(1)[1], step.fetch(1)[0])


def test_a_joiner_goes_on_where_the_others_are():
    batches, joiner = make(), GlobalBatches(4, 2, seed=0)
    advance(batches)
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


def strike(node, *where):
    return Strike(node=node, life=1, ranges=where, reason="bad", epoch=0)


def test_a_sample_with_two_strikes_is_set_aside_in_all_epochs_and_said():
    batches = make()
    position = 2  # Of the second micro-batch.
    index = batches.share.indices([position])[0]
    assert advance(batches, applied=False, strikes=(strike("b", (2, 4)),)) is False
    assert sorted(taken(batches)) == sorted(batches.share.indices([0, 1, 2, 4]))  # One of two suspects.
    said = batches.completed(Contribution(weight=0.0, dataset=10, strikes=(strike("c", (2, 3)),)), False)
    assert len(said) == 1 and f"index {index} of the data set" in said[0]
    for _ in range(2):
        order = taken(batches)
        while not advance(batches):
            order += taken(batches)
        assert sorted(order) == [each for each in range(10) if each != index]
    assert batches.share.left_out() == {"samples_set_aside": 3}


def test_who_fails_over_a_sample_blames_that_one_or_else_the_micro_batch_in_hand():
    batches = make()
    assert batches.blamed(None) == () and batches.blamed(1) == ((2, 4),)

    class Damaged:
        def __len__(self):
            return 10

        def __getitem__(self, index):
            if index == bad:
                raise ValueError(index)
            return torch.tensor(index), torch.tensor(index)

    bad = batches.share.indices([3])[0]
    batches.give(Damaged(), None)
    with pytest.raises(ValueError, match=str(bad)):
        batches.step(CPU, 0).fetch(1)
    assert batches.blamed(1) == ((3, 4),)


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (_Stream(), r"IterableDataset.*expected len\(\) and \[index\]\)$"),
        ([], "0 samples"),
        (TensorDataset(torch.arange(3)), "expected 10"),
    ],
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


@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        ({"x": 1}, "the inputs of a batch are dict .expected a tensor, or a tuple of tensors"),
        ("text", "the inputs of a batch are str within a tuple"),
        ((torch.zeros(2), {"mask": 1}), "the inputs of a batch are dict within a tuple"),
    ],
    ids=["dict", "text", "nested"],
)
def test_inputs_that_are_no_tensors_are_refused_by_their_type(inputs, names):
    """They ended with: 'dict' object has no attribute 'detach'."""
    batches = GlobalBatches(4, 2, seed=0)
    batches.give([(inputs, 1)] * 10, None)
    batches.agree(10)
    with pytest.raises(ConfigError, match=names):
        batches.step(CPU, 0).fetch(0)


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
