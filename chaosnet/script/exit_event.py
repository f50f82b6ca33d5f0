"""Ctrl+C, SIGTERM and a closed terminal: the first finishes the step and leaves, the second leaves at once.

A closed terminal sends SIGHUP, its shell often another: that is no second wish. What is printed from then on would
end the script with an error, so it goes nowhere.
"""

from __future__ import annotations

import contextlib
import errno
import io
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from .teller import log_line

_wanted = threading.Event()
_asked_for = threading.Event()  # The script calls capture_exit_event() itself.
_imported = threading.Event()  # It has imported it.
_on_exit: list[Callable[[], None]] = []  # Of the trainers that are not closed.
_before: dict[int, Any] = {}  # Handlers by signal, as they were before there was a trainer.
_fork = threading.local()  # Of the fork under way: `mask`, the signals that the thread had blocked before.
_speaks = ["text", ""]  # In which format, and which node: as of the newest trainer.
_spawn: Any = None  # As multiprocessing has it.
_terminals: list[int] = []  # Descriptors that are printed to.
HARD_EXIT_CODE = 130
SIGHUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # Not on Windows.


def obey_as_first_process() -> None:
    """Have SIGTERM end this process, as long as there is no trainer, although it is the first one of a container.

    To the first process the kernel hands only those signals for which it has a handler.
    """
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    if os.getpid() != 1:  # A fork of the first: a worker that was made before the trainer.
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    os._exit(128 + number)


def capture_exit_event() -> bool:
    """Does the user want this node to leave (Ctrl+C, SIGTERM, `chaosnet leave`)? (Chaos, Sec. V-B)"""
    _asked_for.set()
    return _wanted.is_set()


def exit_wanted() -> bool:
    """As `capture_exit_event`, but does not count as a question of the script's."""
    return _wanted.is_set()


def script_captures_exit() -> bool:
    """Has the script ever called `capture_exit_event`? Then it decides itself when to leave."""
    return _asked_for.is_set()


def imported() -> None:
    """The script imports `capture_exit_event`."""
    _imported.set()


def script_may_capture_exit() -> bool:
    """Has the script imported `capture_exit_event`, or called it? Then it may call it after its first step."""
    return _imported.is_set() or _asked_for.is_set()


def want_exit() -> None:
    """As if Ctrl+C had been pressed."""
    _wanted.set()


def install(on_exit: Callable[[], None]) -> None:
    """Catch the signals, if this is the main thread. `on_exit` is called at the first one.

    What was wanted of trainers that have closed is over: the first one begins anew.
    """
    if not _on_exit:
        _wanted.clear()
        _asked_for.clear()
    _on_exit.append(on_exit)
    if threading.current_thread() is threading.main_thread():
        for number in _caught_signals():
            before = signal.signal(number, _handle)
            if before not in OURS:
                _before[number] = before or signal.SIG_DFL  # None: C code's, which Python cannot put back.
        _spare_spawned()


def _caught_signals() -> tuple[signal.Signals, ...]:
    """The signals to catch: not SIGHUP if it is ignored, as under nohup, to outlive the terminal."""
    if SIGHUP is None or signal.getsignal(SIGHUP) is signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    _terminals[:] = [number for number in (1, 2) if _is_terminal(number)]
    for name in ("stdout", "stderr"):
        _outlive_terminal(name)
    return (signal.SIGINT, signal.SIGTERM, SIGHUP)


class _Terminal(io.FileIO):
    """A terminal that may be closed: printing to it then is no error, as it may fail just before the signal comes."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            _silence()
            return super().write(data)


def _outlive_terminal(name: str) -> None:
    """Print to that standard stream through a `_Terminal`, if it goes to a terminal."""
    stream = getattr(sys, name)
    if type(stream) is not io.TextIOWrapper or type(stream.buffer) is not io.BufferedWriter:
        return  # The script, or what it runs in, has put one of its own there.
    if stream.fileno() not in _terminals or isinstance(stream.buffer.raw, _Terminal):
        return
    stream.flush()
    spared = io.TextIOWrapper(
        io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    setattr(sys, name, spared)


def _is_terminal(number: int) -> bool:
    with contextlib.suppress(OSError):
        return os.isatty(number)
    return False


def remove(on_exit: Callable[[], None]) -> None:
    """The trainer of `on_exit` is closed. After the last one, signals do what they did before the first."""
    if on_exit in _on_exit:
        _on_exit.remove(on_exit)
    if not _on_exit and threading.current_thread() is threading.main_thread():
        _put_back()


def _put_back() -> None:
    global _spawn
    if _spawn is not None and multiprocessing.util.spawnv_passfds is _spawn_spared:
        multiprocessing.util.spawnv_passfds, _spawn = _spawn, None
    for number, before in _before.items():
        ours = signal.getsignal(number) in OURS
        if ours:  # Else the script has put one of its own there.
            signal.signal(number, before)


def _handle(number: int, frame: FrameType | None) -> None:
    if not _on_exit and signal.getsignal(number) is _handle:  # The last trainer was closed in a thread.
        _put_back()
        signal.raise_signal(number)
        return
    if number == SIGHUP:
        _silence()
    if _wanted.is_set():
        if number == SIGHUP:
            return
        _tell("leaving at once")
        os._exit(HARD_EXIT_CODE)
    _wanted.set()
    for call in tuple(_on_exit):
        call()
    _tell("finishing the step, then leaving (again: leave at once)")


def speak(log_format: str, node: str) -> None:
    """Set the format and the name for the line that tells of a signal."""
    _speaks[:] = log_format, node


def _silence() -> None:
    """The terminal has gone: print nothing to it from now on."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in _terminals:
            os.dup2(nowhere, number)
        os.close(nowhere)


def _tell(text: str) -> None:
    """Print past the buffer of stderr, which the signal may have interrupted. Its reader may have ended by Ctrl+C."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        where = sys.stderr.fileno()
        start = "\n" if os.isatty(where) else ""  # After the terminal's ^C.
        os.write(where, f"{start}{log_line(text, *_speaks)}".encode())


def _spare_once(number: int, frame: FrameType | None) -> None:
    _put_back()


def _spare_while_parent_lives(number: int, frame: FrameType | None) -> None:
    if os.getppid() != _fork.parent:
        signal.signal(number, _before.get(number, signal.SIG_DFL))
        signal.raise_signal(number)


def _spare_spawned() -> None:
    """Have children that multiprocessing starts anew spared, too: with "spawn", or by a "forkserver".

    They may run nothing of ours, so they cannot ignore the first Ctrl+C alone: for them it stays blocked, as does a
    SIGHUP. A worker of a DataLoader notices when its parent is gone.
    """
    global _spawn
    found = getattr(multiprocessing.util, "spawnv_passfds", None)
    if found is not None and found is not _spawn_spared:
        _spawn = found
        setattr(multiprocessing.util, "spawnv_passfds", _spawn_spared)  # noqa: B010  Its type names arguments.


def _spawn_spared(*args: Any) -> Any:
    if not _on_exit:
        return _spawn(*args)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, SIGHUP or signal.SIGINT})
    try:
        return _spawn(*args)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


OURS = (_handle, _spare_once, _spare_while_parent_lives)


def _before_fork() -> None:
    """Block SIGTERM around a fork: one that the child gets before its handler is put back would be lost."""
    caught = bool(_on_exit) and signal.getsignal(signal.SIGTERM) is _handle
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if caught else None


def _after_fork() -> None:
    if _fork.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _in_child() -> None:
    """A child has no trainer, and ends as if there had never been one.

    Only its first Ctrl+C has no effect, nor has a SIGHUP: the terminal sends them to parent and child, and the parent
    may need the child, a worker of its DataLoader, to finish the step.
    """
    if _on_exit:
        _on_exit.clear()
        caught = [number for number in _before if signal.getsignal(number) is _handle]
        _put_back()
        _fork.parent = os.getppid()
        if signal.SIGINT in caught:
            signal.signal(signal.SIGINT, _spare_once)
        if SIGHUP is not None and SIGHUP in caught:
            signal.signal(SIGHUP, _spare_while_parent_lives)
    _after_fork()


if hasattr(os, "register_at_fork"):  # Not on Windows.
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
