"""Which testbeds are up: one file each, so that later commands find what an earlier one has made."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from .backend import Backend, TestbedError
from .topology import Link, Topology


class Saved(msgspec.Struct, frozen=True):
    """What is remembered of a testbed."""

    backend: str
    routes: bool
    topology: str  # As YAML.
    cuts: list[Link] = []


def folder() -> Path:
    """Where the files are: CHAOSNET_TESTBEDS, or a folder for temporary files."""
    return Path(os.environ.get("CHAOSNET_TESTBEDS") or Path(tempfile.gettempdir()) / "chaosnet-testbeds")


def save(made: Backend) -> None:
    """Remember a testbed as it is now."""
    folder().mkdir(parents=True, exist_ok=True)
    new = folder() / f".{made.name}.{os.getpid()}"
    new.write_bytes(
        msgspec.json.encode(Saved(made.kind, made.routes, made.topology.to_text(), sorted(made.cuts)))
    )
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
    except msgspec.DecodeError as error:
        raise TestbedError(f"{path}: {error} (remove the file)") from None
    return found, Topology.from_text(found.topology, str(path))


def saved() -> list[str]:
    """Names of all that are remembered."""
    return sorted(path.stem for path in folder().glob("*.json"))


def forget(name: str) -> None:
    """It is down."""
    (folder() / f"{name}.json").unlink(missing_ok=True)
