"""`chaosnet.protocols.replication`: who is asked for which bytes next."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosnet.errors import RemoteProtocolError
from chaosnet.protocols import replication
from chaosnet.protocols.effects import DiscardState, Measured, ReadManifest, StateWhole, StoreShard, Transmit
from chaosnet.protocols.events import (
    ManifestBad,
    ManifestKnown,
    PeerClosed,
    Received,
    ShardBad,
    ShardStored,
    Tick,
)
from chaosnet.protocols.messages import (
    Have,
    ManifestReply,
    ManifestRequest,
    NoSnapshot,
    ReplicationDone,
    Shard,
    ShardRequest,
)
from chaosnet.protocols.replication import (
    FELLOWS_PATIENCE_S,
    MANIFEST_PATIENCE_S,
    SAMPLES,
    WINDOW,
    Replication,
)

STEP = 7
PIECE = replication.MAX_PIECE_BYTES


def start(shards_by_source, shard_bytes=PIECE):
    pull = Replication(STEP, shard_bytes, shards_by_source)
    return pull, pull.start(0.0)


def with_manifest(shards_by_source, total_bytes, shard_bytes=PIECE):
    pull, _ = start(shards_by_source, shard_bytes)
    return pull, pull.handle(ManifestKnown(STEP, total_bytes), 0.0)


def asked(effects):
    """(source, start, stop) of each request for bytes."""
    return [
        (effect.peer, effect.message.start, effect.message.stop)
        for effect in effects
        if isinstance(effect, Transmit) and isinstance(effect.message, ShardRequest)
    ]


def stores(effects):
    return any(isinstance(effect, StoreShard) for effect in effects)


def shard(start, stop):
    return Shard(step=STEP, start=start, stop=stop, digest=b"")


def test_the_manifest_comes_first_and_from_one_source():
    _, effects = start({"a": 1, "b": 1})
    assert effects == [Transmit("a", ManifestRequest(step=STEP))]


def test_another_source_is_asked_for_a_manifest_that_does_not_come():
    pull, _ = start({"a": 1, "b": 1})
    assert pull.handle(Tick(), MANIFEST_PATIENCE_S - 0.1) == []
    assert pull.handle(Tick(), MANIFEST_PATIENCE_S) == [Transmit("b", ManifestRequest(step=STEP))]
    assert pull.handle(Tick(), 2 * MANIFEST_PATIENCE_S) == [Transmit("a", ManifestRequest(step=STEP))]


def test_a_manifest_of_another_step_is_ignored():
    pull, _ = start({"a": 1})
    assert pull.handle(Received("a", ManifestReply(step=STEP + 1, digest=b""), b"x"), 0.0) == []
    assert pull.handle(Received("a", ManifestReply(step=STEP, digest=b"d"), b"x"), 0.0) == [
        ReadManifest("a", STEP, b"d", b"x")
    ]


def test_while_one_manifest_is_read_no_other_is():
    """A joiner that was held up finds those of two sources. What came would be laid out as the last of them."""
    pull, _ = start({"a": 1, "b": 1})
    pull.handle(Tick(), MANIFEST_PATIENCE_S)
    replies = [Received(name, ManifestReply(step=STEP, digest=b"d"), b"x") for name in "ab"]
    assert [pull.handle(each, MANIFEST_PATIENCE_S) for each in replies] == [
        [ReadManifest("a", STEP, b"d", b"x")],
        [],
    ]
    assert pull.handle(ManifestBad("a", "damaged"), MANIFEST_PATIENCE_S) == [
        Transmit("b", ManifestRequest(step=STEP))
    ]
    assert pull.handle(replies[1], MANIFEST_PATIENCE_S) == [ReadManifest("b", STEP, b"d", b"x")]


def test_a_source_with_an_unusable_manifest_is_dropped_for_another():
    pull, _ = start({"a": 1, "b": 1})
    assert pull.handle(ManifestBad("a", "damaged"), 0.0) == [Transmit("b", ManifestRequest(step=STEP))]
    assert pull.handle(ManifestBad("b", "damaged"), 0.0) == [DiscardState()]
    assert "b: its manifest is unusable: damaged" in pull.failed


def test_sources_are_asked_in_proportion_to_the_plan_and_within_a_window():
    _, effects = with_manifest({"a": 16, "b": 8}, 24 * PIECE)
    by_source = {name: [each for each in asked(effects) if each[0] == name] for name in "ab"}
    assert [len(each) for each in by_source.values()] == [WINDOW, WINDOW]
    assert by_source["a"][0][1] == 0
    assert by_source["b"][0][1] == 16 * PIECE


def test_without_stealing_a_plan_is_carried_out_as_it_is_but_for_what_a_source_that_is_gone_owes():
    pull = Replication(STEP, PIECE, {"a": 2, "b": 14}, steals=False)
    pull.start(0.0)
    first = asked(pull.handle(ManifestKnown(STEP, 16 * PIECE), 0.0))
    for source, begin, end in first:
        if source == "a":
            assert not asked(pull.handle(ShardStored(source, begin, end), 0.1))
    due = asked(pull.handle(PeerClosed("b", clean=False), 0.2))
    while due:
        source, begin, end = due.pop()
        assert source == "a"
        due += asked(pull.handle(ShardStored(source, begin, end), 0.3))
    assert pull.whole


def test_without_stealing_a_damaged_piece_is_asked_for_again():
    pull = Replication(STEP, PIECE, {"a": 1}, steals=False)
    pull.start(0.0)
    [(source, begin, end)] = asked(pull.handle(ManifestKnown(STEP, 1000), 0.0))
    assert asked(pull.handle(ShardBad(source, begin, end), 0.1)) == [(source, begin, end)]


def test_a_source_is_asked_for_more_when_it_delivers():
    pull, effects = with_manifest({"a": 16}, 16 * PIECE)
    source, begin, end = asked(effects)[0]
    assert pull.handle(Received(source, shard(begin, end), b"..."), 0.1) == [
        StoreShard(source, begin, end, b"", b"...")
    ]
    assert len(asked(pull.handle(ShardStored(source, begin, end), 0.1))) == 1


def test_bytes_that_nobody_asked_for_are_the_peers_mistake():
    pull, _ = with_manifest({"a": 16, "b": 0}, 16 * PIECE)
    with pytest.raises(RemoteProtocolError, match="nobody asked for"):
        pull.handle(Received("b", shard(5, 6), b"..."), 0.1)


def test_a_second_copy_is_dropped():
    pull, effects = with_manifest({"a": 16}, 16 * PIECE)
    source, begin, end = asked(effects)[0]
    pull.handle(ShardStored(source, begin, end), 0.1)
    assert pull.handle(Received(source, shard(begin, end), b"..."), 0.2) == []


@pytest.mark.parametrize(
    "late",
    [
        ManifestKnown(STEP, 4 * PIECE, 1),
        ManifestBad("a", "damaged", 1),
        ShardStored("a", 0, PIECE, 1),
        ShardBad("a", 0, PIECE, 1),
    ],
    ids=lambda late: type(late).__name__,
)
def test_what_was_stored_for_the_attempt_before_counts_no_more(late):
    pull = Replication(STEP, PIECE, {"a": 1}, attempt=2)
    pull.start(0.0)
    for manifest_is_known in (False, True):
        if manifest_is_known:
            pull.handle(ManifestKnown(STEP, 4 * PIECE, 2), 0.1)
        assert pull.handle(late, 0.2) == []
        assert (pull.stored_bytes, pull.failed) == (0, "")
        assert (pull.total_bytes is not None) == manifest_is_known
        pull.check_invariants()


def test_a_source_that_runs_dry_takes_over_what_the_slowest_would_send_last():
    pull, effects = with_manifest({"fast": 3, "slow": 29}, 32 * PIECE)
    for source, begin, end in asked(effects):
        if source == "fast":
            pull.handle(ShardStored(source, begin, end), 0.1)
    assert [*pull.sources["fast"].under_way] == [31, 30, 29]
    pull.check_invariants()


def test_the_last_piece_is_asked_of_an_idle_source_too():
    pull, _ = with_manifest({"a": 1, "b": 0}, 100)
    owed = [piece for source in pull.sources.values() for piece in source.under_way]
    assert len(owed) == 2 * len(set(owed))


def test_a_dead_sources_rest_goes_to_the_others():
    pull, _ = with_manifest({"a": 8, "b": 8}, 16 * PIECE)
    pull.handle(PeerClosed("a", clean=False), 0.5)
    pull.check_invariants()
    drain(pull, random.Random(0))
    assert pull.whole


def test_what_a_dropped_source_had_sent_before_is_not_asked_for_again():
    """Seed 2169729: what came of that was dropped, as it was here, and held its place in the window for ever."""
    pull, effects = with_manifest({"a": 8, "b": 8}, 16 * PIECE)
    sent = [(start, stop) for source, start, stop in asked(effects) if source == "a"]
    pull.handle(PeerClosed("a", clean=False), 0.2)
    for begin, end in sent:
        pull.handle(ShardStored("a", begin, end), 0.3)
        pull.check_invariants()
    drain(pull, random.Random(0))
    assert pull.whole


def test_a_second_copy_that_is_damaged_is_not_asked_for_again():
    pull, effects = with_manifest({"a": 1, "b": 0}, 1)
    assert asked(effects) == [("a", 0, 1), ("b", 0, 1)]  # Of whoever has nothing else to do, too.
    pull.total_bytes = 2  # As if there were more to come.
    pull.handle(ShardStored("a", 0, 1), 0.2)
    assert pull.handle(ShardBad("b", 0, 1), 0.3) == []
    assert 0 not in pull.sources["a"].rest


def test_with_the_last_source_gone_it_fails():
    pull, _ = with_manifest({"a": 8}, 16 * PIECE)
    assert pull.handle(PeerClosed("a", clean=False), 0.5) == [DiscardState()]
    assert pull.failed == "no neighbour is left to pull the state from (the last was a: it is gone)"


def test_a_damaged_piece_is_asked_of_somebody_else():
    pull, effects = with_manifest({"a": 8, "b": 8}, 16 * PIECE)
    source, begin, end = asked(effects)[0]
    other = {"a": "b", "b": "a"}[source]
    pull.handle(ShardBad(source, begin, end), 0.1)
    assert pull.sources[other].rest[0] == begin // pull.piece_bytes
    pull.check_invariants()


def test_an_empty_state_is_whole_at_once():
    _, effects = with_manifest({"a": 1}, 0)
    assert effects == [Transmit("a", ReplicationDone(step=STEP)), StateWhole(STEP)]


def under_way(pull):
    """(source, range) of what is asked for."""
    return [(name, pull._range(piece)) for name, source in pull.sources.items() for piece in source.under_way]


def drain(pull, rng, bad=0.0, deaths=()):
    """Deliver what is asked for, in any order, until nothing is under way."""
    deaths, stored_late = list(deaths), []
    for turn in range(10_000):
        owed = under_way(pull)
        if not owed or pull.whole:
            return
        if deaths and turn % 5 == 4 and len(pull.sources) > 1:
            dead = deaths.pop()
            stored_late += [each for each in owed if each[0] == dead and rng.random() < 0.5]
            pull.handle(PeerClosed(dead, clean=False), 1.0)
            continue
        late = stored_late and rng.random() < 0.5
        name, (begin, end) = stored_late.pop() if late else rng.choice(owed)
        if not late and not stores(pull.handle(Received(name, shard(begin, end), b""), 1.0)):
            continue
        event = ShardBad(name, begin, end) if rng.random() < bad else ShardStored(name, begin, end)
        pull.handle(event, 1.0)
        pull.check_invariants()
    raise AssertionError("it does not end")


@given(
    seed=st.integers(0, 1 << 32),
    shards=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    total=st.integers(1, 40 * PIECE),
    deaths=st.integers(0, 4),
)
def test_every_byte_arrives_once_whatever_is_slow_damaged_or_dies(seed, shards, total, deaths):
    rng = random.Random(seed)
    names = [f"n{index}" for index in range(len(shards))]
    pull, _ = with_manifest(dict(zip(names, shards, strict=True)), total)
    drain(pull, rng, bad=0.2, deaths=rng.sample(names, min(deaths, len(names) - 1)))
    assert pull.whole
    assert pull.stored_bytes == total


def test_a_source_without_a_copy_is_left_out():
    pull, _ = start({"a": 1, "b": 1})
    assert pull.handle(Received("a", NoSnapshot(step=STEP)), 0.0) == [
        Transmit("b", ManifestRequest(step=STEP))
    ]
    pull.handle(Received("b", NoSnapshot(step=STEP)), 0.0)
    assert pull.failed == (
        "no neighbour is left to pull the state from (the last was b: it has no copy of the state)"
    )


def test_what_comes_in_from_a_backlogged_source_tells_the_rate_of_its_link():
    pull, effects = with_manifest({"a": 8}, 8 * PIECE)
    now_s, measured, wanted = 0.0, [], asked(effects)
    while wanted:
        source, start, stop = wanted.pop(0)
        now_s += 0.1
        effects = pull.handle(Received(source, shard(start, stop), b""), now_s)
        measured += [effect for effect in effects if isinstance(effect, Measured)]
        wanted += asked(pull.handle(ShardStored(source, start, stop), now_s))
    assert [each.rate_bps for each in measured] == [pytest.approx(8 * pull.piece_bytes / 0.1)] * len(measured)
    assert len(measured) == 16 - SAMPLES[0]  # The first piece only starts the clock.


def test_a_source_that_may_have_waited_for_us_tells_nothing_of_its_link():
    pull, effects = with_manifest({"a": 1, "b": 1}, 2 * PIECE)
    found = []
    for number, (source, start, stop) in enumerate(asked(effects)):
        found += pull.handle(Received(source, shard(start, stop), b""), float(number))
        found += pull.handle(ShardStored(source, start, stop), float(number))
    assert not [effect for effect in found if isinstance(effect, Measured)]


# --- nodes that join together ---


class Swarm:
    """Joiners that pull the same state at once; `links`: between them and to the source, by pieces a turn."""

    def __init__(self, links, total=64 * PIECE, source="s"):
        self.links = {frozenset(ends): rate for ends, rate in links.items()}
        names = sorted({end for ends in links for end in ends} - {source})
        self.around = {
            name: {end for ends in links if name in ends for end in ends} - {name} for name in names
        }
        self.pulls, self.sent = {}, dict.fromkeys(self.links, 0)
        self.queues = {}
        for turn, name in enumerate(names):
            sources = {source: 1} if source in self.around[name] else {}
            fellows = self.around[name] - {source}
            self.pulls[name] = Replication(STEP, total, sources, 0, fellows, (turn, len(names)))
        self.do([(name, pull.start(0.0)) for name, pull in self.pulls.items()])
        for name in names:
            self.do([(name, self.pulls[name].handle(ManifestKnown(STEP, total), 0.0))])

    def do(self, told):
        """Requests wait for the link; news travel at once."""
        while told:
            name, effects = told.pop()
            for effect in effects:
                if isinstance(effect, Transmit) and isinstance(effect.message, ShardRequest):
                    where = effect.message.start, effect.message.stop
                    self.queues.setdefault((effect.peer, name), []).append(where)
                elif isinstance(effect, Transmit) and effect.peer in self.pulls:
                    event = Received(name, effect.message)
                    told.append((effect.peer, self.pulls[effect.peer].handle(event, 0.0)))

    def turns(self, most=1000):
        """Deliver what links carry, until all have all. Returns: how many turns that took."""
        for turn in range(1, most):
            ready = {pair: queue[: self.links[frozenset(pair)]] for pair, queue in self.queues.items()}
            for (source, name), pieces in ready.items():
                del self.queues[source, name][: len(pieces)]
                for where in pieces:
                    pull = self.pulls[name]
                    if source in self.pulls:
                        assert where[0] // pull.piece_bytes in self.pulls[source]._stored, (
                            "it did not have that"
                        )
                    self.sent[frozenset((source, name))] += 1
                    if stores(pull.handle(Received(source, shard(*where), b""), 0.0)):
                        self.do([(name, pull.handle(ShardStored(source, *where), 0.0))])
                    pull.check_invariants()
            if all(pull.whole for pull in self.pulls.values()):
                return turn
        raise AssertionError("it does not end")


def test_two_that_join_together_share_what_comes_over_two_slow_links():
    swarm = Swarm({("a", "s"): 1, ("b", "s"): 1, ("a", "b"): 3})
    assert swarm.turns() <= 64 / 2 + 6, "alone each would take 64"
    assert swarm.sent[frozenset(("a", "s"))] <= 64 / 2 + 4


def test_who_has_no_link_to_a_member_gets_the_state_through_those_that_join_with_it():
    swarm = Swarm({("a", "s"): 3, ("a", "b"): 3, ("b", "c"): 3})
    assert swarm.turns() <= 64 / 3 + 10, "pieces are passed on as they come"


def test_who_has_only_fellows_gives_up_when_they_have_nothing_new_for_long():
    pull = Replication(STEP, PIECE, {}, 0, ["b"])
    assert pull.start(0.0) == [Transmit("b", Have(step=STEP)), Transmit("b", ManifestRequest(step=STEP))]
    assert pull.handle(ManifestKnown(STEP, 16 * PIECE), 1.0) == []
    assert len(asked(pull.handle(Received("b", Have(step=STEP, pieces=b"\x01")), 2.0))) == 1
    pull.handle(ShardStored("b", 0, pull.piece_bytes), 3.0)
    assert pull.handle(Tick(), 3.0 + FELLOWS_PATIENCE_S - 0.1) == []
    assert pull.handle(Tick(), 3.0 + FELLOWS_PATIENCE_S) == [DiscardState()]
    assert pull.failed == "who joins with it has had no more of the state for 10 s"


def test_fellows_are_told_what_is_here_and_that_all_is():
    pull = Replication(STEP, PIECE, {"a": 1}, 0, ["b"])
    effects = [*pull.start(0.0), *pull.handle(ManifestKnown(STEP, 16 * PIECE), 0.0)]
    news = []
    while wanted := asked(effects):
        effects = [each for want in wanted for each in pull.handle(ShardStored(*want), 0.0)]
        news += [
            each.message for each in effects if isinstance(each, Transmit) and isinstance(each.message, Have)
        ]
    assert news[0].pieces.hex() == "01"
    assert news[-1].whole
    assert [type(each.message) for each in pull.handle(Received("b", Have(step=STEP)), 0.0)] == [Have]


def test_who_loses_the_only_source_before_anybody_has_the_manifest_gives_up():
    """Seed 8015454: those that had joined together asked each other for ever."""
    pull = Replication(STEP, PIECE, {"a": 1}, 0, ["b"])
    pull.start(0.0)
    pull.handle(PeerClosed("a", clean=False), 0.5)
    now_s = 0.0
    while not pull.failed and now_s < 60.0:
        now_s = pull.wake_at_s
        pull.handle(Tick(), now_s)
    assert FELLOWS_PATIENCE_S <= now_s <= FELLOWS_PATIENCE_S + MANIFEST_PATIENCE_S
