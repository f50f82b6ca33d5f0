"""The pages of docs/ that say what to type: typed as they stand, in terminals, and compared with what they show."""

from __future__ import annotations

import socket

import pytest
from pages import Reader, blocks, without_comment

pytestmark = [pytest.mark.realtime, pytest.mark.slow]


def free_ports(count: int) -> list[str]:
    """Of this machine, at the moment."""
    with_them = [socket.socket() for _ in range(count)]
    for each in with_them:
        each.bind(("", 0))
    ports = [str(each.getsockname()[1]) for each in with_them]
    for each in with_them:
        each.close()
    return ports


@pytest.fixture
def reader(tmp_path):
    one, other = free_ports(2)
    # The second machine is this one, by another address; the script does not wait for somebody who watches.
    here = {"5555": one, "5556": other, "10.0.0.": "127.0.0.", "time.sleep(0.1)": "time.sleep(0.02)"}
    reader = Reader(tmp_path, here)
    yield reader
    reader.close()


def test_quick_start(reader):
    for block in blocks("quick_start.md"):
        if not block.says.startswith("Every block"):
            reader.follow(block)


def test_no_command_of_quick_start_is_left_out():
    assert without_comment("quick_start.md", {"sh", "python", "text"}) == 0
