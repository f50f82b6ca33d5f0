"""Every message chaosnet puts on the wire; nothing else declares one.

Two kinds. *Link-local* messages go over one open link. *Routed* messages travel inside an `Envelope`
over the overlay, hop by hop, so two nodes can negotiate without a direct connection (relay.py).
Field types and bounds are checked by msgspec on arrival (codec.py); past it, code trusts them.

Who needs a message imports it from here; which module declares it is for the reader:

    fields.py      what fields may hold; the parent of all messages
    views.py       what the cluster agrees on: a part of many messages
    steps.py       one step of training
    links.py       links: handshake, liveness, news, requests
    probes.py      rates of links, measured
    joins.py       scale-out
    state.py       the state, on its way to a joiner
    tensors.py     tensors of layers, on their way from member to member
    lives.py       scale-in; who is gone
    succession.py  from one view to the next; election
    keys.py        whose keys may connect
    reports.py     how nodes are, what happened, answers to people
    wire.py        the unions of all of them, and the envelope
"""

from .fields import (
    EVERYONE,
    FASTEST,
    MAX_NAMES,
    MAX_NODES,
    MAX_TEXT,
    PROTOCOL_VERSION,
    Addresses,
    Bytes,
    Id,
    Link,
    Message,
    Range,
    ViewKey,
    link,
    shortened,
)
from .joins import (
    NegotiationPlan,
    NeighborsReady,
    ReplicationPlan,
    ScaleOutReady,
    ScaleOutRefused,
    ScaleOutRequest,
)
from .keys import MAX_KEYS, Introduction, KeyCommand, KeyringNews
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
from .probes import Iperf3Ready, LinkReading, Probe, ProbeRequest, ProbeResult, RateSource
from .reports import REFUSED, Answer, Lack, Notice, Report, StatusReply, StatusRequest
from .state import Have, ManifestReply, ManifestRequest, NoSnapshot, ReplicationDone, Shard, ShardRequest
from .steps import Commit, Contribution, Down, Ready, Side, Sides, Strike, Up
from .succession import AbortRequest, Flush, FlushOk, Install, Prepare, PrepareFailed, VoteReply, VoteRequest
from .tensors import MOST_DIMENSIONS, MOST_TENSORS, Row, Tensor
from .views import Deal, Electorate, Entering, Member, Tree, TreeChange, View, ViewChange
from .wire import Envelope, Routed, WireMessage
