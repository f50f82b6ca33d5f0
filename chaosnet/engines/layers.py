"""A model as a list of layers, which members of a cluster compute in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..protocols.errors import ConfigError
from .layer_builds import Build, LayerBuilds

Model = nn.Module | Sequence[nn.Module | Build]


def built(model: Model, seed: int, in_parts: bool) -> tuple[Model, LayerBuilds]:
    """The model with a module in place of each function; without values of its parameters if members keep parts.

    `seed`: of first values. Raises: ConfigError.
    """
    layers = list(model) if isinstance(model, list | tuple) else []
    functions = {
        n: each for n, each in enumerate(layers) if not isinstance(each, nn.Module) and callable(each)
    }
    builds = LayerBuilds(functions, seed, [each for each in layers if isinstance(each, nn.Module)])
    if not functions:
        return model, builds
    for number in functions:
        layers[number] = builds.empty(number) if in_parts else builds.full(number)
    return nn.Sequential(*layers) if all(isinstance(each, nn.Module) for each in layers) else layers, builds


def made_for(given: Any, what: Any) -> Any:
    """An optimizer, or an LR scheduler: `given`, or if that is a function, what it makes for `what`."""
    is_function = callable(given) and not isinstance(given, type) and not hasattr(given, "state_dict")
    return given(what) if is_function else given


def layers_of(model: Model) -> tuple[nn.Module, list[nn.Module]]:
    """The model as one module, and its layers: children of an nn.Sequential, or what a list holds.

    A parameter may be used by several layers.
    Raises: ConfigError for what has no layers, and for layers that keep what they saw (BatchNorm), which is other on
        each member.
    """
    if isinstance(model, nn.Sequential | nn.ModuleList):
        if type(model).forward not in (nn.Sequential.forward, nn.ModuleList.forward):
            raise ConfigError(
                f"model: {type(model).__name__} has a forward of its own, which nobody would call (expected its "
                "children in a list, if each takes what the one before gives)"
            )
        whole: nn.Module = model
        layers = list(model)
    elif isinstance(model, list | tuple) and all(isinstance(each, nn.Module) for each in model):
        layers = list(model)
        whole = nn.ModuleList(layers)
    else:
        raise ConfigError(
            f"model: {_what_is_no_layer(model)} (expected an nn.Sequential, or a list of modules, or of functions "
            "that build them, each a layer that takes what the one before gives)"
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
    """For an error: the first entry of a list that is no module; of anything else its type."""
    if isinstance(model, list | tuple):
        for place, each in enumerate(model):
            if not isinstance(each, nn.Module):
                return f"layer {place} is a {type(each).__name__}"
    return type(model).__name__


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters. Raises: ConfigError if they are on several."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"model: parameters on {named} (expected all on one device of this node)")
    return devices.pop() if devices else torch.device("cpu")
