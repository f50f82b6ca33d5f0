"""Benchmarks whose models lie on an accelerator (`--accelerator`). All of their processes share its first device."""

from __future__ import annotations

import click
import torch

from ..protocols.errors import ConfigError

accelerator_option = click.option(
    "--accelerator", is_flag=True, help="Models lie on the device that torch.accelerator finds."
)


def device_for(command: str, accelerator: bool) -> str:
    """Where models are to lie: "cpu", or the kind of the accelerator. Raises: ConfigError if there is none."""
    if not accelerator:
        return "cpu"
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        raise ConfigError(f"bench {command} --accelerator: torch.accelerator finds no device")
    return found.type
