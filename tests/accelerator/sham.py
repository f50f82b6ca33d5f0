"""The sham device (sham.cpp): a device to torch that lies in the host's memory, and punishes what others let pass.

It is built once for each build of torch, with g++ and ninja, and kept in torch's folder for extensions. In a process
in which it is loaded, `torch.accelerator` finds two of it.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import types
from pathlib import Path

import torch

NAME = "sham"
SOURCE = Path(__file__).with_name("sham.cpp")


def missing() -> str | None:
    """What it would take to build it, as a sentence; None if all is there."""
    lacks = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    return f"the sham device is built with g++ and ninja, and there is no {lacks[0]}" if lacks else None


def load() -> torch.device:
    """Make it known to torch, once a process. Returns: the first of its devices."""
    if not hasattr(torch, NAME):
        from torch.utils import cpp_extension

        with contextlib.redirect_stdout(io.StringIO()):
            cpp_extension.load(
                f"chaosnet_{NAME}_{torch.__version__.translate(str.maketrans('.+', '__'))}", [str(SOURCE)],
                extra_cflags=["-O1", "-w"], is_python_module=False,
            )  # fmt: skip
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _module())
        torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device(NAME, 0)


def complaints() -> list[str]:
    """What was done wrong on it since the last time that this was asked."""
    torch.accelerator.synchronize()
    return list(torch.ops.sham.complaints())


def traffic() -> types.SimpleNamespace:
    """Bytes `to_host` and `to_device` so far, `waits` of the host, and copies that are `under_way`."""
    names = ("to_host", "to_device", "waits", "under_way")
    return types.SimpleNamespace(**dict(zip(names, torch.ops.sham.traffic(), strict=True)))


def _module() -> types.ModuleType:
    """torch.sham: what torch, and what we, ask of a device's module."""
    ops, module = torch.ops.sham, types.ModuleType(f"torch.{NAME}")

    def index(device: object = None) -> int:
        if isinstance(device, int):
            return device
        named = torch.device(NAME if device is None else device)
        return ops.device() if named.index is None else named.index

    def seed_all(seed: int) -> None:
        for number in range(2):
            ops.manual_seed(number, _signed(seed))

    module.__dict__.update(
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        is_initialized=lambda: True,
        is_available=lambda: True,
        device_count=lambda: 2,
        current_device=ops.device,
        set_device=lambda device: ops.set_device(index(device)),
        get_device_name=lambda device=None: "Sham device",
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        manual_seed=lambda seed: ops.manual_seed(ops.device(), _signed(seed)),
        manual_seed_all=seed_all,
        get_rng_state=lambda device=None: ops.rng_state(index(device)),
        set_rng_state=lambda state, device=None: ops.set_rng_state(index(device), state),
        synchronize=lambda device=None: torch.accelerator.synchronize(index(device)),
    )
    return module


def _signed(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63
