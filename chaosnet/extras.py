"""Packages that few need: `pip install 'chaosnet[NAME]'` brings those of one extra (setup.cfg)."""

from __future__ import annotations

from importlib.util import find_spec

from .protocols.errors import ConfigError

MODULES = {
    "accelerate": ("accelerate",),
    "demo": ("matplotlib", "sklearn"),
    "iperf3": ("iperf3",),
    "planner": ("scipy",),
    "plot": ("matplotlib",),
    "dashboard": ("prometheus_client", "starlette", "uvicorn"),
    "lan": ("zeroconf",),
    "lightning": ("lightning",),
    "transformers": ("transformers", "accelerate"),
    "top": ("textual",),
}
"""What is imported of each extra's packages."""


def demand(extra: str, what: str) -> None:
    """Raises: ConfigError that says how to install the extra which `what` needs, if it is not there."""
    missing = [module for module in MODULES[extra] if find_spec(module) is None]
    if missing:
        packages = " and ".join([", ".join(missing[:-1]), missing[-1]]) if missing[1:] else missing[0]
        are = "are" if missing[1:] else "is"
        raise ConfigError(
            f"{what} needs {packages}, which {are} not installed (pip install 'chaosnet[{extra}]')"
        )


def brings(module: str) -> str | None:
    """The extra that brings a module which could not be imported, the smallest of several; None if none does."""
    found = [extra for extra, modules in MODULES.items() if module in modules]
    return min(found, key=lambda extra: len(MODULES[extra]), default=None)
