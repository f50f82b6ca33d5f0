"""Run a user's script as `python SCRIPT ARGS` would, but end on errors of ours with one line."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from pathlib import Path
from types import CodeType, TracebackType

from . import endings
from .protocols.errors import ChaosnetError
from .settings_table import SETTINGS
from .teller import log_line


def run_script(script: Path, args: tuple[str, ...]) -> None:
    """Returns when the script has ended well. If it has made no Trainer, it says so.

    The module stays `__main__`, as runpy's does not: worker processes and exit handlers look for it.
    Raises: ChaosnetError and SystemExit of the script; any other error is shown as Python shows it, without
        frames of ours, and becomes SystemExit(1).
    """
    path = str(script)
    sys.argv[:] = [path, *args]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    try:
        exec(_compile(script), module.__dict__)
    except ChaosnetError as error:
        _note(error, error.__traceback__)
        endings.crash_all(error)
        raise
    except (SystemExit, KeyboardInterrupt) as error:
        endings.crash_all(error)
        _tell_if_alone(script)
        raise
    except Exception as error:
        trace = _frames_of(path, error.__traceback__)
        _note(error, trace)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None
    _tell_if_alone(script)


def _tell_if_alone(script: Path) -> None:
    if not endings.was_opened():
        text = f"{script} made no Trainer in this process, so it ran alone: it was no node of a cluster"
        line = log_line(text, SETTINGS["log_format"].of(None))
        with contextlib.suppress(OSError, ValueError, AttributeError):  # Nobody may read it.
            print(line, end="", file=sys.stderr, flush=True)


def _compile(script: Path) -> CodeType:
    return compile(script.read_bytes(), str(script), "exec", dont_inherit=True)


def _frames_of(path: str, trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's own first frame on; None for a script that does not compile."""
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    return trace


def _note(error: BaseException, trace: TracebackType | None) -> None:
    """As the interpreter does for an error that ends it: so exit handlers know that one did."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
