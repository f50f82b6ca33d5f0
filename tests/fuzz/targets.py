"""What is fuzzed: every place where bytes or texts of others come in. One input is one call of `one`.

A target lets through what its place declares (MalformedMessage, ConfigError, ...) and raises for anything else.
"""

import asyncio
import os
import re
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import click
import cores
import zmq
from hostile import TEXTS, Hostile, tampered

from chaosnet.invite import Token
from chaosnet.node.endpoint import Endpoint
from chaosnet.node.state import plain
from chaosnet.node.state.flat_state import Entry, Manifest
from chaosnet.node.state.replica import Replica, digest
from chaosnet.node.transport.transport import Transport
from chaosnet.protocols import effects as fx
from chaosnet.protocols.codec import decode, encode
from chaosnet.protocols.errors import ConfigError, MalformedMessage, VersionMismatch
from chaosnet.protocols.messages import Hello
from chaosnet.settings.options import Address, Addresses, Name, PeerName
from chaosnet.settings.resolved import node_settings

FOLDER = Path(__file__).parent
WIRE = FOLDER.parent / "traces" / "wire"
CORPUS = FOLDER / "corpus"


def corpus(kind):
    """The inputs that are kept of a kind, in order."""
    return [path.read_bytes() for path in sorted((CORPUS / kind).glob("*.bin"))]


def frames():
    """One of each message as it goes over the wire, and the corpus in today's version of the protocol."""
    traces = [bytes.fromhex(path.read_text()) for path in sorted(WIRE.glob("*.hex"))]
    prefix = traces[0][:3]
    kept = [prefix + each[3:] if each.startswith(prefix[:2]) else each for each in corpus("frames")]
    return traces + kept


class Refusals:
    """By kind; `example` has an input of each."""

    def __init__(self):
        self.counts, self.example = Counter(), {}

    def add(self, data, reason):
        kind = re.sub(r"b?'[^']*'|`[^`]*`|[0-9]+|0x\w+|\[.*\]", "_", reason)[:60]
        self.counts[kind] += 1
        self.example.setdefault(kind, data)


class Codec:
    """Frames that were tampered with: refused, or a message whose own frame is read as the same."""

    kept = "frames"

    def __init__(self, rng):
        self.rng, self.frames = rng, frames()
        self.refusals = Refusals()
        self.taken = 0

    def one(self):
        self.check(tampered(self.rng, self.rng.choice(self.frames), self.frames))

    def check(self, frame):
        try:
            message = decode(frame)
        except (MalformedMessage, VersionMismatch) as error:
            self.refusals.add(frame, str(error))
            return
        self.taken += 1
        again = decode(encode(message))
        assert again == message or "nan" in repr(message)


class State:
    """The parsers of a training state that arrives: manifest, plain data, and the pieces that follow."""

    kept = "state"

    def __init__(self, rng):
        self.rng, self.refusals = rng, Refusals()
        rows = (Entry("w", "float32", (8,), 0, 32), Entry("b", "uint8", (5,), 32, 37))
        nested = {"a": (1, 2**80), "b": [None, 1.5, {1: b"x"}], "c": Counter(a=1)}
        data = plain.encode(nested, "nested")
        self.data = [Manifest(rows, data, 3).to_bytes(), data, *corpus("state")]
        self.taken = 0

    def one(self):
        self.check(tampered(self.rng, self.rng.choice(self.data), self.data))

    def check(self, data):
        for parse in (plain.decode, Manifest.from_bytes):
            try:
                parse(data)
                self.taken += 1
            except MalformedMessage as error:
                self.refusals.add(data, f"{parse.__qualname__}: {error}")
        if self.rng.random() < 0.05:
            self._arrive(data)

    def _arrive(self, data):
        replica = Replica(lambda *args, **how: True)
        replica.read_manifest(fx.ReadManifest("a", 3, digest(data), zmq.Frame(data)))
        for _ in range(4):
            piece = self.rng.randbytes(self.rng.choice((0, 1, 5, 37)))
            start = self.rng.choice((0, 1, 32, 36, 37, 1 << 40))
            layout = replica.arrival.manifest.layout if replica.arrival else bytes(8)
            shown = layout + digest(piece) if self.rng.random() < 0.8 else b""
            stop = start + len(piece)
            with suppress(MalformedMessage):
                replica.store_shard(
                    fx.StoreShard("a", start, stop, shown, zmq.Frame(piece) if piece else None)
                )


ODD = ["=", ",", "[", "]", ":", "-1", "1e9", "nan", "inf", "\u0663", "a=b:1", " ", "\n", "0", "65536", "*"]
PARTS = [*TEXTS, *ODD]
SETTINGS = ("JOIN", "LISTEN", "NAME", "NEIGHBORS", "LINKS", "JOIN_PATIENCE_S", "POLICY", "PROBE", "PEERS_AT")
OPTIONS = (Address(), Address(any_port=True), Addresses(), PeerName(), Name())


class Texts:
    """Settings, addresses and names as people and peers write them."""

    def __init__(self, rng):
        self.rng, self.taken = rng, 0

    def one(self):
        rng = self.rng
        text = "".join(rng.choice(PARTS) for _ in range(rng.choice((1, 1, 2, 3, 6))))
        if rng.random() < 0.2:
            text = "".join(
                chr(rng.choice((rng.randrange(1, 128), rng.randrange(1, 0xD800)))) for _ in range(9)
            )
        for parse in (Endpoint.parse, Token.parse):
            try:
                parse(text)
                self.taken += 1
            except ConfigError:
                pass
        self._settings(text)

    def _settings(self, text):
        variable = "CHAOSNET_" + self.rng.choice(SETTINGS)
        before = os.environ.get(variable)
        os.environ[variable] = text.replace("\0", "")
        try:
            node_settings()
            self.taken += 1
        except ConfigError:
            pass
        finally:
            if before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = before
        with suppress(click.BadParameter):
            self.rng.choice(OPTIONS).convert(text, None, None)


class Core:
    """Messages that have the right types and say anything, to an agent in any phase."""

    PER_SCENE = 60

    def __init__(self, rng):
        self.rng, self.hostile, self.world = rng, Hostile(rng), cores.Scenes()
        self.said = list(self.world.said)
        self.left = 0
        self.taken = 0

    def one(self):
        if self.left == 0:
            self.left = self.rng.randrange(1, self.PER_SCENE)
            self.attacked = cores.Attacked(self.rng.choice(self.world.scenes), self.rng)
        self.left -= 1
        self.hostile.near = self.attacked.near
        message = cores.hostile_message(self.rng, self.hostile, self.said)
        if message is None:
            return
        self.taken += 1
        self.attacked.hear(message, cores.payload(self.rng))
        if self.rng.random() < 0.1:
            self.attacked.tick()

    def check(self, frame):
        """A message of the corpus, to all scenes."""
        try:
            message = decode(frame)
        except (MalformedMessage, VersionMismatch):
            return
        for scene in self.world.scenes:
            attacked = cores.Attacked(scene, self.rng)
            attacked.hear(message, cores.payload(self.rng))
            attacked.tick()


LINKS = 4  # At once.


class Sockets:
    """A listening transport: first words, own words, control and bulk from raw sockets that say anything.

    Inputs go in batches; after each, an honest dialler must still be let in.
    """

    BATCH = 400

    def __init__(self, rng):
        self.rng, self.frames = rng, frames()
        self.queued, self.taken = 0, 0
        self.errors = []

    def one(self):
        self.queued += 1
        if self.queued == self.BATCH:
            self.queued = 0
            asyncio.run(self._batch())
            assert not self.errors, self.errors

    def finish(self):
        if self.queued:
            self.queued = self.BATCH - 1
            self.one()

    async def _batch(self):
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: self.errors.append(context))
        heard = _Heard()
        served = Transport("served", "127.0.0.1:0", heard)
        await served.start()
        with zmq.Context() as context, ExitStack() as stack:
            for _ in range(LINKS):
                suffix, hello = self.rng.randbytes(5), self._hello()
                for half in (b"c", b"b"):
                    socket = stack.enter_context(context.socket(zmq.DEALER))
                    socket.setsockopt(zmq.LINGER, 200)
                    socket.setsockopt(zmq.ROUTING_ID, (half if self.rng.random() < 0.95 else b"x") + suffix)
                    socket.connect(f"tcp://{served.address}")
                    for item in self._items(hello):
                        socket.send_multipart(item)
            for address in (self._address() for _ in range(4)):
                served.dial(address)
                served.check(address)
            await self._until_quiet(served, heard)
        self.taken += heard.items
        honest_heard = _Heard()
        honest = Transport("honest", "", honest_heard)
        await honest.start()
        honest.dial(served.address)
        deadline_s = time.monotonic() + 20
        while "served" not in honest_heard.peers:
            assert time.monotonic() < deadline_s, "an honest node is not let in any more"
            await asyncio.sleep(0.005)
        for each in (honest, served):
            each.close(0.2)

    async def _until_quiet(self, served, heard):
        """All that was sent has been heard or dropped."""
        before = None
        while before != (now := (heard.items, served.foreign.by_place.total())):
            before = now
            await asyncio.sleep(0.03)

    def _hello(self):
        rng = self.rng
        return encode(
            Hello(node=f"n{rng.randrange(3)}", address=self._address(), incarnation=str(rng.random()))
        )

    def _items(self, hello):
        """What one connection says: mostly a Hello first, then anything."""
        rng = self.rng
        items = [[b"", hello]] if rng.random() < 0.9 else []
        while len(items) < self.BATCH // (2 * LINKS):
            frame = tampered(rng, rng.choice((*self.frames, hello)), self.frames)
            items.append(rng.choice(([frame], [frame], [b"", frame], [frame, b"x" * 99], [b"", frame, frame], [b""],
                                     [frame] * 5)))  # fmt: skip
        return items

    def _address(self):
        rng = self.rng
        if rng.random() < 0.5:
            return "127.0.0.1:1"
        return "".join(rng.choice(PARTS) for _ in range(rng.randrange(1, 4)))[:255]


class _Heard:
    """A sink."""

    def __init__(self):
        self.items, self.peers = 0, set()

    def opened(self, peer, address, dialled, client, at):
        self.peers.add(peer)

    def control(self, peer, body):
        self.items += 1

    def bulk(self, peer, header, payload):
        self.items += 1

    def closed(self, peer, clean): ...

    def dial_failed(self, address, reason, final): ...

    def checked(self, address, peer, reason, at): ...

    def foreign(self, where, reason): ...


TARGETS = {"codec": Codec, "state": State, "texts": Texts, "core": Core, "sockets": Sockets}
