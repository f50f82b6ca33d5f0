"""`chaosnet.launching.launched`, where a host cannot start all. With ssh: tests/integration/test_launch.py."""

import signal
import subprocess
import sys
import threading

import pytest

from chaosnet.launching import launched
from chaosnet.launching.orders import VERSION, LaunchHello, LaunchMember, Orders, encoded

pytestmark = pytest.mark.realtime

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers_as_before():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_member_that_cannot_be_started_leaves_none_behind(monkeypatch, capsys, tmp_path):
    started, popen = [], subprocess.Popen
    members = [LaunchMember("a", "127.0.0.1:0"), LaunchMember("b", "127.0.0.1:0")]
    lines = [
        encoded(LaunchHello(VERSION, str(tmp_path), ["-m", "train"], {})),
        encoded(Orders(members, join="", allowed=[], grace_s=0.5)),
    ]

    class Input:
        """The launcher stays, and says no more."""

        def __init__(self):
            pass

        def line(self, silence_s):
            return lines.pop(0) if lines else threading.Event().wait()

    class Output:
        def __init__(self):
            pass

        def say(self, line):
            pass

    def start(command, **options):
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(popen([sys.executable, "-c", "import time; time.sleep(600)"], **options))
        return started[0]

    monkeypatch.setattr(launched, "Input", Input)
    monkeypatch.setattr(launched, "Output", Output)
    monkeypatch.setattr(launched.subprocess, "Popen", start)
    monkeypatch.setenv("CHAOSNET_INSECURE", "1")
    monkeypatch.chdir(tmp_path)
    launched.main()
    assert started[0].wait(10.0) is not None
    assert "error: not all members can be started: [Errno 11]" in capsys.readouterr().err
