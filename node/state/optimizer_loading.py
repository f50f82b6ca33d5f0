"""Puts an optimizer's state that has arrived into an optimizer, equal to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# Settings of a parameter group that say how its step is computed, not what. Each node has its own, by its device.
EXECUTION = frozenset({"foreach", "fused", "capturable", "differentiable"})


def load_optimizer(optimizer: Any, state: dict[Any, Any], rest: dict[str, Any]) -> None:
    """optimizer.load_state_dict, without its casts.

    That casts floating-point state to the parameter's dtype, which would round float32 state of a bfloat16
    parameter, and takes a str apart as it does any iterable.
    Args:
        state: By index of the parameter.
        rest: The other entries of the sender's state_dict(), with "param_groups". Changed.
    """
    for mine, group in zip(optimizer.param_groups, rest["param_groups"], strict=True):
        group.update({key: mine[key] for key in EXECUTION & mine.keys()})
        for key, value in group.items():  # An lr may be a tensor; torch leaves it where it arrived.
            if isinstance(value, torch.Tensor) and isinstance(mine.get(key), torch.Tensor):
                group[key] = value.to(mine[key].device)
        group["params"] = _as_range(group["params"])
    optimizer.load_state_dict({**rest, "state": state})
    # Not torch's copies: what an LR scheduler shares with a group, as in torch 2.6, is one tensor here, too.
    for mine, group in zip(optimizer.param_groups, rest["param_groups"], strict=True):
        mine.update({key: value for key, value in group.items() if isinstance(value, torch.Tensor)})
    loaded = optimizer.state
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in rest["param_groups"] for index in group["params"]]
    parameter_by_index = dict(zip(indices, parameters, strict=True))
    for key, value in state.items():
        parameter = parameter_by_index.get(key, key)
        if parameter in loaded:
            loaded[parameter] = _laid_out_as(parameter, _uncast(loaded[parameter], value))


def _as_range(indices: Sequence[int]) -> Sequence[int]:
    """The same indices, as a range if they are one: for each tensor, torch searches them, a list from the front."""
    expected = range(indices[0], indices[0] + len(indices)) if indices else range(0)
    return expected if list(indices) == list(expected) else indices


def _laid_out_as(parameter: Any, state: Any) -> Any:
    """Give tensors of the parameter's shape its layout in memory: fused optimizers pair elements as they lie."""
    if not isinstance(parameter, torch.Tensor) or parameter.is_contiguous() or not isinstance(state, dict):
        return state  # What arrives is contiguous already.
    return {
        key: torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
        if isinstance(value, torch.Tensor)
        and value.shape == parameter.shape
        and value.stride() != parameter.stride()
        else value
        for key, value in state.items()
    }


def _uncast(loaded: Any, sent: Any) -> Any:
    """What an optimizer made of the state it loaded, with the values and dtypes that were sent."""
    if isinstance(sent, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == sent.dtype else sent.to(loaded.device)
    if isinstance(sent, dict) and isinstance(loaded, dict):
        pairs = {key: _uncast(value, sent[key]) if key in sent else value for key, value in loaded.items()}
        return type(sent)(pairs)
    if isinstance(sent, list | tuple) and isinstance(loaded, list | tuple) and len(sent) == len(loaded):
        return type(loaded)(_uncast(a, b) for a, b in zip(loaded, sent, strict=True))
    return sent if isinstance(sent, str) else loaded
