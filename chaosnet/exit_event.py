"""Ctrl+C and SIGTERM: the first finishes the step and leaves, the second leaves at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_wanted = threading.Event()
_asked_for = threading.Event()  # The script calls capture_exit_event() itself.
_on_exit: list[Callable[[], None]] = []  # Of the trainers that are not closed.
_before: dict[int, Any] = {}  # Handlers by signal, as they were before there was a trainer.
_fork = threading.local()  # Of the fork under way: `mask`, the signals that the thread had blocked before.
HARD_EXIT_CODE = 130


def capture_exit_event() -> bool:
    """Does the user want this node to leave (Ctrl+C, SIGTERM, `chaosnet leave`)? (Chaos, Sec. V-B)"""
    _asked_for.set()
    return _wanted.is_set()


def exit_wanted() -> bool:
    """The same, for chaosnet itself."""
    return _wanted.is_set()


def script_captures_exit() -> bool:
    """Does the script ask for the exit event, and so decide itself when to leave?"""
    return _asked_for.is_set()


def want_exit() -> None:
    """As if Ctrl+C had been pressed."""
    _wanted.set()


def install(on_exit: Callable[[], None]) -> None:
    """Catch the signals, if this is the main thread. `on_exit` is called at the first one."""
    _on_exit.append(on_exit)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, _handle)
            if before not in (_handle, _spare_once):
                _before[number] = before or signal.SIG_DFL  # None: C code's, which Python cannot put back.


def remove(on_exit: Callable[[], None]) -> None:
    """That trainer is closed. After the last one the signals do again what they did before the first."""
    if on_exit in _on_exit:
        _on_exit.remove(on_exit)
    if not _on_exit and threading.current_thread() is threading.main_thread():
        _put_back()


def _put_back() -> None:
    for number, before in _before.items():
        ours = signal.getsignal(number) in (_handle, _spare_once)
        if ours:  # Else the script has put one of its own there.
            signal.signal(number, before)


def _handle(number: int, frame: FrameType | None) -> None:
    if not _on_exit and signal.getsignal(number) is _handle:  # The last trainer was closed in a thread.
        _put_back()
        signal.raise_signal(number)
        return
    if _wanted.is_set():
        _tell("leaving at once")
        os._exit(HARD_EXIT_CODE)
    _wanted.set()
    for call in tuple(_on_exit):
        call()
    _tell("finishing the step, then leaving (again: leave at once)")


def _tell(text: str) -> None:
    """Past the buffer of stderr, which the signal may have interrupted. Ctrl+C may have ended its reader, too."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), f"\n[chaosnet] {text}\n".encode())


def _spare_once(number: int, frame: FrameType | None) -> None:
    _put_back()


def _before_fork() -> None:
    """A SIGTERM that the child gets before its handler is put back would be lost, so it has to wait."""
    caught = bool(_on_exit) and signal.getsignal(signal.SIGTERM) is _handle
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if caught else None


def _after_fork() -> None:
    if _fork.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _in_child() -> None:
    """A child has no trainer, and ends as if there had never been one.

    Only its first Ctrl+C has no effect: the terminal sends that to parent and child, and the parent may need the
    child, a worker of its DataLoader, to finish the step.
    """
    if _on_exit:
        _on_exit.clear()
        caught = signal.getsignal(signal.SIGINT) is _handle
        _put_back()
        if caught:
            signal.signal(signal.SIGINT, _spare_once)
    _after_fork()


if hasattr(os, "register_at_fork"):  # Not on Windows.
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
