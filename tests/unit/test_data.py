"""`chaosnet.data.share`: batches, the order of an epoch, and how a step's samples are cut for accumulation."""

import copy
from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from chaosnet.data.share import Batch, DataShare, EpochOrder, as_batch, check_dataset, fetch, split
from chaosnet.protocols.data_cursor import DataCursor
from chaosnet.protocols.errors import ConfigError
from chaosnet.protocols.messages import Contribution, Strike


class Squares:
    """A data set that is nothing but len() and [index]."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor(index), index**2


def test_a_batch_is_what_a_data_loader_would_give():
    batch = fetch(Squares(), [3, 0, 5])
    x, y = batch
    assert x.tolist() == batch.x.tolist() == [3, 0, 5]
    assert y.tolist() == batch.y.tolist() == batch[1].tolist() == [9, 0, 25]
    assert (len(batch), batch.samples) == (2, 3)


def test_items_may_be_dictionaries_or_bare_tensors():
    named = fetch([{"image": torch.ones(2), "label": n} for n in range(4)], [1, 3])
    assert named.data["label"].tolist() == [1, 3]
    assert named.data["image"].shape == named.x["image"].shape == (2, 2)
    bare = fetch([torch.tensor(float(n)) for n in range(4)], [2, 3])
    assert bare.x.tolist() == [2, 3] and bare.samples == 2


def test_a_batch_of_single_tensors_that_is_taken_for_one_says_where_it_is():
    batch = fetch([torch.ones(4) for _ in range(4)], [2, 3])
    with pytest.raises(ConfigError, match=r"linear: got a batch .*batch\.x"):
        nn.Linear(4, 1)(batch)
    with pytest.raises(AttributeError, match=r"has no 'shape' .*batch\.x"):
        _ = batch.shape


def test_a_data_set_without_samples_is_told_as_one():
    with pytest.raises(ConfigError, match="the data set has 0 samples"):
        DataShare("a", seed=1).begin(0, 4)


def test_another_data_set_in_the_same_run_is_told_what_is_expected():
    share = DataShare("a", seed=1)
    share.begin(64, 4)
    with pytest.raises(ConfigError, match=r"48 samples here, 64 in the cluster \(expected one data set"):
        share.begin(48, 4)


def test_items_that_are_dictionaries_give_a_dictionary():
    batch = fetch([{"x": torch.ones(2), "labels": n} for n in range(4)], [1, 3])
    assert isinstance(batch, dict) and (lambda x, labels: labels.tolist())(**batch) == [1, 3]
    moved = batch.to("meta")
    assert (moved["x"].device.type, moved.samples, moved.last) == ("meta", 2, True)


def test_fields_are_those_of_the_named_tuple_whatever_their_place():
    Sample = namedtuple("Sample", ["index", "x", "y"])
    batch = fetch([Sample(n, 10 + n, 20 + n) for n in range(4)], [1, 3])
    assert [batch.index.tolist(), batch.x.tolist(), batch.y.tolist()] == [[1, 3], [11, 13], [21, 23]]
    assert batch.to("cpu").x.tolist() == copy.copy(batch).x.tolist() == [11, 13]
    first = fetch([namedtuple("Two", ["y", "z"])(n, 10 + n) for n in range(4)], [1])
    assert (first.y.tolist(), first.x.tolist()) == ([1], [1])


@pytest.mark.parametrize("name", ["samples", "last", "share", "data", "to"])
def test_fields_that_a_batch_has_of_its_own_are_refused(name):
    with pytest.raises(ConfigError, match=f"a field '{name}'"):
        fetch([namedtuple("Sample", ["image", name])(n, n) for n in range(4)], [1])


def test_items_that_are_named_tuples_keep_their_names():
    Pair = namedtuple("Pair", ["image", "label"])
    batch = fetch([Pair(torch.ones(2), n) for n in range(4)], [1, 3])
    _, label = batch
    assert batch.label.tolist() == label.tolist() == [1, 3]
    assert batch.to("meta").image.device.type == "meta"
    assert isinstance(batch.data, Pair)
    with pytest.raises(AttributeError, match="'labels'"):
        _ = batch.labels


def test_the_scripts_own_collate_makes_the_batch():
    words = [torch.arange(n) for n in range(1, 5)]
    batch = fetch(words, [0, 3], collate=lambda items: nn.utils.rnn.pad_sequence(items, batch_first=True))
    assert batch.x.shape == (2, 4)


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(3)


@pytest.mark.parametrize(
    ("dataset", "collate", "says"),
    [
        (Stream(), None, r"Stream is an IterableDataset.*update\(samples=\.\.\.\)"),
        ({1, 2}, None, r"set has no __getitem__"),
        ([1, 2], "pad", r"collate_fn is 'pad'"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused_with_what_to_write(dataset, collate, says):
    with pytest.raises(ConfigError, match=says):
        check_dataset(dataset, collate)


def test_a_data_set_that_can_fetch_many_at_once_does():
    class Many(Squares):
        def __getitems__(self, indices):
            return [(torch.tensor(index), 0) for index in indices]

        def __getitem__(self, index):
            raise AssertionError("one by one")

    assert fetch(Many(), [4, 2]).x.tolist() == [4, 2]


def test_moving_a_batch_keeps_what_it_is():
    batch = Batch([torch.ones(3), {"y": (torch.zeros(3), "text")}], 3)
    batch.last, batch.share = False, 0.25
    moved = batch.to("meta")
    assert moved.x.is_meta and moved.y["y"][0].is_meta and moved.y["y"][1] == "text"
    assert (moved.samples, moved.last, moved.share) == (3, False, 0.25)


class Graphs:
    """As libraries collate, and data sets give."""

    def __init__(self, nodes):
        self.nodes = nodes

    def to(self, device):
        return Graphs(self.nodes.to(device))


def test_what_knows_how_to_get_to_a_device_gets_there_by_itself():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved = as_batch((packed, Graphs(torch.ones(2))), 2).to("meta")
    assert moved.x.data.is_meta and not moved.x.batch_sizes.is_meta
    assert moved.y.nodes.is_meta
    assert as_batch(Graphs(torch.ones(2)), 2).to("meta").data.nodes.is_meta


def test_alone_a_batch_is_a_whole_step():
    batch = fetch(TensorDataset(torch.ones(4, 2)), [0, 1])
    assert batch.last and batch.share == 1.0


def test_every_epoch_is_another_permutation_and_all_nodes_know_it():
    first, second = EpochOrder(100, seed=1), EpochOrder(100, seed=1)
    orders = [tuple(first.indices(epoch, [(0, 100)])) for epoch in (0, 1, 2)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len(set(orders)) == 3
    assert second.indices(1, [(0, 100)]) == list(orders[1])
    assert first.indices(0, [(0, 100)]) == list(orders[0]), "also when asked for an earlier one"
    assert EpochOrder(100, seed=2).indices(0, [(0, 100)]) != list(orders[0])


def test_ranges_are_positions_in_the_permutation():
    order = EpochOrder(50, seed=0)
    whole = order.indices(3, [(0, 50)])
    assert order.indices(3, [(0, 2), (10, 13)]) == [*whole[0:2], *whole[10:13]]
    assert order.indices(3, []) == []


def test_a_negative_seed_is_as_good_as_any():
    assert sorted(EpochOrder(5, seed=-1).indices(2, [(0, 5)])) == [0, 1, 2, 3, 4]


def test_a_share_goes_by_the_order_of_the_cluster_that_it_has_come_to():
    share = DataShare("a", seed=1)
    for seed in (1, 2):
        share.cursor = DataCursor(100, seed)
        assert share.indices(range(100)) == EpochOrder(100, seed).indices(0, [(0, 100)])


@st.composite
def sorted_ranges(draw):
    borders = sorted(draw(st.sets(st.integers(0, 60), max_size=12)))
    return list(zip(borders[::2], borders[1::2], strict=False))


@given(sorted_ranges(), st.integers(1, 9))
def test_parts_hold_every_position_once_in_order_and_none_is_empty(ranges, parts):
    lists = [[p for start, stop in part for p in range(start, stop)] for part in split(ranges, parts)]
    assert [p for each in lists for p in each] == [p for start, stop in ranges for p in range(start, stop)]
    assert len(lists) <= parts and all(lists)
    sizes = [len(each) for each in lists]
    assert len(set(sizes[:-1])) <= 1 and sizes[-1:] <= sizes[:1], "equal, but for the last"


@pytest.mark.parametrize(("count", "parts", "sizes"), [(6, 3, [2, 2, 2]), (5, 3, [2, 2, 1]), (2, 3, [1, 1])])
def test_parts_are_of_the_batch_size_or_less(count, parts, sizes):
    assert [len(part) for part in split([(0, count)], parts)] == sizes


def test_a_sample_that_somebody_trains_on_is_not_set_aside_in_the_same_step():
    share = DataShare("a", seed=0)
    share.begin(8, 4)
    strikes = tuple(Strike(node=node, life=1, ranges=((0, 2),), reason="x") for node in ("b", "c"))
    assert (
        len(share.completed(Contribution(dataset=8, min_samples=1, ranges=((0, 1),), strikes=strikes))) == 1
    )
    assert share.cursor is not None
    assert share.cursor.consumed == [(0, 2)]
    assert share.cursor.samples_aside == 1
