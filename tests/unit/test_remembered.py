"""`chaosnet.discovery.remembered`: the file of the members with which a node last ran."""

import threading

import pytest

from chaosnet.discovery.remembered import Remembered, recall
from chaosnet.protocols.messages import Member, View

LISTEN = "127.0.0.1:7099"


def view_with(*others):
    members = tuple(Member(id=name, addresses=(f"{name}:7000",)) for name in ("me", *others))
    return View(term=1, seq=1, scheduler="me", members=members)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAOSNET_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def enter(remembered, view):
    """And wait until it is written."""
    remembered.entered(view)
    for thread in threading.enumerate():
        if thread.name == "chaosnet-members":
            thread.join()


def test_a_disk_that_was_full_for_a_while_is_written_to_again(home):
    said = []
    remembered = Remembered("me", LISTEN, said.append)
    home.write_text("no folder")
    for _ in range(3):
        enter(remembered, view_with("n1"))
    assert len(said) == 1 and "cannot remember the members" in said[0] and recall(LISTEN) == ()
    home.unlink()
    enter(remembered, view_with("n1"))
    assert recall(LISTEN) == ("n1:7000",) and len(said) == 1
    home.rename(home.with_name("away"))
    home.write_text("no folder")
    enter(remembered, view_with("n1", "n2"))
    assert len(said) == 2


def test_a_disk_that_is_full_again_and_again_keeps_one_file_that_is_half_written(home, monkeypatch):
    remembered = Remembered("me", LISTEN, lambda text: None)

    def no_space(*paths):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("os.replace", no_space)
        for number in range(5):
            enter(remembered, view_with(f"n{number}"))
        assert len(list(home.iterdir())) == 1
    enter(remembered, view_with("n5"))
    assert len(list(home.iterdir())) == 1 and recall(LISTEN) == ("n5:7000",)


def test_where_no_thread_can_be_started_that_is_told_and_tried_again(home, monkeypatch):
    """A limit of processes and threads (pids.max, ulimit -u) ended the node as soon as its cluster changed."""
    said = []
    remembered = Remembered("me", LISTEN, said.append)

    def no_thread(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", no_thread)
        for name in ("n1", "n2"):
            remembered.entered(view_with(name))
    assert len(said) == 1 and said[0].endswith(": can't start new thread") and recall(LISTEN) == ()
    enter(remembered, view_with("n2"))
    assert recall(LISTEN) == ("n2:7000",)
