"""Which testbeds are up: one file each, so that later commands find what an earlier one has made."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .backend import TestbedError
from .topology import Topology


def folder() -> Path:
    """Where the files are: CHAOSNET_TESTBEDS, or a folder for temporary files."""
    return Path(os.environ.get("CHAOSNET_TESTBEDS") or Path(tempfile.gettempdir()) / "chaosnet-testbeds")


def save(name: str, topology: Topology) -> None:
    """Remember a testbed as it is now."""
    folder().mkdir(parents=True, exist_ok=True)
    new = folder() / f".{name}.{os.getpid()}"
    new.write_text(topology.to_text())
    new.replace(folder() / f"{name}.yaml")


def load(name: str) -> Topology:
    """Raises TestbedError if there is none of that name."""
    path = folder() / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(saved()) or "none"
        raise TestbedError(f"no testbed {name!r} is up (up: {known}; make one with: chaosnet testbed up)")
    return Topology.read(path)


def saved() -> list[str]:
    """Names of all that are remembered."""
    return sorted(path.stem for path in folder().glob("*.yaml"))


def forget(name: str) -> None:
    """It is down."""
    (folder() / f"{name}.yaml").unlink(missing_ok=True)
