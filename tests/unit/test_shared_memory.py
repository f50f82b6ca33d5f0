"""Memory that two processes of one machine share (shared_memory.py); here both ends are of one process."""

import os
import sys
import weakref

import numpy as np
import pytest

from chaosnet.node.transport import shared_memory
from chaosnet.node.transport.shared_memory import BLOCK_BYTES, BLOCKS, LEAST_BYTES, Arena

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create")
SIZE = 3 * BLOCK_BYTES + 1  # Four blocks.


@pytest.fixture
def ends():
    """The sender's and the receiver's."""
    lent = Arena.create()
    borrowed = Arena.of(os.getpid(), lent.descriptor)
    lent.mapped()
    return lent, borrowed


def lay(lent, values):
    """Returns: what the receiver is told."""
    first = lent.reserve(values.size)
    lent.write(first, memoryview(values))
    return first, values.size


def test_a_payload_is_the_senders_bytes_and_belongs_to_the_receiver(ends):
    lent, borrowed = ends
    values = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    place = lay(lent, values)
    payload = borrowed.payload(*place)
    assert np.array_equal(payload, values)
    payload.buffer[:3] = b"abc"
    assert bytes(borrowed.payload(*place)[:3]) == b"abc"


@pytest.mark.parametrize(
    "view_of",
    [lambda payload: np.frombuffer(payload.buffer, np.uint8)[5:], np.asarray, lambda payload: payload[5:]],
)
def test_blocks_are_given_back_with_the_last_view_of_them(ends, view_of):
    lent, borrowed = ends
    payload = borrowed.payload(*lay(lent, np.zeros(SIZE, np.uint8)))
    view = view_of(payload)
    gone = weakref.ref(payload)
    del payload
    assert gone() is not None
    assert lent.reserve(SIZE) == 4
    del view
    assert gone() is None
    assert lent.reserve(SIZE) == 0


def test_what_is_kept_for_long_is_passed_over(ends):
    lent, borrowed = ends
    kept = [borrowed.payload(*lay(lent, np.zeros(LEAST_BYTES, np.uint8))) for _ in range(3)]
    del kept[1]
    assert lent.reserve(SIZE) == 6
    assert lent.reserve(LEAST_BYTES) == 2


def test_a_full_arena_takes_nothing_until_something_is_given_back(ends):
    lent, borrowed = ends
    half = BLOCKS // 2 * BLOCK_BYTES
    assert [lent.reserve(half) for _ in range(3)] == [0, BLOCKS // 2, None]
    assert lent.reserve(LEAST_BYTES) is None
    del [borrowed.payload(0, half)][0]
    assert lent.reserve(half) == 0


def test_what_is_small_or_not_mapped_at_the_other_end_yet_goes_over_the_socket(ends):
    assert ends[0].reserve(LEAST_BYTES - 1) is None
    assert Arena.create().reserve(LEAST_BYTES) is None


def test_where_mapped_memory_is_limited_it_is_left_to_the_script(monkeypatch):
    """Under `ulimit -v` a script of a hundred MB had no memory left for its gradients, and did without arenas."""
    lent = Arena.create()
    monkeypatch.setattr(shared_memory.resource, "getrlimit", lambda kind: (1 << 31, -1))
    assert Arena.create() is None
    with pytest.raises(OSError, match="no such memory here"):
        Arena.of(os.getpid(), lent.descriptor)


def test_where_memory_is_not_given_on_credit_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "OVERCOMMIT", tmp_path / "overcommit_memory")
    assert Arena.create() is None
    for setting, there in (("2\n", False), ("0\n", True)):
        shared_memory.OVERCOMMIT.write_text(setting)
        assert (Arena.create() is not None) == there


def test_a_forked_process_gives_nothing_back(ends):
    lent, borrowed = ends
    held = [borrowed.payload(*lay(lent, np.zeros(SIZE, np.uint8)))]
    if (child := os.fork()) == 0:
        held.clear()
        os._exit(0)
    os.waitpid(child, 0)
    assert lent.reserve(SIZE) == 4
    assert held


def test_a_place_beyond_the_end_is_refused(ends):
    with pytest.raises(
        ValueError, match=rf"2 bytes from block {BLOCKS} on \(expected to end before {BLOCKS}\)"
    ):
        ends[1].payload(BLOCKS, 2)


def test_what_is_no_arena_is_refused(tmp_path):
    plain = os.memfd_create("another")
    pipe = os.pipe()
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.truncate(file, 1 << 30)
    for descriptor in (plain, *pipe, file, 999_999):
        with pytest.raises((OSError, ValueError)):
            Arena.of(os.getpid(), descriptor)
    for descriptor in (plain, *pipe, file):
        os.close(descriptor)
