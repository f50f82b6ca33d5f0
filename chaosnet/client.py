"""Ask a running cluster something: `chaosnet status`, `leave`, `link`, and the demo.

A client is no member. It opens a link to any one node, which passes the question on to the scheduler; the
answer comes back the same way. One question, one connection: so a client never has to notice an election.
`watch` asks again and again, and if one node falls silent, another.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import zmq

from .identity import completed, completed_peer, identity
from .node.keys import KeyPair
from .node.transport.shared_memory import Payload
from .node.transport.transport import Transport
from .protocols.codec import decode, encode
from .protocols.errors import MalformedMessage, PeerUnreachable, VersionMismatch
from .protocols.messages import (
    EVERYONE,
    FASTEST,
    Answer,
    ConnectLinkRequest,
    DisconnectLinkRequest,
    Envelope,
    GoOnCommand,
    KeyCommand,
    LeaveCommand,
    Ping,
    Pong,
    RelayoutCommand,
    Routed,
    StatusReply,
    StatusRequest,
)
from .protocols.status import Status, from_json
from .terminal.watching import Known

DEADLINE_S = 5.0
LINK_DEADLINE_S = 15.0  # A link changes between two steps of training, and a step may take seconds.
ASK_EVERY_S = 0.5  # An election loses questions; the scheduler takes a repeated one for the same.
RELAYOUT_DEADLINE_S = 60.0  # A step ends before others run.
LINGER_S = 0.2
WATCH_EVERY_S = 0.5
WATCH_DEADLINE_S = 2.0  # Then another node is asked.
WATCH_PATIENCE_S = 30.0  # An election among many, over slow links, is over by then.

Keys = KeyPair | Literal["user"] | None
"""Whose keys a client shows: these, those of this machine's user if there are any, or none."""
Question = Callable[[str, str], Routed]  # (id of the client, id of the node at the address) -> what to ask


def status(
    address: str,
    deadline_s: float = DEADLINE_S,
    keys: Keys = "user",
    history: bool = False,
    since: int = 0,
) -> Status:
    """The cluster as its scheduler sees it, asked through the node at `address`.

    Args:
        address: HOST:PORT of any member; KEY@HOST:PORT if it has another key than this user.
        deadline_s: The longest time to wait.
        keys: The keys to connect with; None: no key.
        history: Include all events and steps that the scheduler has kept.
        since: Leave out what came before this step.
    Raises: PeerUnreachable if nobody answers in time; VersionMismatch if the cluster's chaosnet has another schema of
        the status.
    """
    reply = ask(
        address,
        lambda me, node: StatusRequest(asker=me, history=history, since=since),
        deadline_s,
        keys=keys,
    )
    assert isinstance(reply, StatusReply)
    try:
        return from_json(reply.status)
    except (MalformedMessage, VersionMismatch) as error:
        raise type(error)(f"{address}: {error}") from None


def watch(
    address: str,
    every_s: float = WATCH_EVERY_S,
    patience_s: float = WATCH_PATIENCE_S,
    keys: Keys = "user",
    history: bool = False,
    on_silence: Callable[[PeerUnreachable], None] = lambda error: None,
    increments: bool = False,
) -> Iterator[Status]:
    """The cluster's status again and again: at once, then `every_s` after the last one was used. It never ends.

    It asks the node at `address`; if that dies or leaves, another member that is known from the status, and so on.

    Args:
        address: As of `status`.
        every_s: Time from one status to the next.
        patience_s: After the first answer: the longest time in which nobody at all answers.
        keys: As of `status`.
        history: As of `status`.
        on_silence: Called with what was wrong before another node is asked.
        increments: The whole history comes once; then only what is new since the last step of the status before.
    Raises: as `status` the first time; then PeerUnreachable once nobody has answered for `patience_s`.
    """
    keys = _own(keys)
    known = Known(completed(address, keys), patience_s)
    found = status(address, keys=keys, history=history)
    while True:
        known.answered(found)
        yield found
        last = found.steps[-1].step if increments and found.steps else 0
        cluster, found = found.cluster, _next(known, every_s, keys, history, last, on_silence)
        # Another one, at the same addresses: its steps have other numbers.
        if last and found.cluster != cluster:
            found = _next(known, 0.0, keys, history, 0, on_silence)


def _own(keys: Keys) -> KeyPair | None:
    return identity() if keys == "user" else keys


def _next(
    known: Known,
    every_s: float,
    keys: Keys,
    history: bool,
    since: int,
    on_silence: Callable[[PeerUnreachable], None],
) -> Status:
    while True:
        time.sleep(every_s)
        asked_s = time.monotonic()
        try:
            return status(known.addresses[0], WATCH_DEADLINE_S, keys, history, since)
        except PeerUnreachable as error:
            known.silent(error, asked_s, time.monotonic())
            on_silence(error)


def leave(address: str, deadline_s: float = DEADLINE_S) -> Answer:
    """Have the node at `address` leave, as if by Ctrl+C. Raises: PeerUnreachable if it does not answer in time."""
    return _command(address, lambda me, node: LeaveCommand(asker=me), deadline_s)


def go_on(address: str, deadline_s: float = DEADLINE_S) -> Answer:
    """Tell the node at `address`, which waits, that the members it cannot reach are dead. Raises: as `leave`."""
    return _command(address, lambda me, node: GoOnCommand(asker=me), deadline_s)


def relayout(address: str, layout: str, deadline_s: float = RELAYOUT_DEADLINE_S) -> Answer:
    """Have the cluster train in other pipelines ("2+2"), or in the fastest ("auto").

    Returns: once they run, and from which step; or why they cannot. Raises: as `leave`; ConfigError for no layout.
    """
    from .scheduler.elastic.running import lengths_of  # Planners are loaded for this only.

    if layout != FASTEST:
        lengths_of(layout)  # No node answers to what is too long for a message.
    return _command(address, lambda me, node: RelayoutCommand(asker=me, layout=layout), deadline_s)


def change_link(address: str, other: str, connect: bool, deadline_s: float = LINK_DEADLINE_S) -> Answer:
    """Open or close the link between the node at `address` and `other` (an id or address).

    Returns: once it is so, or why it cannot be. Raises: PeerUnreachable if no scheduler answers in time.
    """
    kind = ConnectLinkRequest if connect else DisconnectLinkRequest
    peer = completed_peer(other, identity())
    return _command(address, lambda me, node: kind(a=node, b=peer, asker=me), deadline_s, of_scheduler=True)


def command_key(
    address: str,
    verb: Literal["allow", "revoke", "invite"],
    key: str,
    seconds: float = 0.0,
    deadline_s: float = DEADLINE_S,
    keys: Keys = "user",
) -> Answer:
    """Have the node at `address`, and through it all others, allow, revoke or invite a key.

    `keys`: as of `status`. Raises: as `leave`.
    """
    return _command(
        address,
        lambda me, node: KeyCommand(verb=verb, key=key, seconds=seconds, asker=me),
        deadline_s,
        keys=keys,
    )


def _command(
    address: str, command: Question, deadline_s: float, of_scheduler: bool = False, keys: Keys = "user"
) -> Answer:
    reply = ask(address, command, deadline_s, of_scheduler, keys)
    assert isinstance(reply, Answer)
    return reply


def ask(
    address: str,
    question: Question,
    deadline_s: float = DEADLINE_S,
    of_scheduler: bool = True,
    keys: Keys = "user",
    name: str = "",
) -> Answer | StatusReply:
    """Put a question to the scheduler, or to the node at `address` itself, and wait for the reply.

    `keys`: whose to show; None: none. An address without a key has the same.
    Raises: PeerUnreachable if nobody answers there, or no scheduler answers in time.
    """
    keys = _own(keys)
    me = name or f"cli-{secrets.token_hex(4)}"
    asking = _Asking(completed(address, keys), question, of_scheduler, me, keys)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(asking.run(deadline_s))
    with ThreadPoolExecutor(1) as other:  # As in a notebook: this thread has a loop already.
        return other.submit(lambda: asyncio.run(asking.run(deadline_s))).result()


class _Asking:
    """One question; also the sink of the transport it goes through."""

    def __init__(
        self, address: str, question: Question, of_scheduler: bool, me: str, keys: KeyPair | None
    ) -> None:
        self.address, self.question, self.of_scheduler = address, question, of_scheduler
        self.me, self.keys = me, keys
        self.node = ""  # At the address, once the link is open.
        self.serial = 0

    async def run(self, deadline_s: float) -> Answer | StatusReply:
        self.reply: asyncio.Future[Answer | StatusReply] = asyncio.get_running_loop().create_future()
        self.transport = Transport(self.me, "", self, client=True, dial_timeout_s=deadline_s, keys=self.keys)
        await self.transport.start()
        repeating = asyncio.create_task(self._repeat())
        try:
            self.transport.dial(self.address)
            return await asyncio.wait_for(self.reply, deadline_s)
        except TimeoutError:
            raise PeerUnreachable(self._silence(deadline_s)) from None
        finally:
            repeating.cancel()
            self.transport.close(LINGER_S)

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            self._ask()

    def _ask(self) -> None:
        if not self.node:
            return
        self.serial += 1
        target = EVERYONE if self.of_scheduler else self.node
        body = self.question(self.me, self.node)
        envelope = Envelope(source=self.me, target=target, serial=self.serial, body=body)
        self.transport.send(self.node, encode(envelope))

    def _silence(self, deadline_s: float) -> str:
        if not self.node:
            return f"{self.address}: nobody answers (nothing in {deadline_s:g} s)"
        if not self.of_scheduler:
            return f"{self.address}: {self.node} does not answer (nothing in {deadline_s:g} s)"
        return (
            f"{self.address}: {self.node} is there, but no scheduler answers (nothing in {deadline_s:g} s; "
            "perhaps most members are out of reach, or training is paused)"
        )

    def _fail(self, reason: str) -> None:
        if not self.reply.done():
            self.reply.set_exception(PeerUnreachable(f"{self.address}: {reason}"))

    # --- the transport's sink ---

    def opened(self, peer: str, address: str, dialled: bool, client: bool, at: str) -> None:
        self.node = peer
        self._ask()

    def closed(self, peer: str, clean: bool) -> None:
        self._fail(f"{peer} {'closed the connection' if clean else 'died'} before an answer came")

    def checked(self, address: str, peer: str, reason: str, at: str) -> None:
        pass  # A client checks nothing.

    def dial_failed(self, address: str, reason: str, final: bool) -> None:
        self._fail(f"nobody answers ({reason})")

    def control(self, peer: str, body: bytes) -> None:
        try:
            message = decode(body)
        except (MalformedMessage, VersionMismatch) as error:
            self._fail(str(error))
            return
        match message:
            case Ping(sent_s=sent_s):
                self.transport.send(peer, encode(Pong(sent_s=sent_s)))
            case Envelope(target=self.me, body=(Answer() | StatusReply()) as reply) if not self.reply.done():
                self.reply.set_result(reply)

    def bulk(self, peer: str, header: bytes, payload: zmq.Frame | Payload | None) -> None:
        """Nobody sends bulk to a client."""

    def foreign(self, where: str, reason: str) -> None:
        """Counted by the transport."""
