"""All messages: those that travel over one link only, and those that go from node to node inside an envelope.

The codec, the tests and the simulation know messages from these two unions.
"""

from __future__ import annotations

from .fields import Count, Id, Message
from .joins import (
    NegotiationPlan,
    NeighborsReady,
    ReplicationPlan,
    ScaleOutReady,
    ScaleOutRefused,
    ScaleOutRequest,
)
from .keys import Introduction, KeyCommand, KeyringNews
from .links import (
    Bye,
    ConnectLinkRequest,
    DialBack,
    DialBackReply,
    DisconnectLinkRequest,
    Echo,
    EchoReply,
    Hello,
    Laid,
    Lend,
    LinkNews,
    Losses,
    Mapped,
    Ping,
    Pong,
)
from .lives import (
    DeclaredDead,
    Expelled,
    Farewell,
    GoOnCommand,
    LeaveCommand,
    Outlived,
    RelayoutCommand,
    ScaleInRequest,
)
from .probes import Iperf3Ready, Probe, ProbeRequest, ProbeResult
from .reports import Answer, Notice, Report, StatusReply, StatusRequest
from .state import Have, ManifestReply, ManifestRequest, NoSnapshot, ReplicationDone, Shard, ShardRequest
from .steps import Commit, Down, Ready, Up
from .succession import AbortRequest, Flush, FlushOk, Install, Prepare, PrepareFailed, VoteReply, VoteRequest
from .tensors import Tensor

Routed = (
    ScaleOutRequest
    | ScaleOutRefused
    | Outlived
    | NegotiationPlan
    | NeighborsReady
    | ReplicationPlan
    | ScaleOutReady
    | ScaleInRequest
    | ConnectLinkRequest
    | DisconnectLinkRequest
    | Answer
    | LeaveCommand
    | GoOnCommand
    | RelayoutCommand
    | DeclaredDead
    | Prepare
    | PrepareFailed
    | LinkNews
    | Farewell
    | AbortRequest
    | Flush
    | FlushOk
    | Install
    | Expelled
    | VoteRequest
    | VoteReply
    | Echo
    | EchoReply
    | KeyringNews
    | KeyCommand
    | Introduction
    | Report
    | Notice
    | StatusRequest
    | StatusReply
)


class Envelope(Message, frozen=True, kw_only=True):
    """Hop to hop: `body` is on its way from `source` to `target`, or EVERYONE. `serial` is the source's."""

    source: Id
    target: Id
    serial: Count
    body: Routed


WireMessage = (
    Envelope
    | Hello
    | Bye
    | Lend
    | Mapped
    | Laid
    | Losses
    | Ping
    | Pong
    | Up
    | Down
    | Ready
    | Commit
    | Tensor
    | ManifestRequest
    | ManifestReply
    | ShardRequest
    | Shard
    | Have
    | ReplicationDone
    | NoSnapshot
    | DialBack
    | DialBackReply
    | ProbeRequest
    | Iperf3Ready
    | Probe
    | ProbeResult
)
