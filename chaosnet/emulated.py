"""Layers that take a given time and hardly any processor, to try pipelines that this machine could not compute."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import nn

from .protocols.errors import ConfigError

LATE_S = 0.0002  # A sleep, at most as a rule.


class Emulated(nn.Module):
    """A layer that takes `forward_s` seconds forwards and `backward_s` backwards, whatever it is given.

    It waits, so as many as you like fit on one processor; what it does meanwhile counts into its time. It multiplies
    by a parameter of its own, and gradients are true: it can be trained, and summed to the bit.

    Args:
        forward_s: Seconds, of one micro-batch; 0: only what the multiplication takes.
        backward_s: The same, backwards.
        width: Of the last dimension of what it gives, so that as many bytes go to the next layer as would. Of another
            width than what comes in, it gives the mean over that. 0: the width of what comes in.
    What comes in is a tensor of floating-point numbers. Raises: ConfigError for what cannot be.
    """

    def __init__(self, forward_s: float, backward_s: float, width: int = 0) -> None:
        super().__init__()
        for name, value in (("forward_s", forward_s), ("backward_s", backward_s)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"Emulated: {name} is {value!r} (expected seconds from 0 on)")
        if not isinstance(width, int) or width < 0:
            raise ConfigError(f"Emulated: width is {width!r} (expected a whole number from 0 on)")
        self.forward_s, self.backward_s, self.width = forward_s, backward_s, width
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., any] to [..., width]."""
        out: torch.Tensor = _Timed.apply(
            x, self.gain, self.width or x.shape[-1], self.forward_s, self.backward_s
        )
        return out

    def extra_repr(self) -> str:
        """See nn.Module."""
        return f"forward_s={self.forward_s:g}, backward_s={self.backward_s:g}, width={self.width}"


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gain: torch.Tensor, width: int, forward_s: float, backward_s: float
    ) -> torch.Tensor:
        until_s = time.perf_counter() + forward_s
        same = width == x.shape[-1]
        taken = x if same else x.mean(-1, keepdim=True)
        out = (taken * gain).expand(*x.shape[:-1], width).contiguous()
        ctx.save_for_backward(taken, gain)
        ctx.shape, ctx.backward_s = x.shape, backward_s
        _wait(until_s)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        until_s = time.perf_counter() + ctx.backward_s
        taken, gain = ctx.saved_tensors
        gradient = gradients[0] if taken.shape == gradients[0].shape else gradients[0].sum(-1, keepdim=True)
        of_gain = (gradient * taken).sum().reshape(1)
        of_x = (gradient * gain * (taken.shape[-1] / ctx.shape[-1])).expand(ctx.shape).contiguous()
        _wait(until_s)
        return of_x, of_gain, None, None, None


def _wait(until_s: float) -> None:
    """Exactly: a sleep ends a tenth of a millisecond late, hundreds of times in a step."""
    time.sleep(max(until_s - time.perf_counter() - LATE_S, 0.0))
    while time.perf_counter() < until_s:
        pass
