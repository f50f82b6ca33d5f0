"""Layers that are given as functions: each member builds those that it needs, so none has to hold the whole model.

Every function is called once with parameters that take no memory: that shows their names, types and shapes. It is
called again where their first values are needed. Before either all generators are seeded from `seed` and the layer's
number: so the values are the same on every member, in whatever order layers are built, and other layers draw nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..node.devices import accelerators
from ..node.state.flat_state import as_bytes
from ..node.state.generators import get_generators, set_generators
from ..protocols.errors import ConfigError
from ..training.randomness import seed_from, seed_generators

Build = Callable[[], nn.Module]


class LayerBuilds:
    """The functions, by number of the layer.

    Args:
        others: Layers given as modules, whose parameters functions must not use.
    Attributes:
        shapes: By the parameter that stands for another until it is built: a meta tensor of the other's layout.
    """

    def __init__(self, functions: Mapping[int, Build], seed: int, others: Sequence[nn.Module] = ()) -> None:
        self.functions, self._seed = functions, seed
        self.shapes: dict[nn.Parameter, torch.Tensor] = {}
        self._empty: dict[int, nn.Module] = {}
        self._buffers: dict[int, dict[str, str]] = {}  # By layer: hashes of what they hold.
        self._made: Any = WeakIdKeyDictionary()  # By a parameter: for which layer, and what stands for it.
        for parameter in (p for layer in others for p in layer.parameters()):
            self._made[parameter] = None, parameter

    def empty(self, number: int) -> nn.Module:
        """The layer without values: each parameter is one NaN, expanded to its shape. Raises: ConfigError."""
        devices: dict[int, torch.device] = {}
        with self._seeded(number), self._without_parameters(number, devices):
            layer = self._call(number, "; it is built without values of its parameters first")
        layer_shapes: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in list(layer.named_parameters(remove_duplicate=False)):
            if not parameter.is_meta:
                raise self._refused(number, f"parameter {name!r} was there before it", "one that it makes")
            if not parameter.requires_grad:
                raise self._refused(number, f"parameter {name!r} is frozen", "a module for this layer")
            if parameter not in layer_shapes:
                device = devices.get(id(parameter), torch.get_default_device())
                layer_shapes[parameter] = nn.Parameter(nothing_like(parameter, device))
                self.shapes[layer_shapes[parameter]] = parameter.detach()
            owner, _, key = name.rpartition(".")
            layer.get_submodule(owner)._parameters[key] = layer_shapes[parameter]
        for name, buffer in layer.named_buffers():
            if buffer.is_meta:
                raise self._refused(
                    number, f"buffer {name!r} is made of a parameter", "a module for this layer"
                )
        self._empty[number], self._buffers[number] = layer, _hashes(layer)
        return layer

    def full(self, number: int) -> nn.Module:
        """The layer with its first values. Raises: ConfigError."""
        with self._seeded(number):
            return self._call(number)

    def values(self, number: int) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """First values of the parameters that `empty` has made, in their order. Raises: ConfigError."""
        empty, full = self._empty[number], self.full(number)
        there, here = dict(empty.named_parameters()), dict(full.named_parameters())
        if [(n, p.shape, p.dtype) for n, p in there.items()] != [
            (n, p.shape, p.dtype) for n, p in here.items()
        ]:
            raise self._refused(number, "it builds other parameters the second time", "the same each time")
        if _hashes(full) != self._buffers[number]:
            raise self._refused(
                number, "its buffers are drawn after its parameters", "a module for this layer"
            )
        for name, parameter in there.items():
            yield parameter, here[name].detach()

    @contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        """Inside, draws depend on `seed` and the layer alone; afterwards generators are as before."""
        devices = accelerators(self.shapes) or _current()
        own = get_generators(devices)
        seed_generators(seed_from("initial weights", self._seed, number))
        try:
            yield
        finally:
            set_generators(own, devices)

    @contextmanager
    def _without_parameters(self, number: int, devices: dict[int, torch.device]) -> Iterator[None]:
        """Inside, in this thread, modules get parameters without memory. `devices`: where they were to be, by id."""
        thread = threading.get_ident()

        def instead(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
            del module
            if threading.get_ident() != thread or parameter is None or parameter.is_meta:
                return None
            if nn.parameter.is_lazy(parameter):
                return None
            if parameter not in self._made:
                bare = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                self._made[parameter] = number, bare
                devices[id(bare)] = parameter.device
            user, stands_for_it = self._made[parameter]
            if user != number:
                raise self._refused(
                    number, f"parameter {name!r} is another layer's", "modules for both layers"
                )
            assert isinstance(stands_for_it, nn.Parameter)
            return stands_for_it

        hook = register_module_parameter_registration_hook(instead)
        try:
            yield
        finally:
            hook.remove()

    def _call(self, number: int, when: str = "") -> nn.Module:
        try:
            layer = self.functions[number]()
        except ConfigError:
            raise
        except TypeError as error:
            expected = "(expected a module, or a function without arguments that builds one)"
            raise ConfigError(f"layer {number}: its function fails{when}: {error} {expected}") from error
        except (NotImplementedError, RuntimeError) as error:
            raise ConfigError(f"layer {number}: its function fails{when}: {error}") from error
        if not isinstance(layer, nn.Module):
            raise self._refused(number, f"its function gives {type(layer).__name__}", "a module")
        return layer

    def _refused(self, number: int, what: str, expected: str) -> ConfigError:
        return ConfigError(f"layer {number}, which a function builds: {what} (expected {expected})")


def nothing_like(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of NaN (or 0) with the same type and shape, in the memory of one number."""
    value = float("nan") if like.dtype.is_floating_point else 0
    return torch.full((1,) * like.dim(), value, dtype=like.dtype, device=device).expand(like.shape)


def _current() -> tuple[torch.device, ...]:
    """The accelerator that is used where none is named, if there is any."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return () if kind is None else (torch.device(kind.type, torch.accelerator.current_device_index()),)


def _hashes(layer: nn.Module) -> dict[str, str]:
    """Hashes of the layer's buffers, by name."""
    return {
        name: xxhash.xxh3_64_hexdigest(as_bytes(buffer).cpu().numpy().data)
        for name, buffer in layer.named_buffers()
    }
