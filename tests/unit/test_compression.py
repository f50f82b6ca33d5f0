"""Gradients that are shorter on the wire: what is lost, what is not, and that all nodes apply the same."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from chaosnet.node.sums.all_reduce import AllReduce
from chaosnet.node.sums.compression import BLOCK, BFloat16, Exact, Int8
from chaosnet.node.sums.gradients import Gradients
from chaosnet.protocols.effects import Accumulate, AdoptChunks, FinishChunks, ResetAttempt, SendDown, SendUp
from chaosnet.protocols.errors import RemoteProtocolError
from chaosnet.protocols.messages import Up

ENCODINGS = (Exact(np.dtype(np.float32)), BFloat16(), Int8())
KEY = (1, 1)
sizes = st.integers(1, 3 * BLOCK)
of_each = pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda each: type(each).__name__)


def numbers(size, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def there_and_back(encoding, values):
    data = bytes(encoding.encode(values))
    assert len(data) == encoding.size(values.size)
    return encoding.decode(data)


@of_each
@given(size=sizes, scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
def test_what_is_decoded_is_near_what_was_encoded(encoding, size, scale):
    values = numbers(size, size, scale)
    decoded = there_and_back(encoding, values.copy())
    within = {Exact: 0.0, BFloat16: 2**-8, Int8: 0.51 / 127}[type(encoding)]
    largest = np.abs(values)
    if isinstance(encoding, Int8):  # Of its block, which has one scale.
        starts = np.arange(0, size, BLOCK)
        largest = np.repeat(np.maximum.reduceat(largest, starts), BLOCK)[:size]
    subnormal = (
        2.0**-134 if isinstance(encoding, BFloat16) else 0.0
    )  # Half the distance of the smallest numbers.
    assert (np.abs(decoded - values).astype(np.float64) <= within * largest + subnormal).all()


def test_the_smallest_numbers_are_near_what_was_encoded():
    values = np.array([-1.58058e-40, 1e-45, 3e-39], np.float32)
    assert np.abs(there_and_back(BFloat16(), values.copy()) - values).max() <= np.float32(2.0**-134)


@of_each
@given(size=sizes)
def test_zeros_and_what_is_decoded_once_stay_what_they_are(encoding, size):
    assert not there_and_back(encoding, np.zeros(size, np.float32)).any()
    once = there_and_back(encoding, numbers(size))
    assert np.allclose(there_and_back(encoding, once.copy()), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.frombuffer(b"\xff\xff\xff\x7f", np.float32)[0]])
@of_each
def test_what_is_not_finite_does_not_pass_for_a_number(encoding, bad):
    values = numbers(3 * BLOCK)
    values[BLOCK + 3] = bad
    decoded = there_and_back(encoding, values.copy())
    assert not np.isfinite(decoded[BLOCK + 3])
    assert np.isfinite(decoded[:BLOCK]).all() and np.isfinite(decoded[2 * BLOCK :]).all()


def test_numbers_near_nothing_become_nothing():
    assert not there_and_back(Int8(), np.full(10, 1e-44, np.float32)).any()


# --- in the all-reduce ---


class Node:
    """One that reduces a single chunk with others; frames go by hand."""

    def __init__(self, values, encoding):
        self.sent = []
        store = SimpleNamespace(
            lanes=[SimpleNamespace(op="mean")],
            chunks=[SimpleNamespace(lane=0, is_gradient=True)],
            contribution=lambda chunk: torch.from_numpy(values),
            encoding=lambda chunk: encoding,
            stays=False,
        )
        self.reduce = AllReduce(store, lambda peer, header, payload, **how: self.sent.append(bytes(payload)))

    def up(self, step):
        self.reduce.perform(SendUp(KEY, step, range(1), "root", 1.0, True))
        return frame(self.sent.pop())

    def take(self, *parts):
        for place, part in enumerate(parts):
            self.reduce.perform(Accumulate(range(1), part, place))

    def root(self, step, *parts):
        """As the root: the result for all."""
        self.take(*parts)
        self.reduce.perform(FinishChunks(step, range(1), 1.0 + len(parts), True))
        self.reduce.perform(SendDown(KEY, step, range(1), ("child",), 1.0 + len(parts), None))
        return frame(self.sent.pop())


def frame(data):
    return SimpleNamespace(buffer=memoryview(bytearray(data)))


def train(encoding, steps, *contributions):
    """The first is the root's. Returns: the result of each step, which all have alike."""
    root, *leaves = [Node(values, encoding) for values in contributions]
    results = []
    for step in range(steps):
        result = root.root(step, *[leaf.up(step) for leaf in leaves])
        for leaf in leaves:
            leaf.reduce.perform(AdoptChunks(step, range(1), result))
        got = [node.reduce.completed(step)[0] for node in (root, *leaves)]
        assert all(torch.equal(got[0], each) for each in got)
        results.append(got[0].numpy().copy())
    return results


@of_each
def test_all_nodes_get_the_same_mean_and_nearly_the_right_one(encoding):
    parts = [numbers(2 * BLOCK + 7, seed) for seed in range(3)]
    [result] = train(encoding, 1, *parts)
    assert np.abs(result - np.mean(parts, axis=0)).max() < 0.06


def test_what_eight_bits_lose_comes_later():
    """Beside one of 1.0, gradients of 0.001 round to nothing; over steps they count as much as they should."""
    parts = [np.full(BLOCK, 0.001, np.float32) for _ in range(3)]
    for part in parts:
        part[0] = 1.0
    results = train(Int8(), 400, *parts)
    assert not results[0][1:].any()
    assert np.mean(results, axis=0)[1:] == pytest.approx(0.001, rel=0.05)
    assert max(len(np.unique(each[1:])) for each in results) == 1


def test_an_attempt_that_is_void_loses_nothing_twice():
    node = Node(numbers(BLOCK), Int8())
    first = bytes(node.up(0).buffer)
    for _ in range(3):
        node.reduce.perform(ResetAttempt())
        assert bytes(node.up(0).buffer) == first
    node.reduce.completed(0)
    assert bytes(node.up(1).buffer) != first


def test_who_catches_up_with_the_result_of_a_void_attempt_has_lost_what_it_sent_for_it():
    node = Node(numbers(BLOCK), Int8())
    sent = node.up(0)
    node.reduce.perform(ResetAttempt())
    node.reduce.perform(AdoptChunks(0, range(1), sent))
    node.reduce.completed(0)
    assert np.array_equal(node.reduce.lost[0], numbers(BLOCK) - Int8().decode(sent.buffer))


def test_of_a_step_that_the_guard_refuses_nothing_is_kept():
    node = Node(numbers(BLOCK), Int8())
    node.reduce.guarded = True
    node.up(0)
    node.reduce.perform(AdoptChunks(0, range(1), frame(Int8().encode(np.full(BLOCK, np.nan, np.float32)))))
    node.reduce.completed(0)
    assert not node.reduce.lost


def test_a_step_without_gradients_brings_nothing_of_what_was_lost():
    values = numbers(BLOCK)
    node = Node(values, Int8())
    node.up(0)
    node.reduce.completed(0)
    lost, kept = node.reduce.lost[0], values.copy()
    values[:] = 0
    assert not Int8().decode(node.up(1).buffer).any()
    node.reduce.completed(1)
    assert node.reduce.lost[0] is lost and lost.any()
    values[:] = kept
    assert bytes(node.up(2).buffer) != bytes(Node(kept, Int8()).up(0).buffer)


def test_what_is_not_finite_is_not_kept():
    values = numbers(2 * BLOCK)
    node = Node(values, Int8())
    good, values[3] = values[3], np.nan
    node.up(0)
    node.reduce.completed(0)
    values[3] = good
    assert np.isfinite(Int8().decode(node.up(1).buffer)).all()


@of_each
def test_a_part_of_another_length_is_refused(encoding):
    node, size = Node(numbers(BLOCK), encoding), encoding.size(BLOCK)
    up = Up(key=KEY, step=0, chunk=0, weight=1.0)
    node.reduce.check(up, frame(bytes(size)))
    with pytest.raises(RemoteProtocolError, match=f"expected {size}"):
        node.reduce.check(up, frame(bytes(size + 1)))


# --- of a model ---


def test_only_float32_gradients_are_compressed():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8, dtype=torch.float64))
    gradients = Gradients(model, 4096, compression="int8")
    kinds = [type(gradients.encoding(chunk.index)) for chunk in gradients.chunks]
    for chunk, kind in zip(gradients.chunks, kinds, strict=True):
        narrow = gradients.lanes[chunk.lane].dtype == torch.float32
        assert kind is (Int8 if narrow and chunk.is_gradient else Exact)
    assert set(kinds) == {Int8, Exact}
    exact = Gradients(model, 4096).total_bytes
    narrow_bytes = 4 * sum(p.numel() for p in model.parameters() if p.dtype == torch.float32)
    assert exact - gradients.total_bytes == pytest.approx(0.75 * narrow_bytes, rel=0.02)
