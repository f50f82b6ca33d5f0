"""What the workers of all systems have in common: what is trained, how they talk with the bench. Needs torch alone.

A worker says one line of JSON at a time on its standard output: {"ready": true} once its model is there; then it
waits for the line that tells it to begin ({"join": whom}). {"called_s": t} is when it calls its system, {"address":
what others join by}, {"step": n, "at_s": t, "members": k} a step that is done, with gradients of k members. Times
are of the clock that all processes of a machine share. What libraries print goes to the log.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch import nn

LAYERS = 8


class Layers(nn.Module):
    """So many MB of parameters that all have a gradient, and next to nothing to compute."""

    def __init__(self, mb: float) -> None:
        super().__init__()
        outputs = max(1, int(mb * 1e6 / 4 / LAYERS / 2))
        self.layers = nn.ModuleList(nn.Linear(1, outputs) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).square().mean() for layer in self.layers]).sum()


class Bench:
    """This process, as the bench has started it: `told` is what it was given."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = json.loads(sys.argv[1])
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        torch.set_num_threads(1)
        torch.manual_seed(0)

    def say(self, **what: Any) -> None:
        """One line."""
        self._out.write(json.dumps(what) + "\n")

    def begin(self) -> Any:
        """Model and imports are there: wait. Returns: whom to join; the time of the call is told."""
        self.say(ready=True)
        line = sys.stdin.readline()
        if not line:
            sys.exit(0)
        self.say(called_s=time.monotonic())
        return json.loads(line)["join"]

    def compute(self) -> None:
        """A forward pass takes so long."""
        time.sleep(self.told["pause_s"])

    def step(self, number: int, members: int) -> None:
        """A step is done."""
        self.say(step=number, at_s=time.monotonic(), members=members)
