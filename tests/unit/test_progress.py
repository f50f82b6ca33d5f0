"""How far what takes long is."""

import io
import threading

import pytest
from rich.console import Console

from chaosnet.terminal.progress import followed, going_on, line


class Heard(io.StringIO):
    """Says when something was written to it."""

    def __init__(self):
        super().__init__()
        self.written = threading.Event()

    def write(self, text):
        self.written.set()
        return super().write(text)


def waiting_for(heard, count):
    """The first items come at once, the last one when something was told."""
    yield from range(count - 1)
    assert heard.written.wait(30)
    yield count - 1


def test_a_line_says_how_many_are_done_and_guesses_what_is_left():
    assert line("runs", 0, 20, 2.0) == "0 of 20 runs in 2 s"
    assert line("runs", 5, 20, 10.0) == "5 of 20 runs in 10 s, about 30 s left"


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_what_takes_long_is_told(terminal):
    heard = Heard()
    console = Console(file=heard, force_terminal=terminal, width=80)
    found = list(followed(waiting_for(heard, 3), 3, "runs", console, first_s=0.01))
    assert found == [0, 1, 2]
    assert "runs" in heard.getvalue()
    assert (" of 3 runs in 0 s" in heard.getvalue()) is not terminal


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_what_is_short_is_not_told(terminal):
    heard = Heard()
    console = Console(file=heard, force_terminal=terminal)
    assert list(followed(range(3), 3, "runs", console)) == [0, 1, 2]
    assert heard.getvalue() == ""


def test_what_is_for_a_terminal_only_leaves_a_pipe_as_it_is():
    def slowly():
        yield 1
        assert not [each for each in threading.enumerate() if each.name == "chaosnet-progress"]
        yield 2

    heard = Heard()
    assert list(followed(slowly(), 2, "tensors", Console(file=heard), first_s=0.0, in_pipe=False)) == [1, 2]
    assert heard.getvalue() == ""


def test_what_is_silent_for_long_is_seen_to_go_on_and_what_it_prints_stays():
    heard = Heard()
    with going_on("bench join", Console(file=heard, force_terminal=True, width=80), first_s=0.01):
        assert heard.written.wait(30)
        while "bench join" not in heard.getvalue():
            pass
        print("node0: 3 s")
    assert "node0: 3 s\n" in heard.getvalue()
    assert "chaosnet-progress" not in [each.name for each in threading.enumerate()]


def test_in_a_pipe_nobody_is_told_that_it_goes_on(capsys):
    with going_on("bench join", first_s=0.0):
        assert "chaosnet-progress" not in [each.name for each in threading.enumerate()]
    assert capsys.readouterr() == ("", "")


def test_an_error_among_the_items_ends_it():
    def fails():
        yield 1
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        list(followed(fails(), 2, "runs"))
    assert "chaosnet-progress" not in [each.name for each in threading.enumerate()]
