"""Layers that take a given time: what they give, and how long they take."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from chaosnet import ConfigError, Emulated


def plain(x: torch.Tensor, gain: torch.Tensor, width: int) -> torch.Tensor:
    """What such a layer works out, in torch's own words."""
    taken = x if width == x.shape[-1] else x.mean(-1, keepdim=True)
    return (taken * gain).expand(*x.shape[:-1], width)


@pytest.mark.parametrize(("comes", "width"), [(6, 0), (6, 6), (6, 4), (1, 5), (5, 1)])
def test_it_is_of_the_width_that_was_asked_for_and_its_gradients_are_true(comes: int, width: int) -> None:
    layer, x = Emulated(0.0, 0.0, width), torch.randn(3, 2, comes, requires_grad=True)
    nn.init.constant_(layer.gain, 1.5)
    out = layer(x)
    assert out.shape == (3, 2, width or comes) and out.is_contiguous()
    gradient = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, layer.gain), gradient)
    expected = plain(x, layer.gain, width or comes)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (x, layer.gain), gradient))
    assert found[0].is_contiguous()


def test_as_many_layers_take_as_many_times_as_long_and_backwards_another_time() -> None:
    def took_s(layers: int) -> tuple[float, float]:
        model = nn.Sequential(*(Emulated(0.02, 0.04) for _ in range(layers)))
        began_s = time.perf_counter()
        loss = model(torch.ones(1, 2)).sum()
        between_s = time.perf_counter()
        loss.backward()
        return between_s - began_s, time.perf_counter() - between_s

    forward_s, backward_s = took_s(5)
    assert forward_s >= 5 * 0.02 and backward_s >= 5 * 0.04  # A busy machine is late, and never early.


def test_the_first_of_a_model_takes_what_nobody_wants_a_gradient_of() -> None:
    layer = Emulated(0.0, 0.0)
    layer(torch.ones(2, 3)).sum().backward()
    assert layer.gain.grad is not None and layer.gain.grad.item() == 6


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((-1.0, 0.0), "forward_s is -1.0"),
        ((0.0, float("nan")), "backward_s is nan"),
        ((0.0, 0.0, -2), "width is -2"),
        ((0.0, 0.0, 2.5), "width is 2.5"),
    ],
)
def test_what_cannot_be_is_told_by_name(given: tuple, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Emulated(*given)
