"""Pieces of a state from several sources: which of them fit together."""

import torch
import zmq
from torch import nn

from chaosnet.node.state import replica
from chaosnet.node.state.replica import Replica, digest
from chaosnet.node.state.training_state import TrainingState
from chaosnet.protocols.codec import decode
from chaosnet.protocols.effects import ReadManifest, ServeManifest, ServeShard, StoreShard
from chaosnet.protocols.events import ManifestKnown, Received, ShardBad, ShardStored, StateRejected
from chaosnet.protocols.messages import NoSnapshot

STEP = 7


class Source:
    """A node whose model has a cache that has grown to `rows`."""

    def __init__(self, rows):
        model = nn.Linear(2, 2)
        model.register_buffer("cache", torch.zeros(rows, 2), persistent=False)
        state = TrainingState(
            model, torch.optim.SGD(model.parameters(), 0.1), extra_state={"own": torch.ones(5)}
        )
        capture = state.begin_capture(STEP, {})
        capture.run()
        self.sent = []
        self.replica = Replica(lambda peer, head, body: self.sent.append((decode(head), bytes(body))))
        self.replica.snapshots[STEP] = self.snapshot = capture.wait()

    def manifest(self):
        assert self.replica.serve_manifest(ServeManifest("j", STEP))
        return self.sent.pop()

    def piece(self, start, stop):
        assert self.replica.serve_shard(ServeShard("j", STEP, start, stop))
        return self.sent.pop()


def joiner_of(source):
    joiner = Replica(lambda *sent: True)
    reply, body = source.manifest()
    told = joiner.read_manifest(ReadManifest("a", STEP, reply.digest, zmq.Frame(body)))
    assert isinstance(told, ManifestKnown)
    return joiner


def test_want_of_memory_for_the_state_is_not_the_sources_fault(monkeypatch):
    def full(manifest, places):
        raise MemoryError("60000000 bytes: Cannot allocate memory")

    monkeypatch.setattr(replica, "Arrival", full)
    source = Source(4)
    reply, body = source.manifest()
    told = Replica(lambda *sent: True).read_manifest(ReadManifest("a", STEP, reply.digest, zmq.Frame(body)))
    assert told == StateRejected("no memory here for its 0 MB: 60000000 bytes: Cannot allocate memory")


def store(joiner, name, message, body):
    effect = StoreShard(name, message.start, message.stop, message.digest, zmq.Frame(body))
    return joiner.store_shard(effect)


def test_pieces_of_states_that_are_laid_out_alike_fit_together():
    first, second = Source(4), Source(4)
    joiner, total = joiner_of(first), first.snapshot.manifest.total_bytes
    assert isinstance(store(joiner, "a", *first.piece(0, 16)), ShardStored)
    assert isinstance(store(joiner, "b", *second.piece(16, total)), ShardStored)
    assert joiner.arrival.complete


def test_a_source_whose_caches_have_grown_otherwise_is_left_out():
    joiner = joiner_of(Source(4))
    told = store(joiner, "b", *Source(16).piece(0, 16))
    assert told == Received("b", NoSnapshot(step=STEP))
    assert joiner.arrival.missing


def test_a_damaged_piece_is_asked_for_again():
    source = Source(4)
    message, body = source.piece(0, 16)
    assert isinstance(store(joiner_of(source), "a", message, bytes([body[0] ^ 1]) + body[1:]), ShardBad)
    assert message.digest.endswith(digest(body))


def test_a_source_without_a_copy_says_so():
    source = Source(4)
    source.replica.snapshots[STEP] = None
    assert not source.replica.serve_manifest(ServeManifest("j", STEP))
    assert not source.replica.serve_shard(ServeShard("j", STEP, 0, 16))
