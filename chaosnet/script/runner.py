"""Run a user's script, as `python SCRIPT` or `python -m MODULE` would, but end on errors of ours with one line."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import CodeType, TracebackType

from ..protocols.errors import ChaosnetError, ConfigError
from ..settings.table import SETTINGS
from . import endings
from .teller import log_line

MISPLACED = {"--join": "join", "--listen": "listen", "--cluster": "cluster_name"}
"""Options without which a node is alone, and the settings that they give."""


def run_script(script: Path, args: tuple[str, ...]) -> None:
    """Run a script; returns when it has ended well. If it has made no Trainer, this is said, unless Ctrl+C ended it.

    The module stays `__main__`, as runpy's does not: worker processes and exit handlers look for it.
    Raises: ChaosnetError and SystemExit of the script; any other error is shown as Python shows it, without
        frames of ours, and becomes SystemExit(1).
    """
    path = str(script)
    _look_first_in(os.path.dirname(os.path.realpath(path)))
    _run(path, path, args, lambda: compile(script.read_bytes(), path, "exec", dont_inherit=True))


def run_module(name: str, args: tuple[str, ...]) -> None:
    """As `run_script`, for a module or the `__main__` of a package. Raises: also ConfigError if there is none."""
    try:
        _look_first_in(os.getcwd())
    except FileNotFoundError:
        here = os.environ.get("PWD", ".")
        raise ConfigError(
            f"-m: the folder where you are, {here}, is gone (expected one to find {name!r} from)"
        ) from None
    found = _found_module(name)
    loader = found.loader
    assert loader is not None and found.origin is not None
    # multiprocessing imports the module by its name in the processes that it spawns.
    _run(found.origin, name, args, lambda: loader.get_code(found.name), found)  # type: ignore[attr-defined]


def _look_first_in(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _found_module(name: str) -> ModuleSpec:
    """The module's spec; for a package, that of its `__main__`.

    Errors of packages on the way are shown to the user.
    """
    wanted = name
    while True:
        found = _spec_of(wanted)
        if found is None:
            package = " is a package without a module '__main__'" if wanted != name else " cannot be found"
            raise ConfigError(f"-m: {name!r}{package} (expected a module, as `python -m` takes it)")
        if found.submodule_search_locations is None:
            break
        wanted = f"{wanted}.__main__"
    if not found.has_location or isinstance(found.loader, ExtensionFileLoader):
        raise ConfigError(
            f"-m: {name!r} is not written in Python (expected a module, as `python -m` takes it)"
        )
    return found


def _spec_of(name: str) -> ModuleSpec | None:
    parts = name.split(".")
    on_the_way = {".".join(parts[: count + 1]) for count in range(len(parts))}
    try:
        return importlib.util.find_spec(name) if all(parts) else None
    except ModuleNotFoundError as error:
        if error.name in on_the_way:
            return None
        raise


def _run(
    path: str, shown: str, args: tuple[str, ...], code: Callable[[], CodeType], spec: ModuleSpec | None = None
) -> None:
    """Run the code. `path`: the file's name in tracebacks; `shown`: its name for people."""
    sys.argv[:] = [path, *args]
    _tell_misplaced(shown, args)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None, __spec__=spec)
    if spec is not None:
        module.__dict__.update(__package__=spec.parent, __loader__=spec.loader)
    sys.modules["__main__"] = module
    try:
        exec(code(), module.__dict__)
    except ChaosnetError as error:
        _note(error, error.__traceback__)
        endings.crash_all(error)
        # Without a node it is of an option, or of Trainer(...).
        if isinstance(error, ConfigError) and endings.was_opened():
            error.args = (f"{error}{_place_of(path, error.__traceback__)}",)
        raise
    except (SystemExit, KeyboardInterrupt) as error:
        endings.crash_all(error)
        if isinstance(error, SystemExit):
            _tell_if_alone(shown)
        raise
    except Exception as error:
        trace = _frames_of(path, error.__traceback__)
        _note(error, trace)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None
    _tell_if_alone(shown)


def _tell_if_alone(script: str) -> None:
    if not endings.was_opened():
        _say(f"{script} made no Trainer in this process before it ended: it was no node of a cluster")


def _tell_misplaced(script: str, args: tuple[str, ...]) -> None:
    """Say so if options of `chaosnet run` stand behind the script: if it ignores them, it trains alone."""
    for option in (each.partition("=")[0] for each in args):
        setting = SETTINGS.get(MISPLACED.get(option, ""))
        if setting is not None and setting.variable not in os.environ:
            _say(
                f"{option} stands behind {script}, so the script gets it and chaosnet does not (options of chaosnet "
                f"come first: chaosnet run {option} ... {script})"
            )


def _say(text: str) -> None:
    line = log_line(text, SETTINGS["log_format"].of(None))
    if sys.stderr is None:  # print() would take stdout instead.
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # Nobody may read it.
        print(line, end="", file=sys.stderr, flush=True)


def _frames_of(path: str, trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's own first frame on; None for a script that does not compile."""
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    return trace


def _place_of(path: str, trace: TracebackType | None) -> str:
    """The script's line from which the error came; "" if it did not come from a line of the script."""
    calls = [each for each in traceback.extract_tb(trace) if each.filename == path]
    return f"\n  in {path}, line {calls[-1].lineno}: {calls[-1].line}" if calls else ""


def _note(error: BaseException, trace: TracebackType | None) -> None:
    """Set `sys.last_value` and the like, as the interpreter does: so exit handlers know that an error ended it."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
