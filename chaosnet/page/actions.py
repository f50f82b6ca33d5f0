"""What the page may change in the cluster, where `chaosnet dashboard --allow-actions` says that it may.

A request counts only if all of this holds; else it is refused, and nothing is asked of the cluster:

    the server listens on loopback only, and the request names it so (server.py; else no page is served at all)
    it comes from this page: its Origin is where it was sent to
    it has the token, which is in the address that the command prints, after "#", so that no server logs it
    it is JSON of one of the types below
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .. import client, invite
from ..identity import is_loopback
from ..protocols.errors import ChaosnetError, ConfigError, PeerUnreachable
from ..protocols.messages import Answer
from ..protocols.status import MemberRow, Status
from .feed import Feed

TOKEN_BYTES = 24
MAX_BYTES = 4096  # Of a request.
INVITE_S = 600.0

Answered = TypeVar("Answered")


class Leave(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="leave"):
    """Have a node leave."""

    node: str


class ChangeLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="link"):
    """Open or close the link between two members."""

    a: str
    b: str
    connect: bool


class Invite(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="invite"):
    """Let one more node in, once, for ten minutes."""


Action = Leave | ChangeLink | Invite
_ACTION = msgspec.json.Decoder(Action)


class Refused(Exception):
    """With what HTTP calls the reason."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Actions:
    """Of one server. `token`: who has it may ask.

    Raises: ConfigError if the server listens on more than loopback.
    """

    def __init__(self, feed: Feed, host: str, what: str) -> None:
        if not is_loopback(host):
            raise ConfigError(
                f"{what}: {host!r} beside --allow-actions, which others could use there (expected a place of this "
                "machine alone, as 127.0.0.1)"
            )
        self._feed, self.token, self._turn = feed, secrets.token_urlsafe(TOKEN_BYTES), asyncio.Lock()

    async def handle(self, request: Request) -> Response:
        """The cluster's answer, or why there is none; also if the action was refused."""
        try:
            self._check(request)
            action = await _read(request)
            async with self._turn:  # Clients come one after the other, as from one terminal.
                code, (ok, text) = 200, await asyncio.to_thread(self._do, action)
        except Refused as refusal:
            code, ok, text = refusal.code, False, str(refusal)
        body = msgspec.json.encode({"ok": ok, "text": text})
        return Response(body, code, media_type="application/json", headers={"Cache-Control": "no-store"})

    def _check(self, request: Request) -> None:
        headers = request.headers
        if headers.get("origin") != f"http://{headers.get('host', '')}":
            raise Refused(403, f"from {headers.get('origin', 'nowhere')!r} (expected the page itself)")
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind != "Bearer" or not secrets.compare_digest(token.encode(), self.token.encode()):
            raise Refused(403, "the token is wrong (expected the address that the command has printed)")
        if headers.get("content-type", "").partition(";")[0] != "application/json":
            raise Refused(415, f"content of {headers.get('content-type', 'no type')!r} (expected JSON)")

    def _do(self, action: Action) -> tuple[bool, str]:
        status = self._feed.picture.status
        try:
            if status is None:
                raise ConfigError("the cluster has not answered yet (expected one that does)")
            if isinstance(action, Invite):
                anybody = [self._feed.address(), *_anybody(status)]
                return True, _of_first(anybody, lambda address: invite.make(address, INVITE_S))
            answer = (
                _of_first(_addresses(_member(status, action.node)), client.leave)
                if isinstance(action, Leave)
                else _change_link(status, action)
            )
        except ChaosnetError as error:
            return False, str(error)
        return answer.ok, answer.text


async def _read(request: Request) -> Action:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise Refused(413, f"more than {MAX_BYTES} bytes")
    try:
        return _ACTION.decode(body)
    except msgspec.DecodeError as error:
        raise Refused(400, f"no action: {error}") from None


def _member(status: Status, name: str) -> MemberRow:
    """Raises: ConfigError."""
    for row in status.active:
        if row.node == name:
            return row
    raise ConfigError(f"{name!r} is no member now (expected one that trains)")


def _addresses(row: MemberRow) -> tuple[str, ...]:
    """Where that member is asked. Raises: ConfigError."""
    if not row.addresses:
        raise ConfigError(f"{row.node} only dials, so nobody can ask it (expected a member that listens)")
    return row.addresses


def _anybody(status: Status) -> list[str]:
    """Where the cluster can be asked. Raises: ConfigError."""
    found = [address for row in status.active for address in row.addresses]
    if not found:
        raise ConfigError("no member can be asked: all only dial (expected one that listens)")
    return found


def _of_first(addresses: Iterable[str], question: Callable[[str], Answered]) -> Answered:
    """What the first says that answers: a member may listen where this machine does not reach it.

    Raises: as `question`; PeerUnreachable by the last one.
    """
    silent: PeerUnreachable | None = None
    for address in dict.fromkeys(filter(None, addresses)):
        try:
            return question(address)
        except PeerUnreachable as error:
            silent = error
    assert silent is not None
    raise silent


def _change_link(status: Status, action: ChangeLink) -> Answer:
    """Asked of an end that listens, which knows the other by its name."""
    ends = [_member(status, action.a), _member(status, action.b)]
    if action.a == action.b:
        raise ConfigError(f"a link from {action.a} to itself (expected two members)")
    asked, other = ends if ends[0].addresses else reversed(ends)
    return _of_first(
        _addresses(asked), lambda address: client.change_link(address, other.node, action.connect)
    )
