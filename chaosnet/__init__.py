"""Train a PyTorch model on machines that come and go.

    from chaosnet import Trainer, capture_exit_event

Everything public is listed in `__all__`. It is loaded on first use, so that a part that needs no torch (the
scheduler, the protocols) can be imported without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .callbacks import Callbacks, EpochDone, LayersComputed, StateLoaded, StepDone
    from .data.share import Batch
    from .emulated import Emulated
    from .engines.validation import Validation
    from .errors import (
        ChaosnetError,
        CheckpointError,
        ConfigError,
        LayersLost,
        NodeExpelled,
        ReplicasDiffer,
        ScaleOutFailed,
    )
    from .pipeline_trainer import PipelineTrainer
    from .script.endings import close_all
    from .script.exit_event import capture_exit_event
    from .script.means import ClusterMean
    from .settings.groups import Checkpoints, Cluster
    from .trainer import Trainer

_MODULE_BY_NAME = {
    "Batch": "data.share",
    "Callbacks": "callbacks",
    "ChaosnetError": "errors",
    "CheckpointError": "errors",
    "Checkpoints": "settings.groups",
    "Cluster": "settings.groups",
    "ClusterMean": "script.means",
    "ConfigError": "errors",
    "Emulated": "emulated",
    "LayersComputed": "callbacks",
    "LayersLost": "errors",
    "NodeExpelled": "errors",
    "PipelineTrainer": "pipeline_trainer",
    "ReplicasDiffer": "errors",
    "ScaleOutFailed": "errors",
    "StateLoaded": "callbacks",
    "EpochDone": "callbacks",
    "StepDone": "callbacks",
    "Trainer": "trainer",
    "Validation": "engines.validation",
    "capture_exit_event": "script.exit_event",
    "close_all": "script.endings",
}

__all__ = [
    "Batch",
    "Callbacks",
    "ChaosnetError",
    "CheckpointError",
    "Checkpoints",
    "Cluster",
    "ClusterMean",
    "ConfigError",
    "Emulated",
    "EpochDone",
    "LayersComputed",
    "LayersLost",
    "NodeExpelled",
    "PipelineTrainer",
    "ReplicasDiffer",
    "ScaleOutFailed",
    "StateLoaded",
    "StepDone",
    "Trainer",
    "Validation",
    "capture_exit_event",
    "close_all",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'chaosnet' has no attribute {name!r}")
    module = importlib.import_module(f".{_MODULE_BY_NAME[name]}", __name__)
    if name == "capture_exit_event":
        module.imported()
    return getattr(module, name)
