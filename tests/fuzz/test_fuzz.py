"""A few thousand inputs of each fuzz target, with a fixed seed, and the corpus; `python tests/fuzz/run.py`: more."""

import itertools
import random

import cores
import pytest
import targets
from hostile import Hostile, as_received

from chaosnet.protocols import early, overlay, relay
from chaosnet.protocols import messages as m
from chaosnet.scheduler import changes, core, flushes, joins


@pytest.mark.parametrize("kind", ["frames", "state"])
def test_the_corpus_is_small_and_there(kind):
    files = list((targets.CORPUS / kind).iterdir())
    assert 0 < len(files) < 100
    assert sum(path.stat().st_size for path in files) < 500_000


@pytest.mark.parametrize(
    ("name", "inputs"), [("codec", 10_000), ("state", 3_000), ("texts", 3_000), ("core", 2_000)]
)
def test_no_input_does_harm(name, inputs):
    target = targets.TARGETS[name](random.Random(f"{name} test"))
    for _ in range(inputs):
        target.one()
    assert target.taken > inputs / 100, "hardly an input gets past the first check: the target tests nothing"


def test_no_frame_of_the_corpus_does_harm():
    codec = targets.Codec(random.Random(0))
    for frame in targets.frames():
        codec.check(frame)
    assert codec.taken >= 49 and sum(codec.refusals.counts.values()) > 40


def test_no_state_of_the_corpus_does_harm():
    state = targets.State(random.Random(0))
    for data in state.data:
        state.check(data)


@pytest.mark.realtime
def test_no_bytes_on_a_socket_keep_others_out():
    sockets = targets.Sockets(random.Random(0))
    for _ in range(3 * sockets.BATCH):
        sockets.one()
    assert sockets.taken > 50


# --- nothing grows with what peers make up ---

WORLD = cores.Scenes()
BOUND = 16  # Of what is remembered, in place of the thousands of a real node.
ROUNDS = 400
NAMING = [m.LinkNews, m.Farewell, m.Notice, m.Report, m.ScaleOutRequest, m.NeighborsReady, m.FlushOk, m.AbortRequest,
          m.VoteReply, m.VoteRequest, m.ConnectLinkRequest, m.DialBack, m.Probe, m.ShardRequest, m.Up, m.Ready,
          m.EchoReply, m.ScaleInRequest]  # fmt: skip


def grown(scene, kind, monkeypatch):
    """Elements that a node holds more after twice as many messages of nodes that there never were."""
    for module, name in ((overlay, "MAX_STRANGERS"), (relay, "MAX_SOURCES")):
        monkeypatch.setattr(module, name, BOUND)
    for module in (changes, core, flushes, joins):
        monkeypatch.setattr(module, "MAX_QUEUE", BOUND)
    monkeypatch.setattr(early, "EARLY_STEPS", 1)
    monkeypatch.setattr(early, "EARLY_COMMITS", (1, BOUND // 4))
    hostile, attacked = Hostile(random.Random(kind.__name__)), cores.Attacked(scene, random.Random(0))
    names = (f"made-up-{number}" for number in itertools.count())
    monkeypatch.setattr(hostile, "name", lambda: next(names))
    monkeypatch.setattr(hostile, "length", lambda depth: 1)
    sizes = []
    for _ in range(2):
        for _ in range(ROUNDS):
            hostile.near = attacked.near
            body = hostile.message(kind)
            message = as_received(cores.routed(hostile, body) if kind in cores.ROUTED else body)
            if message is not None:
                attacked.hear(message, None)
        sizes.append(cores.size_of(attacked.agent))
    return sizes[1] - sizes[0]


@pytest.mark.parametrize("kind", NAMING, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("what", ["founder and scheduler", "joiner, fetching"])
def test_made_up_names_do_not_stay(what, kind, monkeypatch):
    scene = next(scene for scene in WORLD.scenes if scene[0] == what)
    assert grown(scene, kind, monkeypatch) < ROUNDS / 2


def test_growth_would_be_noticed(monkeypatch):
    monkeypatch.setattr(overlay.Overlay, "_forget_strangers", lambda self: None)
    assert grown(WORLD.scenes[0], m.LinkNews, monkeypatch) > ROUNDS / 2
