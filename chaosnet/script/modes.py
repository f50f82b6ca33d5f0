"""Modes of torch that a script may be in when it comes to a step of the cluster.

Nodes come to the same step from different places: one from `optimizer.step()`, another as it waits for its part of an
evaluation, under `torch.inference_mode()` or autocast. All have to come to the same state. And what is made in
inference mode, as the optimizer's state is in its first step, could not be changed afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def no_modes(kinds: Collection[str]) -> Iterator[None]:
    """Inside, inference mode and autocast are off. `kinds`: the types of devices that the script computes on."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():  # Else gradients stay on or off, as the script has them.
            stack.enter_context(torch.inference_mode(False))
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
