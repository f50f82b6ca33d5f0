"""Sizes of the models that the Chaos paper trains (Sec. VI-A), in float32.

They are worked out or kept here, so that nothing needs to be installed; where torchvision or transformers are, the
tests compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

WIDTH = 4
"""Bytes of a float32."""
MIB = 1 << 20
VOCABULARY, CONTEXT = 50257, 1024
"""Of all GPT-2 models."""
LORA_MIB = 1.7
"""As the paper says, for GPT-2 small."""
QUICK = 100
"""By which --quick divides all sizes."""

STATES_BY_OPTIMIZER = {"sgd": 0, "momentum": 1, "adam": 2}
"""How many numbers an optimizer keeps for each weight."""


def gpt2(width: int, layers: int) -> int:
    """Parameters of a GPT-2: two embeddings, layers of 12 d^2 + 13 d, the last norm; the head is the embedding."""
    return (VOCABULARY + CONTEXT) * width + layers * (12 * width**2 + 13 * width) + 2 * width


PARAMETERS = {
    "LoRA": int(LORA_MIB * MIB) // WIDTH,
    "ResNet101": 44_549_160,
    "AlexNet": 61_100_840,
    "VGG11": 132_863_336,
    "GPT-2": gpt2(768, 12),
    "GPT-2-medium": gpt2(1024, 24),
    "GPT-2-large": gpt2(1280, 36),
}
"""By model; those of torchvision as its documentation has them."""
VISION = ("ResNet101", "AlexNet", "VGG11")
TEXT = ("GPT-2", "GPT-2-medium", "GPT-2-large")


def weight_bytes(model: str, quick: bool = False) -> int:
    """Of all parameters."""
    return PARAMETERS[model] * WIDTH // (QUICK if quick else 1)


def state_bytes(model: str, optimizer: str = "sgd", quick: bool = False) -> int:
    """With what the optimizer keeps."""
    return weight_bytes(model, quick) * (1 + STATES_BY_OPTIMIZER[optimizer])


def say_sizes(models: Sequence[str], optimizer: str, quick: bool) -> dict[str, Any]:
    """Print what will be moved. Returns: bytes, by model."""
    sizes = {model: state_bytes(model, optimizer, quick) for model in models}
    for model, size in sizes.items():
        click.echo(
            f"{model}: a state of {size / 1e6:.1f} MB ({PARAMETERS[model]} parameters, {optimizer})", err=True
        )
    if quick:
        click.echo(f"--quick: all states are 1/{QUICK} of their size, so no figure means anything.")
    return sizes
