"""The errors of chaosnet, for `except` clauses in user scripts."""

from chaosnet.protocols.errors import (
    ChaosnetError,
    CheckpointError,
    ConfigError,
    LayersLost,
    LocalProtocolError,
    MalformedMessage,
    NodeExpelled,
    PeerUnreachable,
    PlanInfeasible,
    ProtocolError,
    RemoteProtocolError,
    ReplicasDiffer,
    ScaleOutFailed,
    VersionMismatch,
)

__all__ = [
    "ChaosnetError",
    "CheckpointError",
    "ConfigError",
    "LayersLost",
    "LocalProtocolError",
    "MalformedMessage",
    "NodeExpelled",
    "PeerUnreachable",
    "PlanInfeasible",
    "ProtocolError",
    "RemoteProtocolError",
    "ReplicasDiffer",
    "ScaleOutFailed",
    "VersionMismatch",
]
