"""Random generators: torch's on the CPU and on accelerators, Python's and numpy's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch


def get_generators(devices: Sequence[torch.device]) -> dict[str, Any]:
    """The state of all generators as plain data: torch's on the CPU and on these devices, Python's and numpy's."""
    numpy_state: Any = np.random.get_state(legacy=False)
    inner = dict(numpy_state["state"])
    arrays = {key: [str(v.dtype), v.tobytes()] for key, v in inner.items() if isinstance(v, np.ndarray)}
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {**inner, **arrays}},
        "accelerator": [devices[0].type, list(map(_get, devices))] if devices else None,
    }


def set_generators(state: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Set all generators to `state`. Devices of another kind than the sender's, or beyond its number, keep theirs."""
    torch.set_rng_state(_byte_tensor(state["torch"]))
    random.setstate(state["python"])
    inner = {
        key: np.frombuffer(value[1], dtype=value[0]) if isinstance(value, list) else value
        for key, value in state["numpy"]["state"].items()
    }
    np.random.set_state({**state["numpy"], "state": inner})
    kind, states = state["accelerator"] or (None, [])
    states = [states] if isinstance(states, bytes) else states  # Older checkpoints have that of one device.
    for device, each in zip(devices, states, strict=False):
        if device.type == kind:
            torch.get_device_module(device.type).set_rng_state(_byte_tensor(each), *_argument(device))


def seed_devices(seed: int, devices: Sequence[torch.device]) -> None:
    """Seed torch's generators on the CPU and on these devices with `seed`, a number of 64 bits."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.2 to 0.7 ms, for devices not there.
    for device in devices:
        module = torch.get_device_module(device.type)
        only = module.device_count() == 1
        with nullcontext() if only else torch.accelerator.device_index(device.index):
            module.manual_seed(seed)


def _get(device: torch.device) -> bytes:
    state = torch.get_device_module(device.type).get_rng_state(*_argument(device))
    return state.cpu().numpy().tobytes()


def _argument(device: torch.device) -> tuple[torch.device, ...]:
    """What names `device` to get_rng_state and set_rng_state, which else take the current one. MPS has but one."""
    return () if device.type == "mps" else (device,)


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
