"""The garbage collector, held off."""

import gc
import threading
import time

import pytest

from chaosnet.node.collector import held_off


@pytest.fixture(autouse=True)
def on():
    gc.enable()
    yield
    gc.enable()


def test_it_goes_on_when_the_last_block_has_ended():
    with held_off():
        with held_off():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error():
    with pytest.raises(ValueError, match="bad"), held_off():
        raise ValueError("bad")
    assert gc.isenabled()


def test_whose_script_has_turned_it_off_finds_it_so():
    gc.disable()
    with held_off():
        pass
    assert not gc.isenabled()


def test_where_no_thread_can_be_started_it_is_not_held_off(monkeypatch):
    """A limit of processes and threads: the block failed, and the collector stayed off for good."""

    def no_thread(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with held_off():
        assert gc.isenabled()
    assert gc.isenabled()


@pytest.mark.realtime
def test_it_goes_on_in_the_middle_of_a_block_that_takes_long():
    with held_off(at_most_s=0.01):
        until_s = time.monotonic() + 5
        while not gc.isenabled() and time.monotonic() < until_s:
            time.sleep(0.001)
        assert gc.isenabled()
    assert gc.isenabled()
