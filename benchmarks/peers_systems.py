"""The systems of `chaosnet bench peers`, and the environments that they are installed in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from ..protocols.errors import ConfigError

LOG_LINES = 20  # Of what pip says, or a worker that has ended, shown.


@dataclass(frozen=True)
class PeerSystem:
    """One of those that are compared."""

    name: str
    package: str | None  # On the package registry; None: this installation.
    configured: str
    coordinator: str  # What it is.
    lighthouse: tuple[str, ...] = ()  # A program of its own that members are told of, and its arguments.


SYSTEMS = {
    each.name: each
    for each in (
        PeerSystem("chaosnet", None, "as it comes, without keys", "the node with the elected scheduler"),
        PeerSystem(
            "torchft",
            "torchft-nightly",  # As its README has it. 0.2.0 ends when an all-reduce over Gloo fails (ddp.py).
            "as in its train_ddp.py: fault-tolerant DDP over Gloo (timeout 5 s), state over the process group "
            "(10 s), all else 30 s; nothing starts what has ended again",
            "the lighthouse, on a machine of its own, which nothing starts again",
            ("torchft_lighthouse", "--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"),
        ),
        PeerSystem(
            "hivemind",
            "hivemind",
            "hivemind.Optimizer, synchronous; matchmaking 3 s, averaging timeout 10 s as in its quick start; a step "
            "is an epoch, of ten samples a member",
            "the first DHT peer, a member, too",
        ),
    )
}  # fmt: skip


def default_folder() -> Path:
    """Where environments are kept."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "chaosnet" / "peers"


def environment(package: str, folder: Path) -> Path:
    """The interpreter of an environment that has `package`: made, or as it was. Raises ConfigError with pip's reason.

    It sees our packages behind its own (a .pth file), so torch is there already; a constraint keeps pip from
    replacing it: where a package needs another torch, that is said instead of fetching gigabytes.
    """
    place = folder / package
    python, done = place / "bin" / "python", place / "installed"
    if done.exists():
        return python
    click.echo(f"installing {package} into {place}", err=True)
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, with_pip=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    borrowed = Path(torch.__file__).parent.parent
    (place / "lib" / version / "site-packages" / "borrowed_torch.pth").write_text(f"{borrowed}\n")
    constraint = place / "constraints.txt"
    constraint.write_text(f"torch=={torch.__version__}\n")
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "-c",
        str(constraint),
        package,
    ]
    ran = subprocess.run(install, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ran.returncode != 0:
        raise ConfigError(f"bench peers: {package} could not be installed:\n{reason_of(ran.stdout)}")
    done.write_text(version_of(package, python) + "\n")
    return python


def reason_of(said: str) -> str:
    """What pip says is wrong, or the end of what it says."""
    lines = [line for line in said.strip().splitlines() if line.strip()]
    errors = [line for line in lines if line.lstrip().lower().startswith(("error", "×"))]
    return "\n".join((errors or lines)[-LOG_LINES:])


def version_of(package: str, python: Path) -> str:
    """As it is installed. Raises ConfigError if it is not."""
    asked = f"from importlib.metadata import version; print(version({package!r}))"
    ran = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise ConfigError(f"bench peers: {python} has no {package}:\n{reason_of(ran.stderr)}")
    return ran.stdout.strip()
