"""An engine of one's own, as docs/extending.md says: no model and no optimizer, a vector that its members push."""

import queue
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from chaosnet.benchmarks.allreduce import Vector
from chaosnet.node.session import Hooks, Offer, Session
from chaosnet.node.state.flat_state import Manifest, Snapshot, as_bytes, lay_out, row_of
from chaosnet.node.state.plain import decode, encode
from chaosnet.protocols.messages import Contribution
from chaosnet.settings.groups import Cluster
from chaosnet.settings.resolved import node_settings

pytestmark = pytest.mark.realtime
ELEMENTS, CHUNK_BYTES, STEPS = 1000, 1024, 20  # Of two.


class Drift:
    """Agreed: `vector`, which moves by the mean of all members' pushes. Local: this node's push."""

    def __init__(self, session, push):
        self.session, self.push = session, push
        self.round = self.of_two = 0
        self.vector = torch.zeros(ELEMENTS)
        self.store = Vector(ELEMENTS, CHUNK_BYTES, own=torch.full((ELEMENTS,), push))

    def offer(self):
        spec = [["vector", ELEMENTS]]
        size, digest = self.vector.nbytes, f"drift of {ELEMENTS}"
        return Offer(digest, spec, len(self.store.chunks), (), size, size, (0, 0))

    def places(self):
        return {}

    def nothing_to_do(self, *told): ...

    founded = admitted = acts_in = loaded = entered = left_behind = rejoined = nothing_to_do

    def load(self, arrival):
        self.round = decode(arrival.manifest.plain)
        self.vector.copy_(arrival.tensors[0])

    def adopt(self, outcome):
        if outcome.results:  # Else nobody had samples.
            self.vector += torch.cat(outcome.results)
        self.of_two += outcome.commit.total.weight == 2.0
        self.round = outcome.step + 1
        if outcome.snapshot is not None:
            self.capture(outcome.snapshot.step)

    def capture(self, step):
        manifest = Manifest(
            tuple(lay_out([row_of("vector", self.vector)])), encode(self.round, "round"), step
        )
        self.session.serve_snapshot(step, Snapshot(manifest, {0: as_bytes(self.vector.clone()).numpy()}))

    def contribute(self, weight):
        self.session.contribute(range(len(self.store.chunks)), weight)
        return Contribution(weight=weight, shares={self.session.name: 0}, leaving=not weight)


def live(name, join, push, entered):
    """One member's life. Returns: its first step, and the vector at its end."""
    where = {"join": join} if join else {"new": True}
    cluster = Cluster(name=name, listen="127.0.0.1:0", **where)
    session = Session(node_settings(cluster), Hooks(say=lambda text: None))
    engine = Drift(session, push)
    session.open(engine)
    session.enter()
    joined = engine.round
    entered.put(session.loop.transport.address)
    while session.ended is None:
        if engine.of_two == STEPS:
            session.leave()
        outcome = session.step(engine.contribute(0.0 if session.leaving else 1.0))
        if outcome is not None:
            session.adopt(outcome)
        time.sleep(0.001)  # Work.
    session.stop()
    return joined, engine.vector


def test_two_sessions_in_a_process_train_with_an_engine_that_is_none_of_ours():
    entered = queue.SimpleQueue()
    with ThreadPoolExecutor() as threads:
        a = threads.submit(live, "a", "", 1.0, entered)
        b = threads.submit(live, "b", entered.get(timeout=20), 3.0, entered)
        (_, of_a), (joined, of_b) = a.result(timeout=40), b.result(timeout=40)
    assert joined > 0
    assert torch.equal(of_a, of_b)
    assert torch.equal(of_a, torch.full((ELEMENTS,), joined * 1.0 + STEPS * 2.0))
