"""Which testbeds are up: one file each, so that later commands find what an earlier one has made."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from .backend import Backend, Kind, TestbedError, check_name
from .topology import Link, Topology

if sys.platform != "win32":
    import fcntl


NOT_HERE = (
    "Windows has no locks that end with their process, which testbeds need (expected Linux; or macOS, for "
    "--backend relay)"
)


class Saved(msgspec.Struct, frozen=True):
    """What is remembered of a testbed."""

    backend: Kind
    routes: bool
    topology: str  # As YAML.
    cuts: list[Link] = []
    id: str = ""


def folder() -> Path:
    """Where the files are: CHAOSNET_TESTBEDS, or this user's own among the temporary ones.

    Raises TestbedError if another user has made the latter: he would choose which files we write, and as root.
    """
    if chosen := os.environ.get("CHAOSNET_TESTBEDS"):
        return Path(chosen)
    own = Path(tempfile.gettempdir()) / f"chaosnet-testbeds-{os.getuid()}"
    with contextlib.suppress(FileNotFoundError):
        if own.lstat().st_uid != os.getuid():
            raise TestbedError(f"{own}: another user has made it (CHAOSNET_TESTBEDS names another folder)")
    return own


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Raises TestbedError that names the folder, where the system does not let us read, write or remove a file."""
    try:
        yield
    except OSError as error:
        raise TestbedError(
            f"{folder()}: {error.strerror} (expected a folder that is open to you, to remember testbeds in; "
            "CHAOSNET_TESTBEDS names another)"
        ) from None


def make_folder() -> None:
    """Before anything else is made, for what is not remembered is not taken down. Raises TestbedError."""
    with writing():
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        tempfile.TemporaryFile(dir=folder()).close()


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Nobody else changes this testbed meanwhile: commands wait for each other. The lock ends with its process.

    Raises TestbedError where there are no such locks.
    """
    if sys.platform == "win32":
        raise TestbedError(NOT_HERE)
    with writing():
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder() / f".{check_name(name)}.lock").open("wb")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def save(made: Backend) -> None:
    """Remember a testbed as it is now."""
    plain = Saved(made.kind, made.routes, made.topology.to_text(), sorted(made.cuts), made.id)
    with writing():
        new = folder() / f".{made.name}.{os.getpid()}"
        new.write_bytes(msgspec.json.encode(plain))
        new.replace(folder() / f"{made.name}.json")


def load(name: str) -> tuple[Saved, Topology]:
    """Raises TestbedError if there is none of that name."""
    path = folder() / f"{name}.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Saved)
    except FileNotFoundError:
        known = ", ".join(saved()) or "none"
        raise TestbedError(
            f"no testbed {name!r} is up (up: {known}; make one with: chaosnet testbed up)"
        ) from None
    except OSError as error:
        raise TestbedError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise TestbedError(f"{path}: {error} (remove the file)") from None
    return found, Topology.from_text(found.topology, str(path))


def saved() -> list[str]:
    """Names of all that are remembered. Raises TestbedError if nobody can say, as the folder is closed to us."""
    with writing():
        try:
            names = os.listdir(folder())
        except FileNotFoundError:
            return []
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def forget(name: str) -> None:
    """It is down."""
    with writing():
        (folder() / f"{name}.json").unlink(missing_ok=True)
