"""A model as a list of layers, which members of a cluster compute in parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .protocols.errors import ConfigError


def layers_of(model: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, list[nn.Module]]:
    """The model as one module, and its layers: children of an nn.Sequential, or what a list holds.

    A parameter may be used by several layers.
    Raises: ConfigError for what has no layers, and for layers that keep what they saw (BatchNorm), which is other on
        each member.
    """
    if isinstance(model, nn.Sequential | nn.ModuleList):
        whole: nn.Module = model
        layers = list(model)
    elif isinstance(model, list | tuple) and all(isinstance(each, nn.Module) for each in model):
        layers = list(model)
        whole = nn.ModuleList(layers)
    else:
        raise ConfigError(
            f"model: {_what_is_no_layer(model)} (expected an nn.Sequential, or a list of modules, each a layer that "
            "takes what the one before gives)"
        )
    if not layers:
        raise ConfigError("model: no layers (expected at least one)")
    for name, module in whole.named_modules():
        if getattr(module, "running_mean", None) is not None:
            raise ConfigError(
                f"{name!r} is a {type(module).__name__}, which averages what this member alone has seen (expected "
                "nn.GroupNorm or nn.LayerNorm, or track_running_stats=False)"
            )
    return whole, layers


def _what_is_no_layer(model: object) -> str:
    """The first of a list that is no module, by its place in it; of anything else its type."""
    if isinstance(model, list | tuple):
        for place, each in enumerate(model):
            if not isinstance(each, nn.Module):
                return f"layer {place} is a {type(each).__name__}"
    return type(model).__name__


def device_of(model: nn.Module) -> torch.device:
    """Where its parameters are. Raises: ConfigError if that is not one place."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"model: parameters on {named} (expected all on one device of this node)")
    return devices.pop() if devices else torch.device("cpu")
