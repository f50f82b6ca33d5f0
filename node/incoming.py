"""What a transport brings, as events for the core."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import zmq

from ..protocols import events as ev
from ..protocols.codec import decode
from ..protocols.errors import MalformedMessage
from ..protocols.messages import EVERYONE, Down, Envelope, Notice, Up
from .agent.core import Agent
from .agent.node import Phase
from .link_tests import LinkTests
from .sums.all_reduce import AllReduce
from .transport.shared_memory import Payload

log = logging.getLogger("chaosnet")


class Incoming:
    """The sink of a node's transport (turns.Sink), whose events are for the agent of the life under way.

    Args:
        handle: Hands an event to the core.
        catching: Calls something that may raise an error over what has come.
        on_notice: Of notices that were sent to all.
        counters: Of what was dropped.
    """

    def __init__(
        self,
        handle: Callable[[ev.Event], None],
        catching: Callable[[Callable[[], None]], None],
        on_notice: Callable[[Notice], None],
        counters: Counter[str],
    ) -> None:
        self._handle, self._catching, self._on_notice, self._counters = handle, catching, on_notice, counters
        self._agent: Agent
        self._all_reduce: AllReduce
        self._tests: LinkTests

    def begin_life(self, agent: Agent, all_reduce: AllReduce, tests: LinkTests) -> None:
        """From now on events are for this agent."""
        self._agent, self._all_reduce, self._tests = agent, all_reduce, tests

    def opened(self, peer: str, address: str, dialled: bool, client: bool, at: str) -> None:
        self._tell(ev.PeerOpened(peer, address, client, dialled, at))

    def closed(self, peer: str, clean: bool) -> None:
        self._tell(ev.PeerClosed(peer, clean))

    def dial_failed(self, address: str, reason: str, final: bool) -> None:
        self._tell(ev.DialFailed(address, reason, final))

    def checked(self, address: str, peer: str, reason: str, at: str) -> None:
        if peer:
            self._tell(ev.Reached(address, peer, at))
        else:
            self._tests.look(address, reason)

    def control(self, peer: str, body: bytes) -> None:
        self._catching(lambda: self._receive(peer, body, None))

    def bulk(self, peer: str, header: bytes, payload: zmq.Frame | Payload | None) -> None:
        self._catching(lambda: self._receive(peer, header, payload))

    def foreign(self, where: str, reason: str) -> None:
        self._counters["foreign"] += 1

    def _tell(self, event: ev.Event) -> None:
        self._catching(lambda: self._handle(event))

    def _receive(self, peer: str, body: bytes, payload: zmq.Frame | Payload | None) -> None:
        try:
            message = decode(body)
        except MalformedMessage as error:
            self._counters["malformed"] += 1
            if self._counters["malformed"] == 1:
                log.warning("dropped a malformed frame from %s: %s", peer, error)
            return
        if isinstance(message, Envelope):
            self._overhear(message)
        if payload is not None and not payload.buffer.nbytes:
            payload = None
        if isinstance(message, Up | Down):
            self._all_reduce.check(message, payload)
        self._handle(ev.Received(peer, message, payload))

    def _overhear(self, envelope: Envelope) -> None:
        """Show notices to all to people here, too.

        Not after leaving: then each copy of a notice would pass for new.
        """
        notice, agent = envelope.body, self._agent
        if not isinstance(notice, Notice) or envelope.target != EVERYONE or agent.phase is Phase.OUT:
            return
        if agent.relay.is_new(envelope):
            self._on_notice(notice)
