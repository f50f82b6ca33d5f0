"""What can be trained, averaged and sent: parameters, buffers, optimizers; and errors that name what cannot."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...protocols.errors import ConfigError
from .flat_state import dtype_name


@dataclass(frozen=True, slots=True)
class BufferSlot:
    """Where a module keeps a buffer. The tensor in it may be another one after each forward pass."""

    name: str
    module: nn.Module
    key: str
    persistent: bool  # As in register_buffer: False for caches, which are no part of the model's state.

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.module._buffers.get(self.key)

    @property
    def writable(self) -> torch.Tensor | None:
        """The tensor; if forward has put in one that torch refuses to write into, a copy takes its place first."""
        tensor = self.tensor
        if tensor is not None and is_read_only(tensor):
            tensor = self.module._buffers[self.key] = tensor.clone(memory_format=torch.contiguous_format)
        return tensor


def buffer_slots(model: nn.Module) -> list[BufferSlot]:
    """The model's buffers, each once, in the order of `model.named_modules()`."""
    slots, seen = [], set()
    for module_name, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            name = f"{module_name}.{key}" if module_name else key
            slots.append(BufferSlot(name, module, key, key not in module._non_persistent_buffers_set))
    return slots


def check_parameter(name: str, parameter: nn.Parameter) -> None:
    """Raises: ConfigError for a parameter that we cannot average or ship."""
    if nn.parameter.is_lazy(parameter):
        raise ConfigError(f"parameter {name!r} has no shape yet; run the model once before training")
    if parameter.is_complex():
        raise ConfigError(
            f"parameter {name!r} is {dtype_name(parameter)}; complex parameters are not supported "
            "(store the real and imaginary part as one real parameter, see torch.view_as_real)"
        )
    if parameter.layout != torch.strided:
        raise ConfigError(f"parameter {name!r} is sparse; expected a dense one")


def check_buffer(name: str, buffer: torch.Tensor) -> None:
    """Raises: ConfigError for a buffer that we cannot average or ship."""
    wrong = expected = ""
    if buffer.is_meta:
        wrong, expected = "has no data (it is on the device 'meta')", "another device"
    elif buffer.layout != torch.strided or buffer.is_nested or buffer.is_quantized:
        wrong = "is sparse, nested or quantized"
        expected = "a dense one, as of to_dense() or dequantize()"
    elif buffer.is_conj():
        wrong = "is a conjugated view"
        expected = "a copy of it, as of resolve_conj()"
    elif buffer.is_inference():
        wrong = "was made in inference mode"
        expected = "a copy of it, as of clone() outside of that"
    elif is_expanded(buffer):
        wrong = "has several elements in one place of memory"
        expected = "a copy, as of contiguous() after expand()"
    if wrong:
        raise ConfigError(f"buffer {name!r} {wrong}, so it cannot be averaged (expected {expected})")


def is_expanded(tensor: torch.Tensor) -> bool:
    """Do several elements share one place in memory, as after expand()? torch refuses to write into such a tensor."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def is_read_only(tensor: torch.Tensor) -> bool:
    """Does torch refuse to write into it? Quick to tell, as there may be thousands of tensors."""
    return tensor.is_inference() or (not tensor.is_contiguous() and is_expanded(tensor))


def check_optimizer(optimizer: Any, what: str = "optimizer") -> None:
    """Raises: ConfigError for what is no optimizer, or steps only with a closure."""
    if isinstance(optimizer, type) or not all(hasattr(optimizer, each) for each in ("param_groups", "step")):
        raise ConfigError(f"{what}: {optimizer!r:.200} (expected a torch.optim optimizer)")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{what}: {type(optimizer).__name__} computes the loss itself, several times a step "
            "(expected one whose step() needs no closure)"
        )


def thawed(parameter: str) -> ConfigError:
    """The error for a parameter that was frozen when training began, and has a gradient now."""
    return ConfigError(
        f"parameter {parameter} has a gradient but had requires_grad=False when training began, so it is not "
        "averaged; unfreeze it before that, and hold it with a learning rate of 0"
    )


def sparse_gradient(parameter: str) -> ConfigError:
    """The error for a parameter with a sparse gradient, which we cannot average."""
    return ConfigError(
        f"parameter {parameter} has a sparse gradient; expected a dense one (for nn.Embedding, pass sparse=False)"
    )
