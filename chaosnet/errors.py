"""The errors of chaosnet, for `except` clauses in user scripts."""

from chaosnet.protocols.errors import (
    ChaosnetError,
    CheckpointError,
    ConfigError,
    Expelled,
    LocalProtocolError,
    MalformedMessage,
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
    "Expelled",
    "LocalProtocolError",
    "MalformedMessage",
    "PeerUnreachable",
    "PlanInfeasible",
    "ProtocolError",
    "RemoteProtocolError",
    "ReplicasDiffer",
    "ScaleOutFailed",
    "VersionMismatch",
]
