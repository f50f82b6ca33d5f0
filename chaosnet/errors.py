"""The errors of chaosnet, for `except` clauses in user scripts."""

from chaosnet.protocols.errors import (
    ChaosnetError,
    ConfigError,
    Expelled,
    LocalProtocolError,
    MalformedMessage,
    PeerUnreachable,
    PlanInfeasible,
    ProtocolError,
    RemoteProtocolError,
    ScaleOutFailed,
    VersionMismatch,
)

__all__ = [
    "ChaosnetError",
    "ConfigError",
    "Expelled",
    "LocalProtocolError",
    "MalformedMessage",
    "PeerUnreachable",
    "PlanInfeasible",
    "ProtocolError",
    "RemoteProtocolError",
    "ScaleOutFailed",
    "VersionMismatch",
]
