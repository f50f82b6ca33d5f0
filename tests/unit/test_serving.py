"""`chaosnet.protocols.serving`: the source's half of a state replication."""

import pytest
from msgspec.structs import replace

from chaosnet.protocols.effects import DropSnapshot, ServeManifest, ServeShard, TakeSnapshot, Transmit
from chaosnet.protocols.events import Received
from chaosnet.protocols.messages import (
    Entering,
    Have,
    ManifestRequest,
    Member,
    NoSnapshot,
    ReplicationDone,
    ShardRequest,
    View,
)
from chaosnet.protocols.serving import Serving

PEERS = {"b", "j", "k"}
MANIFEST, SHARD = ManifestRequest(step=7), ShardRequest(step=7, start=0, stop=10)


def view(*joiners, blocking=False, sources=("a",)):
    members = tuple(Member(id=name, addresses=(f"{name}:1",)) for name in ("a", "b", *joiners))
    joining = tuple(Entering(node=name, sources=sources, blocking=blocking) for name in joiners)
    return View(term=1, seq=4, scheduler="a", members=members, joining=joining)


@pytest.fixture
def serving():
    serving = Serving("a")
    assert serving.entered(view("j"), 7, PEERS) == [TakeSnapshot(7, blocking=False)]
    return serving


def asks(serving, message, peer="j", now_at=7):
    return serving.asked(Received(peer, message), now_at)


def test_only_sources_copy():
    assert Serving("b").entered(view("j"), 7, PEERS) == []


def test_what_is_asked_for_while_the_copy_is_made_waits_for_it(serving):
    assert asks(serving, MANIFEST) + asks(serving, SHARD) == []
    assert serving.ready(7) == [ServeManifest("j", 7), ServeShard("j", 7, 0, 10)]
    assert asks(serving, SHARD) == [ServeShard("j", 7, 0, 10)]


def test_one_copy_serves_all_joiners_of_a_view_and_goes_with_the_last():
    serving = Serving("a")
    serving.entered(view("j", "k", blocking=True), 7, PEERS)
    assert serving.joiners == {"j", "k"}
    assert asks(serving, ReplicationDone(step=7), "j") == []
    assert serving.drop("k") == [DropSnapshot(7)]
    assert serving.ready(7) == [DropSnapshot(7)]  # It was still being made.


def test_nothing_is_copied_for_a_joiner_without_a_link_here():
    """It pulls from others; that it had all was never heard here, and this node's training waited for that."""
    serving = Serving("a")
    assert serving.entered(view("j", blocking=True), 7, {"b"}) == []
    assert serving.entered(view("j", "k", blocking=True), 8, {"b", "k"}) == [TakeSnapshot(8, blocking=True)]
    assert serving.joiners == {"k"}
    assert asks(serving, ReplicationDone(step=8), "k", now_at=8) == [DropSnapshot(8)]


def test_joiners_that_a_view_has_lost_are_dropped(serving):
    assert serving.entered(view(), 8, PEERS) == [DropSnapshot(7)]


@pytest.mark.parametrize("sources", [("a",), ("b",)], ids=["of us", "of another"])
def test_what_a_joiner_had_begun_to_pull_is_dropped_when_it_pulls_anew(serving, sources):
    """Each time that it asked anew left one more copy of the whole state."""
    effects = serving.entered(view("j", sources=sources), 9, PEERS)
    assert effects == [DropSnapshot(7), *([TakeSnapshot(9, blocking=False)] if sources == ("a",) else [])]
    assert [*serving.snapshots] == ([9] if sources == ("a",) else [])


def test_what_others_still_pull_stays_when_one_of_them_pulls_anew():
    serving = Serving("a")
    serving.entered(view("j", "k"), 7, PEERS)
    both = replace(view("j"), members=view("j", "k").members)
    assert serving.entered(both, 9, PEERS) == [TakeSnapshot(9, blocking=False)]
    assert {step: each.joiners for step, each in serving.snapshots.items()} == {7: {"k"}, 9: {"j"}}


def test_who_asks_before_we_have_reached_the_step_is_answered_then():
    serving = Serving("a")
    assert asks(serving, MANIFEST, now_at=6) == []
    assert serving.asked_early(6) == []
    serving.entered(view("j"), 7, PEERS)
    assert serving.asked_early(7) == []
    assert serving.ready(7) == [ServeManifest("j", 7)]


def test_if_the_step_is_reached_without_a_copy_the_joiner_is_told():
    """A flush has brought the step, and its view has nobody joining."""
    serving = Serving("a")
    asks(serving, SHARD, now_at=6)
    serving.entered(view(), 7, PEERS)
    assert serving.asked_early(7) == [Transmit("j", NoSnapshot(step=7))]


def test_strangers_get_nothing(serving):
    serving.ready(7)
    assert asks(serving, SHARD, "x") == [Transmit("x", NoSnapshot(step=7))]


# --- those who join together ---


@pytest.fixture
def arriving():
    """Node j joins, and k with it."""
    serving = Serving("j")
    together = view("j", "k", blocking=True, sources=("a", "j", "k"))
    assert serving.arrives(7, ["k"]) == []
    assert serving.entered(together, 7, PEERS) == [], "it has nothing to copy"
    return serving


def test_who_joins_serves_those_that_join_with_it_as_soon_as_it_knows_how_the_state_is_laid_out(arriving):
    assert asks(arriving, MANIFEST, "k") == []
    assert arriving.ready(7) == [ServeManifest("k", 7)]
    assert asks(arriving, SHARD, "k") == [ServeShard("k", 7, 0, 10)]
    assert asks(arriving, SHARD, "x") == [Transmit("x", NoSnapshot(step=7))]
    assert asks(arriving, ReplicationDone(step=7), "k") == [DropSnapshot(7)]
    assert not arriving.joiners


def test_who_joined_a_moment_ago_and_has_no_vote_yet_copies_for_those_who_join_now():
    serving, now = Serving("b"), view("j", sources=("a", "b"))
    no_vote = Entering(node="b", sources=(), blocking=True)
    assert serving.entered(replace(now, joining=(no_vote, *now.joining)), 9, PEERS) == [
        TakeSnapshot(9, blocking=False)
    ]


def test_who_begins_later_is_told_that_all_is_here(arriving):
    begins = Have(step=7)
    assert asks(arriving, begins, "k") == [], "while it fetches, replication.py answers"
    arriving.arrived(7)
    assert asks(arriving, begins, "k") == [Transmit("k", Have(step=7, whole=True))]
    assert asks(arriving, Have(step=7, pieces=b"\x01"), "k") == []


def test_news_of_those_that_joined_with_us_before_are_of_no_use(serving):
    assert asks(serving, Have(step=9), "k", now_at=7) == asks(serving, Have(step=7), "j") == []
    assert not serving.early


def test_what_had_arrived_is_dropped_when_it_is_fetched_anew(arriving):
    assert arriving.arrives(9, ["k"]) == [DropSnapshot(7)]
    assert arriving.arrives(0, ()) == [DropSnapshot(9)]
    assert not arriving.joiners
