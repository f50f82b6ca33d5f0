"""The pages of docs/ that say what to type: typed as they stand, in terminals, and compared with what they show."""

from __future__ import annotations

import re
import socket

import pytest
from pages import ROOT, Reader, without_comment

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
    # The second machine is this one, by another address; its port 8088 may be taken; scripts wait for no watcher.
    here = {"5555": one, "5556": other, "10.0.0.": "127.0.0.", "127.0.0.1:8088": "127.0.0.1:..."}
    faster = {"time.sleep(0.1)": "time.sleep(0.02)", "--pause 0.05": "--pause 0.005"}
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    reader = Reader(tmp_path, here | faster)
    yield reader
    reader.close()


def test_quick_start(reader):
    reader.read("quick_start.md")


def test_from_ddp_ends_with_equal_loss(reader):
    """By DDP and in a cluster every step has the same samples: what is left are the last bits of sums."""
    reader.read("from_ddp.md")
    by_ddp, founder, joiner = (held_out(reader.terminals[each].show()) for each in "123")
    reader.until("3", "joined at step")
    assert by_ddp.keys() == founder.keys() == {*range(1, 11)}
    assert founder == pytest.approx(by_ddp, abs=1e-4)
    assert joiner.items() <= founder.items()
    steps = re.search(r"(\d+) steps with samples from here", reader.terminals["3"].show())
    assert steps is not None and int(steps[1]) > 0


def held_out(screen: str) -> dict[int, float]:
    """Losses by epoch."""
    return {
        int(epoch): float(loss) for epoch, loss in re.findall(r"epoch (\d+): held-out loss (\S+)", screen)
    }


@pytest.mark.parametrize("page", ["quick_start.md", "from_ddp.md"])
def test_no_command_is_left_out(page):
    assert without_comment(page, {"sh", "python", "text", "diff"}) == 0
