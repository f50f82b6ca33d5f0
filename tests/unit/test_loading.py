"""`chaosnet.data.loading`: a script's DataLoader over what its node is dealt, fetched ahead by its workers."""

import os
import time

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from chaosnet.data.loading import Ahead, check_loader
from chaosnet.data.share import DataShare, parts
from chaosnet.protocols.data_cursor import DealRules
from chaosnet.protocols.errors import ConfigError
from chaosnet.protocols.messages import Contribution

LENGTH = 24


class Squares:
    """With the process that has fetched them; sample `bad` is none."""

    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError(f"sample {index} is no picture")
        return index, os.getpid()


class Slow(Squares):
    def __getitem__(self, index):
        time.sleep(1.7 * (index == 5))
        return super().__getitem__(index)


class RunsOut(Squares):
    """As one around an iterator that ends before its time."""

    def __getitem__(self, index):
        return next(iter([])) if index == 5 else super().__getitem__(index)


def no_blame(number):
    raise AssertionError("nothing is wrong")


class OfItsOwn(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


class OtherCollate(DataLoader):
    """As torch_geometric's: it only sets what collates."""

    def __init__(self, dataset, **options):
        super().__init__(dataset, collate_fn=list, **options)


def loader(bad=None, **options):
    return DataLoader(Squares(bad), batch_size=4, **options)


def expecting(*batches):
    return lambda: iter([list(each) for each in batches])


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_expected_is_fetched_by_the_workers_and_comes_in_order(workers):
    ahead = Ahead(loader(num_workers=workers), torch.Generator())
    batches = [[0, 1], [5, 2], [7], [3, 4], [6]]
    ahead.begin(expecting(*batches))
    came = [ahead.fetch(indices, no_blame) for indices in batches]
    assert [batch[0].tolist() for batch in came] == batches
    assert [batch.samples for batch in came] == [2, 2, 1, 2, 1]
    processes = {pid for batch in came for pid in batch[1].tolist()}
    assert (os.getpid() in processes) == (workers == 0) and len(processes) == max(workers, 1)
    ahead.end()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_expected_and_is_not_dealt_is_dropped(workers):
    ahead = Ahead(loader(num_workers=workers), torch.Generator())
    ahead.begin(expecting([0], [1], [2], [3], [4]))
    assert ahead.fetch([0], no_blame)[0].tolist() == [0]
    ahead.begin(expecting([7, 8], [9, 1]))  # Somebody has joined.
    assert [ahead.fetch(each, no_blame)[0].tolist() for each in ([7, 8], [9, 1])] == [[7, 8], [9, 1]]
    ahead.begin(expecting([2]))  # All that was expected has come, and more is dealt.
    assert ahead.fetch([2], no_blame)[0].tolist() == [2]
    ahead.end()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_fetched_is_blamed_when_it_is_dealt_and_not_before(workers):
    ahead = Ahead(loader(5, num_workers=workers), torch.Generator())
    ahead.begin(expecting([0], [5, 6], [7]))
    assert ahead.fetch([0], no_blame).samples == 1
    ahead.begin(expecting([7], [3, 5]))
    assert ahead.fetch([7], no_blame).samples == 1, "nobody needs [5, 6]"
    blamed = []
    with pytest.raises(ValueError, match="sample 5 is no picture"):
        ahead.fetch([3, 5], blamed.append)
    assert blamed == [1]
    ahead.begin(expecting([8]))
    assert ahead.fetch([8], no_blame).samples == 1
    ahead.end()


@pytest.mark.parametrize("persistent", [False, True])
def test_a_batch_that_nobody_needs_and_that_takes_too_long_is_not_taken_for_the_next_one(persistent):
    slow = DataLoader(Slow(), batch_size=4, num_workers=1, timeout=1, persistent_workers=persistent)
    ahead = Ahead(slow, torch.Generator())
    ahead.begin(expecting([0], [5], [6], [7]))
    assert ahead.fetch([0], no_blame)[0].tolist() == [0]
    ahead.begin(expecting([6], [7]))  # Somebody has joined.
    assert [ahead.fetch(each, no_blame)[0].tolist() for each in ([6], [7])] == [[6], [7]]
    ahead.end()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_runs_out_is_blamed(workers):
    ahead = Ahead(DataLoader(RunsOut(), batch_size=4, num_workers=workers), torch.Generator())
    ahead.begin(expecting([0], [4, 5]))
    assert ahead.fetch([0], no_blame).samples == 1
    blamed = []
    with pytest.raises(StopIteration):
        ahead.fetch([4, 5], blamed.append)
    assert blamed == [1]
    ahead.end()


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_live_from_pass_to_pass_if_they_are_persistent(persistent):
    ahead = Ahead(loader(num_workers=1, persistent_workers=persistent), torch.Generator())
    processes = set()
    for _ in range(2):
        ahead.begin(expecting([0], [1]))
        processes.add(ahead.fetch([0], no_blame)[1].item())  # And the second is never asked for.
        ahead.end()
    assert len(processes) == (1 if persistent else 2)


def test_the_usual_random_numbers_are_not_touched():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    ahead = Ahead(loader(shuffle=True), torch.Generator())
    ahead.begin(expecting([0]))
    ahead.fetch([0], no_blame)
    assert torch.equal(torch.get_rng_state(), before)


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(3)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (loader(sampler=WeightedRandomSampler([1.0] * LENGTH, LENGTH)), "has a WeightedRandomSampler"),
        (
            loader(sampler=RandomSampler(Squares(), replacement=True)),
            "RandomSampler that draws with replacement",
        ),
        (loader(sampler=RandomSampler(Squares(), num_samples=3)), "not as many samples as there are"),
        (loader(sampler=RandomSampler(range(3))), "not as many samples as there are"),
        (loader(sampler=SequentialSampler(range(3))), f"of 3 samples, where the data set has {LENGTH}"),
        (
            loader(sampler=DistributedSampler(Squares(), 2, 0)),
            r"DistributedSampler \(Trainer divides the data",
        ),
        (DataLoader(Squares(), batch_size=None), "no batch_size"),
        (DataLoader(Squares(), batch_sampler=[[1, 2]]), r"has list \(Trainer divides"),
        (OfItsOwn(Squares(), 4), "OfItsOwn iterates in a way of its own"),
    ],
)
def test_a_sampler_that_divides_the_data_itself_is_refused_by_name(made, says):
    with pytest.raises(ConfigError, match=says):
        check_loader(made)


def test_a_loader_shuffles_or_not():
    assert check_loader(loader(shuffle=True)) and not check_loader(loader())
    assert not check_loader(OtherCollate(Squares(), batch_size=4))


def share_of(name, deal, **rules):
    share = DataShare(name, seed=1)
    share.begin(LENGTH, dict(deal)[name], DealRules(**rules))
    share.deal = deal
    return share


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "rules", [{}, {"in_order": True, "global_batch": 5}, {"drop_last": True}, {"min_samples": 2}]
)
def test_what_is_expected_is_dealt_if_nothing_happens(accumulate, rules):
    deal = (("a", 4), ("b", 3))
    a, b = share_of("a", deal, **rules), share_of("b", deal, **rules)
    expected = list(a.ahead(2, accumulate))
    dealt, order = [], a.order
    while a.epoch < 2:
        mine = list(a.take())
        dealt += [order.indices(a.epoch, part) for part in parts(mine, accumulate, a.rules.min_samples)]
        total = Contribution(dataset=LENGTH, ranges=tuple(sorted(mine + b.take())), **a.rules._asdict())
        assert not a.completed(total) and not b.completed(total)
    assert dealt == expected
    assert all(len(each) <= 5 for each in expected)
