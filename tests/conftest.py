"""For all tests: the key of who runs them must make no difference; and what several of them start from."""

import os
import signal
import sys
import tempfile
import threading

import pytest
from hypothesis import settings

# No test is judged by the time it takes: the machine may be doing something else.
settings.register_profile("chaosnet", deadline=None)
settings.load_profile("chaosnet")

# Under nohup a hangup is ignored, and so it would be by all processes that tests start.
if getattr(signal, "SIGHUP", None) and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # So is Ctrl+C in the background of a shell script.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_config = tempfile.TemporaryDirectory(prefix="chaosnet-tests-")  # Removed when the tests end.
os.environ["XDG_CONFIG_HOME"] = _config.name
os.environ["CHAOSNET_STATE_DIR"] = os.path.join(_config.name, "members")
for name in ("CHAOSNET_KEY", "CHAOSNET_ALLOWED_KEYS", "CHAOSNET_INSECURE"):
    os.environ.pop(name, None)


def pytest_addoption(parser):
    parser.addoption(
        "--times", type=int, default=1, help="So often do what goes wrong in test_join_faults.py."
    )
    parser.addoption("--moments", type=int, default=0, help="And at other random moments with each number.")
    parser.addoption(
        "--state-mb",
        type=int,
        default=36,
        help="Of the training state in test_join_faults.py, a multiple of 6.",
    )


@pytest.fixture
def state_mb(request):
    """How large a state to pull."""
    return request.config.getoption("--state-mb")


@pytest.fixture
def moments(request):
    return request.config.getoption("--moments")


@pytest.fixture
def times(request):
    """How often to do what chance decides."""
    return request.config.getoption("--times")


@pytest.fixture
def fresh_exit_events(monkeypatch):
    """Exit events are of the process, so each test gets its own."""
    from chaosnet.script import exit_event

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(exit_event, "_wanted", threading.Event())
    monkeypatch.setattr(exit_event, "_asked_for", threading.Event())
    monkeypatch.setattr(exit_event, "_imported", threading.Event())
    monkeypatch.setattr(exit_event, "_on_exit", [])
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def chaosnet(monkeypatch, capsys):
    """Run the command here. Returns: exit code, what it printed, and what to standard error."""
    from chaosnet import cli

    before = dict(os.environ)  # `run` puts its options there.

    def main(*args):
        monkeypatch.setattr(sys, "argv", ["chaosnet", *args])
        with pytest.raises(SystemExit) as ending:
            cli.main()
        printed = capsys.readouterr()
        return int(ending.value.code or 0), printed.out, printed.err

    yield main
    os.environ.clear()
    os.environ.update(before)
