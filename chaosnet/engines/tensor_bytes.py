"""Tensors as bytes on the wire, and back: a row of type and shape for each, and their bytes one behind the other.

Activations say whether something trained has made them, and needs their gradients. A gradient may be None.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..node.state.flat_state import DTYPES, as_bytes, dtype_name
from ..protocols.errors import ConfigError, MalformedMessage
from ..protocols.messages import MOST_DIMENSIONS, MOST_TENSORS, Row, Tensor

PART_BYTES = 4 << 20  # What travels as one message: others have their turn between.
SINGLE = "1 "  # Before the type of the first row: it is a tensor by itself, and no tuple of one.
TRAINED = " trained"  # Behind the type: gradients are to come back.
NOTHING = "none"  # In the place of the type.


def check(value: Any, layer: int) -> None:
    """Raises: ConfigError, by the layer that gives it, for what no message holds."""
    if other := no_tensor(value):
        raise ConfigError(f"layer {layer} gives {other} (expected a tensor, or a tuple of tensors)")
    tensors = value if isinstance(value, tuple) else (value,)
    for each in tensors:
        if each.dim() > MOST_DIMENSIONS:
            raise ConfigError(
                f"layer {layer} gives {each.dim()} dimensions (expected at most {MOST_DIMENSIONS})"
            )
    if not 1 <= len(tensors) <= MOST_TENSORS:
        raise ConfigError(f"layer {layer} gives {len(tensors)} tensors (expected 1 to {MOST_TENSORS})")


def no_tensor(value: Any) -> str:
    """What of it is neither a dense tensor, nor one in a tuple, by its type; "" if all is.

    Nobody tells the other end of a link what class of tuple it was, nor the names of its fields.
    """
    if isinstance(value, tuple) and type(value) is not tuple:
        return f"{type(value).__name__}, no plain tuple"
    for each in value if isinstance(value, tuple) else (value,):
        if not isinstance(each, torch.Tensor):
            return f"{type(each).__name__}{' within a tuple' if isinstance(value, tuple) else ''}"
        if each.layout is not torch.strided or each.is_nested:  # No message has its parts.
            return "a nested tensor" if each.is_nested else f"a tensor of layout {each.layout}"
    return ""


def cut(value: Any) -> tuple[tuple[Row, ...], list[Any]]:
    """Rows and parts of a tensor, or of a tuple of them."""
    tensors = value if isinstance(value, tuple) else (value,)
    rows = [_row(each) for each in tensors]
    if not isinstance(value, tuple):
        rows[0] = SINGLE + rows[0][0], rows[0][1]
    flat = [as_bytes(each.detach().cpu().contiguous()) for each in tensors if each is not None]
    data = (
        flat[0]
        if len(flat) == 1
        else torch.cat(flat)
        if flat
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    whole = data.numpy().data
    return tuple(rows), [whole[at : at + PART_BYTES] for at in range(0, max(len(whole), 1), PART_BYTES)]


def _row(tensor: torch.Tensor | None) -> Row:
    if tensor is None:
        return NOTHING, ()
    return dtype_name(tensor) + TRAINED * tensor.requires_grad, tuple(tensor.shape)


def joined(parts: Sequence[tuple[Tensor, Any]]) -> Any:
    """The tensors, in memory of their own. Raises: MalformedMessage if rows and bytes do not fit."""
    message = parts[0][0]
    each = [_bytes(payload) for _, payload in parts]
    data = each[0] if len(each) == 1 else np.concatenate(each)
    tensors: list[torch.Tensor | None] = []
    at = 0
    for row, shape in message.rows:
        name = row.removeprefix(SINGLE)
        if name == NOTHING:
            tensors.append(None)
            continue
        dtype, trained = DTYPES.get(name.removesuffix(TRAINED)), name.endswith(TRAINED)
        if dtype is None or (trained and not (dtype.is_floating_point or dtype.is_complex)):
            raise MalformedMessage(f"a tensor of type {row!r}")
        stop = at + math.prod(shape) * dtype.itemsize
        if stop > data.size:
            raise MalformedMessage(f"a tensor of {stop - at} bytes in {data.size - at}")
        whole = torch.empty(stop - at, dtype=torch.uint8, device="cpu")  # Where torch would have it.
        whole.numpy()[:] = data[at:stop]
        tensor = whole.view(dtype).view(shape) if stop > at else torch.empty(shape, dtype=dtype, device="cpu")
        tensors.append(tensor.requires_grad_(trained))
        at = stop
    is_single = len(tensors) == 1 and message.rows[0][0].startswith(SINGLE)
    return tensors[0] if is_single else tuple(tensors)


def moved(value: Any, device: torch.device) -> Any:
    """The same on that device: a tensor, dictionaries, named tuples, or tuples and lists, both as tuples.

    Anything else stays as it is.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(moved(each, device) for each in value)
    if isinstance(value, tuple | list):
        return tuple(moved(each, device) for each in value)
    if type(value) in (dict, OrderedDict, defaultdict):
        there = copy.copy(value)  # In its own class.
        there.update({key: moved(each, device) for key, each in value.items()})
        return there
    return value


def _bytes(payload: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    buffer = b"" if payload is None else getattr(payload, "buffer", payload)
    return np.frombuffer(buffer, dtype=np.uint8)
