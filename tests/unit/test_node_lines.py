"""`chaosnet.commands.node_lines`: what several nodes print, on one screen."""

import io
import json
import os
import sys
import threading

import pytest

from chaosnet.commands.node_lines import EVENTS_KEPT, NodeLines, event_of
from chaosnet.protocols.messages import Notice
from chaosnet.protocols.sentences import SENTENCES
from chaosnet.script.teller import Callbacks, Teller, log_line


def notice(log_format, capsys, node="n0", **fields):
    told = Notice(
        **{"kind": "joined", "node": "n1", "detail": "now 2 members", "step": 6, "time_s": 0.0} | fields
    )
    Teller(False, Callbacks(), node, log_format).notice(told)
    return capsys.readouterr().err


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_event_that_all_nodes_tell_is_shown_once_and_other_lines_each_time(log_format, capsys):
    lines = NodeLines(["n0", "n10"])
    first, second = (notice(log_format, capsys, node=node) for node in ("n0", "n10"))
    assert lines.line("n0", first) == f"n0  | {first}"
    assert lines.line("n10", second) == ""
    later = notice(log_format, capsys, node="n10", step=7)
    assert lines.line("n10", later) == f"n10 | {later}"
    said = log_line("going on", log_format, "n0")
    for other in (said, "step 6: loss 0.5\n", "{6}\n", '{"event": "joined"}\n', "\n"):
        shown = [lines.line(node, other) for node in ("n0", "n10")]
        assert shown == [f"n0  | {other}", f"n10 | {other}"]


def test_what_a_node_tells_never_goes_to_the_output_of_a_script_without_stderr(capsys, monkeypatch):
    """As after `2>&-`: print() to None takes stdout."""
    monkeypatch.setattr(sys, "stderr", None)
    Teller(False, Callbacks()).say("going on")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", SENTENCES)
def test_events_of_all_kinds_are_known_in_both_formats(kind, capsys):
    text = notice("text", capsys, kind=kind)
    fields = json.loads(notice("json", capsys, kind=kind))
    assert event_of(text) == text.rstrip() and text.endswith(f"{fields['text']}\n")
    assert event_of(json.dumps(fields)) == (6, kind, "n1", "now 2 members")


@pytest.mark.parametrize(
    "line",
    [
        '{"subject": "a mail"}',
        '{"step": 6, "event": "joined", "subject": ["n1"], "detail": "now 2 members"}',
        '{"subject": ' + "[" * 100_000,
    ],
)
def test_json_of_a_scripts_own_is_passed_on_each_time(line):
    lines, shown = NodeLines(["a", "b"]), io.StringIO()
    for node in ("a", "b"):
        lines.tell(node, f"{line}\n".encode(), shown)
    assert shown.getvalue() == f"a | {line}\nb | {line}\n"


def test_events_are_forgotten_in_the_end():
    lines = NodeLines(["a"])
    for step in range(1, EVENTS_KEPT + 2):
        assert lines.line("a", f"[chaosnet] step {step}: x joins")
    assert lines.line("a", "[chaosnet] step 1: x joins") and not lines.line(
        "a", f"[chaosnet] step {step}: x joins"
    )


def test_what_has_no_end_of_line_and_what_is_no_text_is_passed_on():
    lines, shown = NodeLines(["a"]), io.StringIO()
    theirs, ours = os.pipe()
    lines.read("a", os.fdopen(theirs, "rb"), shown)
    os.write(ours, b"\xff\nlast words")
    os.close(ours)
    lines.close()
    assert shown.getvalue() == "a | \ufffd\na | last words\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("modules", "began"), [(["tqdm"], "\r\x1b[K"), ([], "")])
def test_a_line_takes_the_place_of_a_progress_bar_on_a_terminal(monkeypatch, modules, began):
    monkeypatch.delitem(sys.modules, "tqdm", raising=False)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    for each in modules:
        monkeypatch.setitem(sys.modules, each, None)
    Teller(False, Callbacks()).say("going on")
    assert sys.stderr.getvalue() == f"{began}[chaosnet] going on\n"


def test_a_reader_that_has_stopped_holds_up_no_thread_of_the_node(monkeypatch):
    """The one that serves its links stood still, and the others lost it, though its script printed nothing."""
    reader, writer = os.pipe()
    teller = Teller(False, Callbacks())

    def say(*texts):
        thread = threading.Thread(target=lambda: [teller.say(text) for text in texts], daemon=True)
        thread.start()
        thread.join(10.0)
        return not thread.is_alive()

    with open(writer, "w") as stderr, open(reader, "rb") as log:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert say("one")
        os.set_blocking(writer, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(writer, bytes(512))
        os.set_blocking(writer, True)
        went_on = say("two", "three")
        os.set_blocking(reader, False)
        assert log.read().startswith(b"[chaosnet] one\n") and went_on
        assert say("four", "five")
        told = log.read().decode().splitlines()
    assert told[1:] == ["[chaosnet] four", "[chaosnet] five"]
    assert told[0] == "[chaosnet] 2 lines left out here: nobody was reading"


def test_a_line_in_a_pipe_is_itself_also_where_there_is_a_progress_bar(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    Teller(False, Callbacks()).say("going on")
    assert capsys.readouterr().err == "[chaosnet] going on\n"
