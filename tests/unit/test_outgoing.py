"""The queue of one connection: what goes first, and what is taken back."""

from __future__ import annotations

import random

from chaosnet.node.transport.outgoing import Outgoing, Rank


def drained(queue: Outgoing) -> list[bytes]:
    found = []
    while queue:
        found.append(queue.next().first)
        queue.taken(0.0)
    return found


def test_lower_ranks_go_first_and_in_order_within_one() -> None:
    queue, rng = Outgoing(), random.Random(1)
    sent = [(rng.choice(list(Rank)), b"%d" % number) for number in range(500)]
    for rank, first in sent:
        queue.push(rank, first, memoryview(b"of no order"), {"nor": "this"})
    assert drained(queue) == [first for _, first in sorted(sent, key=lambda each: each[0])]


def test_within_a_rank_the_lower_turn_goes_first() -> None:
    queue, rng = Outgoing(), random.Random(3)
    sent = [((rng.randrange(3), rng.randrange(9)), b"%d" % number) for number in range(500)]
    for turn, first in sent:
        queue.push(Rank.CHUNK, first, {"of no": "order"}, {"nor": "this"}, turn)
    assert drained(queue) == [first for _, first in sorted(sent, key=lambda each: each[0])]


def test_what_is_void_is_taken_back_and_the_rest_keeps_its_order() -> None:
    queue, rng = Outgoing(), random.Random(2)
    sent = [(rng.choice(list(Rank)), rng.choice((None, 0, 1, 2)), b"%d" % number) for number in range(500)]
    for rank, tag, first in sent:
        queue.push(rank, first, None, tag)
    assert queue.forget(lambda tag: tag != 1) == sum(tag in (0, 2) for _, tag, _ in sent)
    kept = [(rank, first) for rank, tag, first in sent if tag in (None, 1)]
    assert drained(queue) == [first for _, first in sorted(kept, key=lambda each: each[0])]


def test_only_what_is_taken_while_libzmq_is_full_tells_the_rate() -> None:
    queue, payload = Outgoing(), bytes(999)
    for _ in range(5):
        queue.push(Rank.CHUNK, b"h", payload)
    queue.taken(1.0)
    assert queue.carried == (0, 0.0)  # There was room.
    queue.refused(2.0)
    queue.refused(2.5)
    queue.taken(3.0)
    queue.taken(3.0)  # There was room for two by then.
    assert queue.carried == (2000, 1.0)
    queue.taken(5.0)
    queue.taken(6.0)
    assert queue.carried == (4000, 4.0)
    queue.push(Rank.CHUNK, b"h", payload)
    queue.taken(100.0)  # Nothing waited since.
    assert queue.carried == (4000, 4.0)


def test_what_is_taken_back_ends_the_wait() -> None:
    queue = Outgoing()
    queue.push(Rank.CHUNK, b"h", None, tag=1)
    queue.refused(1.0)
    queue.forget(lambda tag: True)
    queue.push(Rank.CHUNK, b"h", None, tag=1)
    queue.taken(50.0)
    assert queue.carried == (0, 0.0)
