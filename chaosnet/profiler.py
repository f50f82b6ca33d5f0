"""Measures what each layer of a model costs on this machine, for `chaosnet plan` and the planners.

from chaosnet.profiler import profile_layers, save
save(profile_layers("mine", [embedding, *blocks, head], tokens[:1]), "profile.json")
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import nn

from .node.devices import wait_for_device
from .protocols.errors import ConfigError
from .scheduler.elastic.profile import Layer, Profile

ROUNDS = 5
ADAM_BYTES = 12  # Per parameter: two moments and a master copy, each of four bytes.


def profile_layers(
    model: str,
    layers: Sequence[nn.Module],
    sample: torch.Tensor,
    sizes: Sequence[int] = (1, 2, 4),
    rounds: int = ROUNDS,
    optimizer_bytes: int = ADAM_BYTES,
) -> Profile:
    """Forward and backward of each layer by itself, fed with what the layer before it gives.

    Args:
        sample: one sample, [1, ...]; more of them are copies.
        sizes: samples in a micro-batch, each measured; the planner draws lines between them.
        rounds: of which the median counts.
        optimizer_bytes: per parameter.
    Raises: ConfigError for no layers or sizes, or a sample that is not one.
    """
    if not layers or not sizes or min(sizes) < 1 or sample.shape[:1] != (1,):
        raise ConfigError(
            f"profile: {len(layers)} layers, sizes {tuple(sizes)}, a sample of shape {tuple(sample.shape)}"
            " (expected at least one layer, sizes from 1 on, shape [1, ...])"
        )
    seconds: list[dict[int, tuple[float, float]]] = [{} for _ in layers]
    kept, boundaries = [0] * len(layers), [0] * len(layers)
    for size in sorted(sizes):
        x = sample.expand(size, *sample.shape[1:]).contiguous()
        for number, layer in enumerate(layers):
            seconds[number][size] = _median_s(layer, x, rounds)
            if size == min(sizes):
                kept[number] = _kept_bytes(layer, x) // size
            with torch.no_grad():
                x = layer(x)
            boundaries[number] = x.nbytes // size
    return Profile(
        model,
        tuple(
            _layer(layer, of, activations, boundary, optimizer_bytes)
            for layer, of, activations, boundary in zip(layers, seconds, kept, boundaries, strict=True)
        ),
    )


def save(profile: Profile, path: str | Path) -> None:
    """Write it where `chaosnet plan` can read it."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def _layer(
    layer: nn.Module, seconds: dict[int, tuple[float, float]], kept: int, boundary: int, optimizer_bytes: int
) -> Layer:
    parameters = list(layer.parameters())
    trained = [each for each in parameters if each.requires_grad]
    return Layer(
        seconds=seconds,
        parameter_bytes=sum(each.nbytes for each in parameters),
        gradient_bytes=sum(each.nbytes for each in trained),
        optimizer_bytes=optimizer_bytes * sum(each.numel() for each in trained),
        activation_bytes=kept,
        boundary_bytes=boundary,
    )


def _median_s(layer: nn.Module, x: torch.Tensor, rounds: int) -> tuple[float, float]:
    """Medians of forward and backward; one more round before, which counts for nothing."""
    times = [_once_s(layer, x) for _ in range(rounds + 1)][1:]
    return statistics.median(f for f, _ in times), statistics.median(b for _, b in times)


def _once_s(layer: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    x = x.detach().requires_grad_(x.is_floating_point())
    wait_for_device()
    started_s = time.perf_counter()
    y = layer(x)
    wait_for_device()
    between_s = time.perf_counter()
    if y.requires_grad:
        y.backward(torch.ones_like(y))
    wait_for_device()
    layer.zero_grad(set_to_none=True)
    return between_s - started_s, time.perf_counter() - between_s


def _kept_bytes(layer: nn.Module, x: torch.Tensor) -> int:
    """Bytes that autograd keeps for the backward, but for parameters and buffers; views of a tensor count once."""
    own = {each.untyped_storage().data_ptr() for each in (*layer.parameters(), *layer.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x.detach().requires_grad_(x.is_floating_point()))
    return sum(kept.values())
