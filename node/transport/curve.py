"""CURVE on the transport's sockets, and ZAP: libzmq asks us whether a key may connect.

ZAP (rfc.zeromq.org/spec/27) is a request from libzmq's I/O thread to a REP socket of ours in the same context, once
per handshake. It is read on the transport's own loop, where the keyring may be. Turned down: pyzmq's authenticators,
which need `zmq.asyncio` or a thread of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

from ...protocols.keyring import Keyring, KeyVerdict
from .. import clock
from ..keys import KeyPair, key_bytes, key_text

ZAP_PLACE = "inproc://zeromq.zap.01"
# The dialer learns nothing but the code, which tells it which of two mistakes to name.
ACCEPTED, UNKNOWN, SPENT = b"200", b"400", b"500"
CODES = {
    KeyVerdict.MEMBER: ACCEPTED,
    KeyVerdict.INVITED: ACCEPTED,
    KeyVerdict.USED: SPENT,
    KeyVerdict.EXPIRED: SPENT,
}

MALFORMED = "malformed, oversized or without a Hello"

# libzmq's codes for handshakes that failed (zmq.h).
_CRYPTOGRAPHIC, _MECHANISMS_DIFFER = 0x11000001, 0x11000002


def serve(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    """Let only holders of keys connect to `socket`."""
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)


def dial(socket: zmq.Socket[bytes], keys: KeyPair, server: str) -> None:
    """Let `socket` connect, with `keys`, to the holder of the key `server` and nobody else."""
    socket.set(zmq.CURVE_SERVERKEY, key_bytes(server))
    socket.set(zmq.CURVE_PUBLICKEY, key_bytes(keys.public))
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)


class Zap:
    """Answers libzmq by `keyring`. `refused` is called for every no, with the host of the connection and why."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keyring: Keyring,
        refused: Callable[[str, KeyVerdict], None],
    ) -> None:
        self.keyring, self.refused = keyring, refused
        self.socket = context.socket(zmq.REP)
        self.socket.bind(ZAP_PLACE)

    def read(self) -> None:
        """Answer all that is asked; to be called whenever the socket's descriptor says so."""
        while int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            version, request, _, host, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            key = key_text(credentials[0]) if mechanism == b"CURVE" and credentials else ""
            verdict = self.keyring.verdict(key, clock.now_s())
            code = CODES.get(verdict, UNKNOWN)
            self.socket.send_multipart([version, request, code, b"", key.encode(), b""], zmq.NOBLOCK)
            if code != ACCEPTED:
                self.refused(host.decode(errors="replace"), verdict)

    def close(self) -> None:
        self.socket.close(0)


def why_dial_failed(event: int, value: int, keyed: bool) -> str:
    """What a failed handshake means to who dialled, from its monitor's event; "" if nothing more than an end."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        if value == int(SPENT):
            return "it refuses the invite, which was used already or has expired"
        return (
            "it does not know this node's key, or has revoked it (chaosnet allow, or an invite, lets it in)"
        )
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISMS_DIFFER:
        return (
            "it uses no keys (--insecure does without them here, too)"
            if keyed
            else "it wants to see a key (chaosnet keygen makes one), or is no chaosnet node"
        )
    # Of two ends that do not fit, the first to notice hangs up, and the other may not learn why.
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and keyed:
        return "it does not hold the key of this address, uses no keys, or takes no more connections now"
    return ""


def why_refused(event: int, value: int, keyed: bool) -> str:
    """What a failed handshake means to who listens: a short reason that refusals are counted by."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISMS_DIFFER:
        return "no key" if keyed else "a key where none is used"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _CRYPTOGRAPHIC:
        return "looked for another key"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return MALFORMED
    return "hung up or silent"
