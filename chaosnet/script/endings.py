"""How a script ends: after an error the node says goodbye before Python prints the traceback.

Tearing down an interpreter takes a second in which the others would wait, and at its end they could not tell a death
from a cut link. A thread that is not a daemon may even keep the process for ever.

    an error nobody catches, `with Trainer(...)` left by one   farewell at once, nothing more is contributed
    the end of the main thread                                 leaves, before other threads are waited for
    os._exit, abort, kill -9                                   no word: the others see connections break

A daemon thread that is at work in torch when the interpreter ends aborts the process (std::terminate). So one that
trains is given time to come to its next update(), and does not come back from there.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
from types import TracebackType
from typing import Any, Protocol

from ..protocols.errors import ChaosnetError, ConfigError, describe

REST_PATIENCE_S = 2.0  # For a daemon thread's next update().


class OpenNode(Protocol):
    """A node that has neither left nor failed, as far as this module needs to know it."""

    name: str
    driver: threading.Thread  # Who called attach or update last.

    def crash(self, reason: str, blames: bool = False) -> None: ...

    def request_node_exit(self) -> None: ...


_open: list[OpenNode] = []
_before: dict[str, Any] = {}  # The hooks of sys and threading that were there before ours.
_was_opened = False
_may_rest = False  # Only daemon threads are left.
_daemons: list[threading.Thread] = []  # Those that drove trainers when the main thread ended.
_resting = threading.Semaphore(0)  # Released by every daemon thread that will do nothing any more.


def was_opened() -> bool:
    """Was there ever a trainer in this process?"""
    return _was_opened


def close_all() -> None:
    """Close every Trainer of this process, also one to which no name of the script leads any more.

    For notebooks: a cell that ends with an error, or is interrupted, leaves the Trainers open that its functions
    have made.
    """
    for trainer in tuple(_open):
        trainer.request_node_exit()


def check_alone() -> None:
    """Raises: ConfigError if this thread has an open trainer, or if this process is a worker that just starts.

    With two trainers in one thread, the join of the second would wait for steps of the others, who wait for an
    update() of the first. A worker that is not forked runs the script's top level first, so its Trainer would join
    the cluster. From Python 3.14 on, workers of a DataLoader are not forked.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # It is not public.
        raise ConfigError(
            "Trainer: a process that the script has started, such as a DataLoader's worker, runs the script anew "
            "(expected a Trainer below `if __name__ == '__main__':`, or forked workers: "
            "DataLoader(..., multiprocessing_context='fork'))"
        )
    here = threading.current_thread()
    for other in _open:
        if other.driver is here:
            raise ConfigError(
                f"Trainer: {other.name!r} is still open in this process, and its cluster would wait for it while "
                "this one joins (expected one node a process: close() the first one before, or chaosnet.close_all() "
                "if no name leads to it)"
            )


def opened(trainer: OpenNode) -> None:
    """From now on `trainer` ends when the script does."""
    global _was_opened
    if not _was_opened:
        _was_opened = True
        atexit.register(_leave_all, threads_have_ended=True)
        with contextlib.suppress(AttributeError, RuntimeError):  # It is not public; and main may have ended.
            threading._register_atexit(_leave_all)  # type: ignore[attr-defined]  # Before threads are waited for.
    if not _open:
        _before.update(sys=sys.excepthook, threading=threading.excepthook)
        sys.excepthook, threading.excepthook = _on_error, _on_thread_error
    _open.append(trainer)


def closed(trainer: OpenNode) -> None:
    """`trainer` has left or failed. After the last one, the error hooks are those from before the first."""
    if trainer in _open:
        _open.remove(trainer)
    if _open:
        return
    if sys.excepthook is _on_error:  # Else the script has put one of its own around it.
        sys.excepthook = _before["sys"]
    if threading.excepthook is _on_thread_error:
        threading.excepthook = _before["threading"]


def rest_if_all_ends() -> None:
    """A daemon thread stops here for the rest of the process, once nobody is left who may wait for it."""
    if _may_rest and threading.current_thread().daemon:
        _resting.release()
        threading.Event().wait()


def crash_all(error: BaseException) -> None:
    """The main thread ends with `error`, and so do all nodes but those whose own thread goes on."""
    if _is_success(error):
        return
    for trainer in tuple(_open):
        if _ends_with_main(trainer):
            trainer.crash(describe(error), blames(error))


def blames(error: BaseException) -> bool:
    """May the samples that the script had in hand be why? Not if it was told to end, or set up wrongly."""
    return isinstance(error, Exception) and not isinstance(error, ChaosnetError)


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and not error.code


def _on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    before = _before["sys"]
    if not _is_interactive():
        crash_all(error)
    before(kind, error, trace)


def _on_thread_error(args: threading.ExceptHookArgs) -> None:
    before, error = _before["threading"], args.exc_value
    for trainer in tuple(_open):
        if trainer.driver is args.thread and error is not None and not _is_success(error):
            trainer.crash(describe(error), blames(error))
    before(args)


def _leave_all(threads_have_ended: bool = False) -> None:
    """The script has ended: all its nodes leave, or crash with its error.

    If the script has put another error hook in place of ours, only `sys.last_value` tells of the error.
    """
    global _may_rest
    _may_rest = threads_have_ended
    _daemons.extend(trainer.driver for trainer in _open if trainer.driver.daemon)
    error = None if _is_interactive() else getattr(sys, "last_value", None)
    for trainer in tuple(_open):
        if threads_have_ended or _ends_with_main(trainer):
            if error is not None:
                trainer.crash(describe(error), blames(error))
            else:
                trainer.request_node_exit()
    for driver in _daemons if threads_have_ended else ():
        if driver.is_alive():
            _resting.acquire(timeout=REST_PATIENCE_S)


def _ends_with_main(trainer: OpenNode) -> bool:
    driver = trainer.driver
    return driver is threading.main_thread() or driver.daemon or not driver.is_alive()


def _is_interactive() -> bool:
    """At a prompt an error ends nothing."""
    return hasattr(sys, "ps1")


def _in_child() -> None:
    for trainer in tuple(_open):  # A forked child has none.
        closed(trainer)


if hasattr(os, "register_at_fork"):  # Not on Windows.
    os.register_at_fork(after_in_child=_in_child)
