"""Agents in every phase that a cluster brings about, taken out of a simulated one, and what peers say to them.

Effects that touch tensors and snapshots are performed by the classes that perform them in a node (all_reduce.py,
replica.py): what a hostile message makes the core ask for must be harmless there, too.
"""

import copy
import random
import time
from collections import deque

import msgspec
import numpy as np
import torch
import zmq
from hostile import LINK_LOCAL, NAMES, ROUTED, as_received

from chaosnet.node.agent.core import Agent, Phase
from chaosnet.node.state.flat_state import Entry, Manifest, Snapshot
from chaosnet.node.state.replica import Replica
from chaosnet.node.sums.all_reduce import AllReduce
from chaosnet.node.sums.compression import Exact
from chaosnet.protocols import effects as fx
from chaosnet.protocols import events as ev
from chaosnet.protocols import messages as m
from chaosnet.protocols.codec import encode
from chaosnet.protocols.errors import RemoteProtocolError
from chaosnet.simulator.cluster import SimCluster

CHUNKS, CHUNK = 3, 16
SLOW_S = 2.0  # For one message; of a busy machine.


class _Lane:
    op = "mean"


class _Chunk:
    lane = 0


class _Store:
    """Gradients of zeros."""

    lanes = (_Lane(),)
    chunks = (_Chunk(),) * CHUNKS
    stays = False

    def contribution(self, chunk):
        return torch.zeros(CHUNK)

    def encoding(self, chunk):
        return Exact(np.dtype(np.float32))


class Scenes:
    """Agents as a cluster of five and a joiner knew them, and real messages."""

    def __init__(self, seed=1):
        self.said = deque(maxlen=4000)
        self.scenes = []  # (what it is, agent, time)
        sim = SimCluster(seed, chunks=CHUNKS)
        sim.max_delay_s, sim.compute_s, sim.state_bytes, sim.retract_odds = 0.002, 0.05, 3 << 20, 0.0
        sim.max_bulk_delay_s = 0.1
        sim.on_message = lambda sender, receiver, message: self.said.append(message)
        sim.add("a")
        for name in "bcd":
            sim.add(name, seeds=["a"], degree=2)
            sim.run(sim.now_s + 2.0)
        self.take(sim, "founder and scheduler", "a")
        self.take(sim, "member", "b")
        self._joining(sim)
        sim.crash("a")
        for _ in range(6):
            sim.run(sim.now_s + 0.02)
            self.take(sim, "after the loss of the scheduler", "b")
        sim.run(sim.now_s + 2.0)
        self.take(sim, "member after a flush", "c")
        sim.pause("c", 10.0)
        sim.run(sim.now_s + 1.5)
        self.take(sim, "beside one that stands still", "d")
        outside = Agent("e", copy.deepcopy(sim.nodes["b"].agent.settings), random.Random(0))
        self.scenes.append(("outside", outside, sim.now_s))

    def _joining(self, sim):
        sim.add("e", seeds=["a", "b"], degree=2)
        seen = set()
        for _ in range(4000):
            sim.run(sim.now_s + 0.001)
            agent = sim.nodes["e"].agent
            state = agent.joiner.state
            if state not in seen:
                seen.add(state)
                self.take(sim, f"joiner, {state.value}", "e")
                self.take(sim, f"scheduler of a joiner, {state.value}", "a")
                self.take(sim, f"member beside a joiner, {state.value}", "b")
            if agent.phase is Phase.MEMBER:
                break

    def take(self, sim, what, name):
        self.scenes.append((what, copy.deepcopy(sim.nodes[name].agent), sim.now_s))


class Attacked:
    """One agent, and what would perform its effects."""

    def __init__(self, scene, rng):
        self.what, agent, self.now_s = scene
        self.agent = copy.deepcopy(agent)
        self.rng = rng
        self.sent = 0
        self.all_reduce = AllReduce(_Store(), self._send)
        self.replica = Replica(self._send)
        self.soon = deque()
        self.refused = 0
        for peer in ("stranger", "client"):
            self.tell(ev.PeerOpened(peer, "", client=peer == "client"))

    def _send(self, peer, header, payload=None, **how):
        self.sent += 1
        return True

    @property
    def near(self):
        """Numbers that mean something to it."""
        sync, view = self.agent.sync, self.agent.sync.view
        key = view.key if view else (0, 0)
        numbers = [
            sync.step - 1,
            sync.step,
            sync.step + 1,
            *key,
            key[0] + 1,
            key[1] + 1,
            self.agent.election.term,
        ]
        return [max(number, 0) for number in numbers]

    def peers(self):
        return sorted(self.agent.relay.peers)

    def hear(self, message, payload=None):
        """One message from one of its peers."""
        peers = self.peers()
        if isinstance(message, m.Up | m.Down):
            try:
                self.all_reduce.check(message, payload)
            except RemoteProtocolError:
                self.refused += 1
                return
        if peers:
            self.tell(ev.Received(self.rng.choice(peers), message, payload))

    def tell(self, event):
        """As the loop of a node does (loop.py)."""
        began_s = time.perf_counter()
        self.perform(self.agent.handle(event, self.now_s))
        while self.soon:
            self.perform(self.agent.handle(self.soon.popleft(), self.now_s))
        took_s = time.perf_counter() - began_s
        assert took_s < SLOW_S, f"{self.what}: {took_s:.1f} s for {str(event)[:300]}"
        wake_at_s = self.agent.wake_at_s
        assert wake_at_s is None or wake_at_s == wake_at_s, "a deadline that never comes"

    def tick(self):
        self.now_s += self.rng.choice((0.001, 0.05, 0.3, 1.0))
        self.tell(ev.Tick())

    def perform(self, effects):
        for effect in effects:
            if isinstance(effect, fx.ChunkEffect | fx.ResetAttempt):
                self.all_reduce.perform(effect)
                continue
            match effect:
                case fx.Transmit(_, message):
                    encode(message)
                case fx.StepCompleted(step):
                    self.all_reduce.completed(step)
                case fx.TakeSnapshot(step):
                    self.replica.snapshots[step] = snapshot(step)
                    self.soon.append(ev.SnapshotReady(step))
                case fx.DropSnapshot(step):
                    self.replica.snapshots.pop(step, None)
                case fx.ServeManifest():
                    self.replica.serve_manifest(effect)
                case fx.ServeShard():
                    self.replica.serve_shard(effect)
                case fx.ReadManifest():
                    self.soon.append(self.replica.read_manifest(effect))
                case fx.StoreShard():
                    self.soon.append(self.replica.store_shard(effect))
                case fx.StateWhole():
                    self.replica.arrived()
                case fx.DiscardState():
                    self.replica.arrival = None
                case fx.Misheard():
                    self.refused += 1
                case fx.Happened():
                    encode(m.Notice(kind=effect.kind, node=effect.node, detail=effect.detail, step=effect.step,
                                    time_s=0.0))  # fmt: skip


def snapshot(step):
    entries = (Entry("w", "float32", (8,), 0, 32), Entry("b", "uint8", (5,), 32, 37))
    return Snapshot(
        Manifest(entries, b"\x80", step),
        {0: torch.zeros(32, dtype=torch.uint8), 32: torch.zeros(5, dtype=torch.uint8)},
    )


def payload(rng):
    """What may come behind a header."""
    size = rng.choice((0, 1, 4 * CHUNK, 4 * CHUNK, 4 * CHUNK, 37, 1000))
    return None if size == 0 else zmq.Frame(bytes(size))


def hostile_message(rng, hostile, said):
    """Half made up, half what was really said, changed."""
    if rng.random() < 0.5:
        message = (
            hostile.message(*LINK_LOCAL) if rng.random() < 0.4 else routed(hostile, hostile.message(*ROUTED))
        )
    else:
        message = rng.choice(said)
        if isinstance(message, m.Envelope):
            message = routed(hostile, hostile.changed(message.body))
        else:
            message = hostile.changed(message)
    return as_received(message)


def routed(hostile, body):
    """In an envelope of its own: one that was here before would be dropped."""
    serial = hostile.rng.randrange(1 << 60)
    target = hostile.rng.choice((m.EVERYONE, *NAMES[:6]))
    return m.Envelope(source=hostile.name(), target=target, serial=serial, body=body)


def size_of(root):
    """How many elements all containers inside `root` have: what grows if something is kept."""
    seen, total, stack = set(), 0, [root]
    while stack:
        each = stack.pop()
        if (
            id(each) in seen
            or isinstance(each, (str, bytes, int, float, type, random.Random))
            or callable(each)
        ):
            continue
        seen.add(id(each))
        if isinstance(each, dict):
            total += len(each)
            stack += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple, set, frozenset, deque)):
            total += len(each)
            stack += each
        elif isinstance(each, msgspec.Struct):
            stack += [getattr(each, name) for name in each.__struct_fields__]
        else:
            names = [*getattr(each, "__dict__", {}), *getattr(type(each), "__slots__", ())]
            stack += [getattr(each, name) for name in names if hasattr(each, name)]
    return total
