"""Bundles in the all-reduce: what is kept by chunk, whatever chunks travelled together."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from chaosnet.node.sums.all_reduce import AllReduce
from chaosnet.node.sums.compression import BLOCK, BFloat16, Exact, Int8
from chaosnet.protocols.effects import Accumulate, AdoptChunks, FinishChunks, ResetAttempt, SendDown, SendUp
from chaosnet.protocols.errors import RemoteProtocolError
from chaosnet.protocols.messages import Up

KEY, SIZES = (1, 1), (700, BLOCK, 3, 40)  # Elements by chunk.
STARTS = np.cumsum([0, *SIZES])
ALL = range(len(SIZES))
of_each = pytest.mark.parametrize(
    "encoding", [Exact(np.dtype(np.float32)), BFloat16(), Int8()], ids=lambda each: type(each).__name__
)


class Node:
    """Frames go by hand."""

    def __init__(self, seed, encoding):
        self.values, self.sent = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(seed)), []
        store = SimpleNamespace(
            lanes=[SimpleNamespace(op="mean")],
            chunks=[SimpleNamespace(lane=0)] * len(SIZES),
            contribution=lambda chunks: self.values[STARTS[chunks.start] : STARTS[chunks.stop]],
            encoding=lambda chunk: encoding,
            stays=False,
        )
        self.reduce = AllReduce(store, self._sent)

    def _sent(self, peer, header, payload, tag, **how):
        chunks = range(tag.chunk, tag.chunk + tag.count)
        self.sent.append((chunks, bytes(payload) if payload is not None else None))

    def up(self, step, bundles):
        for chunks in bundles:
            self.reduce.perform(SendUp(KEY, step, chunks, "root", 1.0, True))
        return self.take_sent()

    def finish(self, step, parts):
        for chunks, data in parts:
            self.reduce.perform(Accumulate(chunks, frame(data), 0))
            self.reduce.perform(FinishChunks(step, chunks, 2.0, True))

    def down(self, step, bundles):
        for chunks in bundles:
            self.reduce.perform(SendDown(KEY, step, chunks, ("child",), 2.0, None))
        return self.take_sent()

    def adopt(self, step, parts):
        for chunks, data in parts:
            self.reduce.perform(AdoptChunks(step, chunks, frame(data)))

    def take_sent(self):
        sent, self.sent = self.sent, []
        return sent

    def finish_alone(self, step, bundles, weight=2.0):
        """With what it has stays where it is. Returns: how often that was asked for."""
        asked, contribution = [], self.reduce.store.contribution
        self.reduce.store.stays = True
        self.reduce.store.contribution = lambda chunks: (asked.append(chunks), contribution(chunks))[1]
        for chunks in bundles:
            self.reduce.perform(FinishChunks(step, chunks, weight, True))
        return asked


def frame(data):
    return SimpleNamespace(buffer=memoryview(bytearray(data)))


def train(encoding, *bundlings):
    """Steps of two nodes, one with each bundling. Returns: the root, the leaf, and all results."""
    root, leaf, found = Node(1, encoding), Node(2, encoding), []
    for step, bundles in enumerate(bundlings):
        root.finish(step, leaf.up(step, bundles))
        leaf.adopt(step, root.down(step, bundles))
        ours, theirs = root.reduce.completed(step), leaf.reduce.completed(step)
        assert [len(each) for each in ours] == list(SIZES)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        found.append(torch.cat(ours).clone())
    return root, leaf, found


SINGLE, PAIRS, WHOLE = [range(c, c + 1) for c in ALL], [range(2), range(2, 4)], [ALL]


@pytest.mark.parametrize("bundles", [SINGLE, PAIRS, WHOLE])
def test_who_is_alone_gets_no_results_and_is_not_asked_for_its_part(bundles):
    node = Node(1, Exact(np.dtype(np.float32)))
    asked = node.finish_alone(0, bundles)
    assert node.reduce.completed(0) is None and not asked


@pytest.mark.parametrize("bundles", [SINGLE, PAIRS, WHOLE])
@pytest.mark.parametrize("why", ["kept", "sent", "some sent"])
def test_what_stays_is_computed_once_when_somebody_wants_it(bundles, why):
    node, usual = Node(1, Exact(np.dtype(np.float32))), Node(1, Exact(np.dtype(np.float32)))
    asked = node.finish_alone(0, bundles)
    for chunks in bundles:
        usual.reduce.perform(FinishChunks(0, chunks, 2.0, True))
    wanted = {"sent": bundles, "some sent": bundles[:1]}.get(why, [])
    sent = node.down(0, wanted)
    assert asked == wanted
    found, expected = node.reduce.completed(0, kept=3 if why == "kept" else 1), usual.reduce.completed(0)
    assert asked == wanted, "the rest is left to the thread that trains"
    found = found() if callable(found) else found
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert sorted(asked, key=lambda chunks: chunks.start) == bundles
    assert (
        b"".join(data for _, data in sent)
        == torch.cat(expected).numpy().tobytes()[: sum(len(d) for _, d in sent)]
    )


def test_a_void_attempt_leaves_nothing_in_place():
    node = Node(1, Exact(np.dtype(np.float32)))
    node.finish_alone(0, WHOLE)
    node.reduce.perform(ResetAttempt())
    assert node.reduce.completed(0) == []


@of_each
def test_the_results_are_the_same_to_the_bit_whatever_travels_together(encoding):
    results = [train(encoding, *[bundles] * 3)[2] for bundles in (SINGLE, PAIRS, WHOLE)]
    mixed = train(encoding, WHOLE, SINGLE, PAIRS)[2]
    for other in (*results[1:], mixed):
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@of_each
@pytest.mark.parametrize("before", [SINGLE, PAIRS, WHOLE])
@pytest.mark.parametrize("after", [SINGLE, PAIRS, WHOLE, [range(1), range(1, 4)]])
def test_a_result_is_sent_again_in_other_bundles(encoding, before, after):
    root, _, (result,) = train(encoding, before)
    late = Node(3, encoding)
    late.adopt(0, root.down(0, after))
    assert torch.equal(torch.cat(late.reduce.completed(0)), result)


@of_each
@pytest.mark.parametrize("before", [SINGLE, PAIRS, WHOLE])
@pytest.mark.parametrize("after", [SINGLE, PAIRS, WHOLE])
def test_nothing_of_a_void_attempt_is_left_beside_the_results_of_the_next(encoding, before, after):
    root, _, results = train(encoding, PAIRS, PAIRS)
    late = Node(3, encoding)
    late.finish(2, root.up(2, before[:2]))  # Of an attempt that not all took part in.
    late.reduce.perform(ResetAttempt())
    late.adopt(2, root.down(1, after))
    completed = late.reduce.completed(2)
    assert [len(each) for each in completed] == list(SIZES)
    assert torch.equal(torch.cat(completed), results[-1])
    late.reduce.perform(ResetAttempt())
    assert b"".join(data for _, data in late.down(2, SINGLE)) == b"".join(
        data for _, data in root.down(1, SINGLE)
    )


def test_results_of_earlier_steps_stay_as_long_as_they_are_needed_and_outlive_a_void_attempt():
    node, sent = Node(1, Exact(np.dtype(np.float32))), {}
    for step, kept, there in ((0, 1, [0]), (1, 3, [0, 1]), (2, 3, [0, 1, 2]), (3, 3, [1, 2, 3])):
        sent[step] = [
            (chunks, bytes([step]) * 4 * sum(SIZES[chunks.start : chunks.stop])) for chunks in WHOLE
        ]
        node.adopt(step, sent[step])
        node.reduce.completed(step, kept)
        assert sorted(node.reduce.results) == there
    node.adopt(4, sent[0])
    node.reduce.perform(ResetAttempt())
    assert [node.down(step, WHOLE) for step in (1, 2, 3)] == [sent[step] for step in (1, 2, 3)]
    node.adopt(4, sent[0])
    node.reduce.completed(4)
    assert sorted(node.reduce.results) == [4]


@of_each
def test_sums_that_are_not_finite_warn_of_nothing(encoding):
    """A node whose warnings are errors would end."""
    root, leaf = Node(1, encoding), Node(2, encoding)
    root.values[0], leaf.values[0] = torch.inf, -torch.inf
    root.values[1] = leaf.values[1] = 3e38
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        root.finish(0, leaf.up(0, WHOLE))
        leaf.adopt(0, root.down(0, WHOLE))
        for node in (root, leaf):
            node.reduce.completed(0)


def summed(parts, order):
    """Of these children, who come in this order: what goes up, and how many parts were kept at most."""
    node, most = Node(1, Exact(np.dtype(np.float32))), 0
    for place in order:
        node.reduce.perform(Accumulate(ALL, frame(parts[place]), place))
        most = max(most, len(node.reduce.parts[ALL]))
    ((_, data),) = node.up(0, [ALL])
    return data, most


@pytest.mark.parametrize(
    "places", [[0, 1, 2], [1, 2, 4], range(5), range(9), [0, 3, 4, 5, 6, 8, 13, 17], range(20)]
)
def test_the_sum_is_the_same_to_the_bit_whichever_child_comes_first(places):
    draw = np.random.default_rng(len(places))
    size = sum(SIZES)
    parts = {
        place: (draw.normal(size=size) * 10.0 ** draw.integers(-3, 4)).astype(np.float32) for place in places
    }
    orders = [sorted(places), sorted(places, reverse=True), *[draw.permutation(places) for _ in range(20)]]
    found = {summed(parts, map(int, order))[0] for order in orders}
    assert len(found) == 1
    exact = sum(part.astype(np.float64) for part in parts.values()) + Node(1, None).values.numpy()
    assert np.allclose(np.frombuffer(found.pop(), np.float32), exact, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("late", "most"), [([], 4), ([0], 6), ([19], 4), ([7, 12], 8)])
def test_parts_of_many_children_are_added_before_the_last_has_come(late, most):
    parts = {place: np.ones(sum(SIZES), np.float32) for place in range(20)}
    order = [place for place in range(20) if place not in late] + late
    assert summed(parts, order)[1] == most


@of_each
@pytest.mark.parametrize(("chunk", "count"), [(4, 1), (3, 2), (0, 1 << 20)])
def test_chunks_that_there_are_not_are_the_peers_mistake(encoding, chunk, count):
    up = Up(key=KEY, step=0, chunk=chunk, count=count, weight=1.0)
    with pytest.raises(RemoteProtocolError, match="expected some of one kind of 4"):
        Node(1, encoding).reduce.check(up, frame(b""))


@of_each
def test_a_message_of_another_length_is_the_peers_mistake(encoding):
    node = Node(1, encoding)
    up = Up(key=KEY, step=0, chunk=1, count=2, weight=1.0)
    size = encoding.size(SIZES[1]) + encoding.size(SIZES[2])
    node.reduce.check(up, frame(bytes(size)))
    for wrong in (0, size - 1, size + 4):
        with pytest.raises(RemoteProtocolError, match=rf"2 chunks from 1 on came with {wrong} bytes"):
            node.reduce.check(up, frame(bytes(wrong)))


def test_what_has_no_result_in_a_step_that_has_others_is_served_as_such():
    """A step of pipelines that was found void after a loss was told: the holder ended with a KeyError at a flush."""
    node = Node(1, Exact(np.dtype(np.float32)))
    node.reduce.perform(FinishChunks(0, range(3, 4), 2.0, True))
    assert [(chunks, data is None) for chunks, data in node.down(0, [range(3), range(3, 4)])] == [
        (range(3), True),
        (range(3, 4), False),
    ]
