"""How a model in layers is trained, and what of that all members must have set alike."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..callbacks import Callbacks
from ..node.devices import name_of
from .keeping import ranges_of
from .layer_builds import LayerBuilds
from .validation import Validation


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """How the model is trained; all of it the same on all members, but `callbacks`.

    Attributes:
        loss: A function of the last layer's output and the targets: the mean over the given samples.
        batch, micro_batch: Samples of a step, and those that go through the layers at once.
        stages: The least stages of a pipeline, if there are members enough.
        layout: The pipelines to run as long as there are members enough ("2+2"); "": the fastest.
        exact: Results are the same to the bit, whoever computes what (node/sums/layer_sums.py).
        keepers: How many members keep each part of the state; None: all keep all.
        first_members: How many members must be there before the first update.
        validation: What the model is validated with after each epoch; None: with nothing.
    """

    loss: Callable[[Any, Any], torch.Tensor]
    batch: int
    micro_batch: int
    stages: int = 1
    layout: str = ""
    exact: bool = True
    max_grad_norm: float | None = None
    seed: int = 0
    lr_scheduler_every: str | int = "step"
    keepers: int | None = None
    first_members: int = 1
    callbacks: Callbacks | None = None
    validation: Validation | None = None


def terms_of(settings: PipelineSettings, device: torch.device, builds: LayerBuilds) -> dict[str, str]:
    """What all members must have set alike."""
    own = ("loss", "callbacks", "validation")
    terms = {"pipelines": "True", "functions": ranges_of(sorted(builds.functions))} | {
        each.name: str(getattr(settings, each.name)) for each in fields(settings) if each.name not in own
    }
    if settings.validation is not None:
        measures = ", ".join(settings.validation.measures) or "none"
        terms["validation"] = f"{settings.validation.samples} samples, measures: {measures}"
    if settings.exact:  # The numbers may depend on these, too.
        terms |= {
            "torch": str(torch.__version__),
            "machine": _machine(device),
            "threads": str(torch.get_num_threads()),
        }
    return terms


def _machine(device: torch.device) -> str:
    """What numbers may depend on: the kind of processor that torch has kernels for, or of accelerator."""
    if device.type != "cpu":
        return name_of(device)
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
