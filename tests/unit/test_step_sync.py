"""`chaosnet.protocols.step_sync`: one step after the other, the same for all, whatever is torn on the way."""

import itertools
from collections import deque

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosnet.errors import LocalProtocolError, RemoteProtocolError
from chaosnet.protocols import effects as fx
from chaosnet.protocols.contributions import merge
from chaosnet.protocols.events import Contributed, LocalReady, Received, Retracted
from chaosnet.protocols.messages import (
    Commit,
    Contribution,
    Down,
    Entering,
    Install,
    Member,
    Ready,
    Tree,
    Up,
    View,
)
from chaosnet.protocols.step_sync import StepSync, merge_votes
from chaosnet.protocols.sums import bundles, chunk_trees


def view(members, parent, root, *, observers=(), term=1, seq=1, **kwargs):
    trees = kwargs.pop("trees", (Tree(root=root, parent=parent),))
    return View(
        term=term,
        seq=seq,
        scheduler=members[0],
        members=tuple(Member(id=each) for each in members),
        observers=tuple(Member(id=each) for each in observers),
        trees=trees,
        **kwargs,
    )


CHAIN = view("abc", {"b": "a", "c": "b"}, "a")  # c to b to a, the root.


class Cluster:
    """Several StepSyncs and a network that delivers at once, or not if the test says so."""

    def __init__(self, first, chunks=2, nodes=None):
        self.chunks = chunks
        self.syncs = {name: StepSync(name, chunks) for name in nodes or first.node_ids}
        self.under_way = deque()
        self.done = {name: [] for name in self.syncs}  # StepCompleted effects.
        self.told = {name: [] for name in self.syncs}  # All other effects that are not messages.
        self.cut = set()  # (sender, receiver)
        self.results = {}
        for name, sync in self.syncs.items():
            self.perform(name, sync.enter(first, 0))

    def perform(self, name, effects):
        for effect in effects:
            match effect:
                case fx.Transmit(peer, message):
                    self.under_way.append((name, peer, message))
                case fx.SendUp(key, step, chunks, parent, weight, _):
                    up = Up(key=key, step=step, chunk=chunks.start, count=len(chunks), weight=weight)
                    self.under_way.append((name, parent, up))
                case fx.SendDown(key, step, chunks, peers, weight, _):
                    down = Down(key=key, step=step, chunk=chunks.start, count=len(chunks), weight=weight)
                    self.under_way.extend((name, peer, down) for peer in peers)
                case fx.StepCompleted():
                    self.done[name].append(effect)
                case _:
                    self.told[name].append(effect)

    def deliver(self):
        while self.under_way:
            sender, receiver, message = self.under_way.popleft()
            if (sender, receiver) not in self.cut:
                event = Received(sender, message, f"{sender}'s bytes")
                self.perform(receiver, self.syncs[receiver].handle(event))
        for sync in self.syncs.values():
            sync.check_invariants()

    def train(self, *names, weight=1.0):
        """These nodes hand in all they bring to the step under way."""
        for name in names or self.syncs:
            sync = self.syncs[name]
            self.perform(name, sync.handle(Contributed(tuple(range(self.chunks)), weight)))
            contribution = Contribution(weight=weight, shares={name: 8})
            self.perform(name, sync.handle(LocalReady(contribution)))
        self.deliver()

    def steps(self):
        return {name: sync.step for name, sync in self.syncs.items()}

    def flush_and_install(self, new, step, holder="", names=None, lacked=1):
        """What the scheduler's FLUSH and INSTALL do at these nodes, of which some lack so many results."""
        names = names or new.node_ids
        commit = self.syncs[holder].last_commit if holder else None
        earlier = self.syncs[holder].kept[-lacked:-1] if holder else ()
        for name in names:
            self.perform(name, self.syncs[name].freeze())
        self.under_way.clear()
        install = Install(
            term=new.term, number=1, view=new, priors=(), step=step, deal=(), holder=holder, commit=commit,
            earlier=earlier,
        )  # fmt: skip
        for name in names:
            self.perform(name, self.syncs[name].start_installed(install, install.view))
        self.deliver()


@pytest.fixture
def chain():
    return Cluster(CHAIN)


def kinds(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


# --- an undisturbed step ---


STAR = view("abcd", dict.fromkeys("bcd", "a"), "a")


@pytest.mark.parametrize("order", list(itertools.permutations("bcd")), ids="".join)
def test_who_comes_first_changes_nothing_of_what_is_summed(order):
    root = StepSync("a", 1)
    root.enter(STAR, 0)
    brought = {"b": 0.1, "c": 0.2, "d": 0.3}  # 0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1.
    effects = root.handle(Contributed((0,), 1.0))
    effects += root.handle(LocalReady(Contribution(weight=1.0, metrics={"loss": (0.0, 1.0)})))
    for child in order:
        weight = brought[child]
        mine = Contribution(weight=weight, metrics={"loss": (weight, weight)})
        effects += root.handle(Received(child, Up(key=STAR.key, step=0, chunk=0, weight=weight), child))
        effects += root.handle(Received(child, Ready(key=STAR.key, step=0, vote=None, contribution=mine)))
    assert {(each.payload, each.place) for each in kinds(effects, fx.Accumulate)} == {
        ("b", 0),
        ("c", 1),
        ("d", 2),
    }
    assert kinds(effects, fx.FinishChunks) == [fx.FinishChunks(0, range(1), 0.1 + 0.2 + 0.3 + 1.0, True)]
    (done,) = kinds(effects, fx.StepCompleted)
    assert done.commit.total.metrics == {"loss": (0.1 + 0.2 + 0.3, 1.0 + 0.1 + 0.2 + 0.3)}


def test_all_complete_the_step_when_all_have_contributed(chain):
    chain.train()
    assert chain.steps() == {"a": 1, "b": 1, "c": 1}
    assert [len(done) for done in chain.done.values()] == [1, 1, 1]


def test_nobody_completes_the_step_while_one_has_not_contributed(chain):
    chain.train("a", "b")
    assert chain.steps() == {"a": 0, "b": 0, "c": 0}
    chain.train("c")
    assert chain.steps() == {"a": 1, "b": 1, "c": 1}


def test_the_sum_goes_up_once_a_whole_subtree_is_in_and_the_result_comes_down(chain):
    chain.train("b")
    assert chain.told["b"] == [fx.ViewEntered(CHAIN, 0)]  # It waits for c.
    chain.train("c")
    assert kinds(chain.told["b"], fx.Accumulate) == [
        fx.Accumulate(range(1), "c's bytes", 0),
        fx.Accumulate(range(1, 2), "c's bytes", 0),
    ]
    chain.train("a")
    assert kinds(chain.told["a"], fx.FinishChunks) == [
        fx.FinishChunks(0, range(1), 3.0, own=True),
        fx.FinishChunks(0, range(1, 2), 3.0, own=True),
    ]
    assert kinds(chain.told["c"], fx.AdoptChunks) == [
        fx.AdoptChunks(0, range(1), "b's bytes"),
        fx.AdoptChunks(0, range(1, 2), "b's bytes"),
    ]


def test_the_result_is_divided_by_the_samples_of_all(chain):
    for name, weight in [("a", 1.0), ("b", 2.0), ("c", 5.0)]:
        chain.train(name, weight=weight)
    assert chain.done["c"][0].commit.total.weight == 8.0
    assert kinds(chain.told["a"], fx.FinishChunks)[0].weight == 8.0


def test_a_node_without_data_still_carries_the_sums_of_others(chain):
    chain.train("a", "c")
    chain.train("b", weight=0.0)
    assert chain.steps() == {"a": 1, "b": 1, "c": 1}
    assert kinds(chain.told["a"], fx.FinishChunks)[0].weight == 2.0


def test_a_step_to_which_nobody_brings_data_moves_no_bytes(chain):
    chain.train(weight=0.0)
    assert chain.steps() == {"a": 1, "b": 1, "c": 1}
    moved = [effect for told in chain.told.values() for effect in told]
    assert kinds(moved, fx.Accumulate) == kinds(moved, fx.FinishChunks) == kinds(moved, fx.AdoptChunks) == []


def test_the_next_step_deals_what_members_asked_for(chain):
    chain.train()
    assert chain.syncs["b"].deal == (("a", 8), ("b", 8), ("c", 8))


def test_chunks_are_shared_among_trees_and_each_has_its_own_root():
    two = (
        Tree(root="a", parent={"b": "a", "c": "b"}, share=0.5),
        Tree(root="c", parent={"b": "c", "a": "b"}, share=0.5),
    )
    cluster = Cluster(view("abc", {}, "a", trees=two), chunks=4)
    cluster.train()
    assert cluster.steps() == {"a": 1, "b": 1, "c": 1}
    assert [effect.chunks.start for effect in kinds(cluster.told["a"], fx.FinishChunks)] == [0, 2]
    assert [effect.chunks.start for effect in kinds(cluster.told["c"], fx.FinishChunks)] == [1, 3]


def test_observers_get_results_and_contribute_nothing():
    cluster = Cluster(view("ab", {"b": "a", "o": "b"}, "a", observers="o"))
    cluster.train("a", "b")
    assert cluster.steps() == {"a": 1, "b": 1, "o": 1}
    assert cluster.done["o"][0].commit.total.weight == 2.0


def test_who_was_dropped_while_it_was_behind_listens_as_if_it_had_never_been_a_member(chain):
    chain.train("a", "b")
    chain.cut = {("b", "c")}
    chain.train("c")  # It misses the result, and is dropped before that is sent again.
    chain.cut = {("a", "b"), ("b", "c")}
    chain.flush_and_install(view("abc", {"b": "a", "c": "b"}, "a", term=2), step=1, holder="a")
    assert chain.syncs["c"].sums.catching_up
    chain.cut = set()
    listening = view("ab", {"b": "a", "c": "b"}, "a", observers="c", term=3)
    following = view("abc", {"b": "a", "c": "b"}, "a", term=3, seq=2)
    sync = chain.syncs["c"]
    chain.perform("c", sync.observe(listening, 1))
    sync.prepare(following)
    for chunk in range(chain.chunks):
        sync.handle(Received("b", Down(key=(3, 1), step=1, chunk=chunk, weight=2.0), "bytes"))
    commit = Commit(key=(3, 1), step=1, switch=(3, 2), total=Contribution())
    assert fx.ViewEntered(following, 2) in sync.handle(Received("b", commit))


def test_who_was_dropped_in_a_step_forgets_what_it_had_contributed_to_it(chain):
    """Seed 213856 of lives with rates: it was ready twice for the first step in which it took part again."""
    dropped = chain.syncs["c"]
    for event in (Contributed((0,), 1.0), LocalReady(Contribution(weight=1.0))):
        dropped.handle(event)
    dropped.observe(view("abc", {"b": "a", "c": "b"}, "a", term=3), 7)
    assert dropped.local is None and not dropped.sums.own_weight


def test_being_ready_twice_for_one_step_is_a_bug_of_ours(chain):
    chain.train("a")
    with pytest.raises(LocalProtocolError, match="ready twice"):
        chain.syncs["a"].handle(LocalReady(Contribution()))


def test_all_leave_when_all_have_finished():
    cluster = Cluster(view("ab", {"b": "a"}, "a"), chunks=1)
    for name, sync in cluster.syncs.items():
        cluster.perform(name, sync.handle(Contributed((0,), 0.0)))
        cluster.perform(name, sync.handle(LocalReady(Contribution(leaving=True))))
    cluster.deliver()
    assert [kinds(told, fx.Left) for told in cluster.told.values()] == [[fx.Left("no member goes on")]] * 2


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_who_stopped_for_a_flush_leaves_with_those_that_have_left_unless_it_lacks_their_result(weight):
    """On a busy machine a link of one that had left ended before the word that all leave was read from another's.

    Nobody answered the flush that followed: the node left on its own, without its part of the last checkpoint.
    """
    cluster = Cluster(view("ab", {"b": "a"}, "a"), chunks=1)
    cluster.cut = {("a", "b")}
    for name, sync in cluster.syncs.items():
        cluster.perform(name, sync.handle(Contributed((0,), weight)))
        cluster.perform(name, sync.handle(LocalReady(Contribution(weight=weight, leaving=True))))
    cluster.deliver()
    a, b = cluster.syncs["a"], cluster.syncs["b"]
    b.freeze()
    left = kinds(b.handle(Received("a", a.last_commit)), fx.Left)
    assert left == ([] if weight else [fx.Left("no member goes on")])
    b.check_invariants()


# --- bundles ---


def bundled(size, **kwargs):
    return msgspec.structs.replace(CHAIN, bundle=size, **kwargs)


@given(
    chunks=st.integers(0, 60),
    size=st.integers(1, 70),
    borders=st.sets(st.integers(1, 59)).map(sorted).map(tuple),
)
def test_bundles_are_all_chunks_in_order_and_none_goes_over_a_border(chunks, size, borders):
    borders = tuple(each for each in borders if each < chunks)
    found = bundles(chunks, size, borders)
    assert [chunk for each in found for chunk in each] == list(range(chunks))
    assert all(1 <= len(each) <= size for each in found)
    assert {*borders} <= {each.start for each in found}


def test_a_bundle_goes_up_once_all_its_chunks_are_there():
    cluster = Cluster(bundled(3), chunks=4)
    sync = cluster.syncs["c"]
    assert sync.handle(Contributed((0, 1), 2.0)) == []
    assert sync.handle(Contributed((3,), 2.0)) == [fx.SendUp(CHAIN.key, 0, range(3, 4), "b", 2.0, True)]
    assert sync.handle(Contributed((2,), 2.0)) == [fx.SendUp(CHAIN.key, 0, range(3), "b", 2.0, True)]


def test_a_step_of_bundles_is_complete_everywhere():
    cluster = Cluster(bundled(3), chunks=4)
    cluster.train()
    assert cluster.steps() == {"a": 1, "b": 1, "c": 1}
    assert [effect.chunks for effect in kinds(cluster.told["a"], fx.FinishChunks)] == [range(3), range(3, 4)]


@pytest.mark.parametrize(("chunk", "count"), [(0, 1), (1, 2), (0, 4), (3, 3), (9, 1)])
def test_chunks_that_are_no_bundle_of_the_view_are_the_peers_mistake(chunk, count):
    cluster = Cluster(bundled(3), chunks=4)
    with pytest.raises(RemoteProtocolError, match="no bundle of this view"):
        up = Up(key=CHAIN.key, step=0, chunk=chunk, count=count, weight=1.0)
        cluster.syncs["b"].handle(Received("c", up))


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3)])
def test_who_is_behind_gets_the_result_in_the_bundles_of_the_new_view(before, after):
    cluster = Cluster(bundled(before), chunks=4)
    cluster.train("a", "b")
    cluster.cut = {("b", "c")}
    cluster.train("c")
    assert cluster.steps() == {"a": 1, "b": 1, "c": 0}
    cluster.cut = set()
    cluster.flush_and_install(bundled(after, term=2), step=1, holder="b")
    assert cluster.steps() == {"a": 1, "b": 1, "c": 1}
    adopted = [effect.chunks for effect in kinds(cluster.told["c"], fx.AdoptChunks)]
    assert adopted == bundles(4, after)
    cluster.train()
    assert cluster.steps() == {"a": 2, "b": 2, "c": 2}


def test_what_was_contributed_before_a_flush_goes_into_the_bundles_of_the_new_view():
    cluster = Cluster(bundled(2), chunks=4)
    cluster.perform("c", cluster.syncs["c"].handle(Contributed((0, 1, 2), 2.0)))
    cluster.flush_and_install(bundled(4, term=2), step=0)
    assert not kinds(cluster.told["b"], fx.Accumulate)
    cluster.perform("c", cluster.syncs["c"].handle(Contributed((3,), 2.0)))
    cluster.deliver()
    assert [effect.chunks for effect in kinds(cluster.told["b"], fx.Accumulate)] == [range(4)]


# --- messages that are not for the attempt under way ---


def test_a_second_copy_of_a_part_is_not_added_again(chain):
    up = Received("c", Up(key=CHAIN.key, step=0, chunk=0, weight=1.0), "bytes")
    assert kinds(chain.syncs["b"].handle(up), fx.Accumulate) != []
    assert chain.syncs["b"].handle(up) == []


def test_a_part_of_somebody_who_is_no_child_is_ignored(chain):
    up = Received("a", Up(key=CHAIN.key, step=0, chunk=0, weight=1.0), "bytes")
    assert chain.syncs["b"].handle(up) == []


@pytest.mark.parametrize("key", [(0, 9), (1, 0)])
def test_messages_of_an_attempt_that_is_over_are_dropped(chain, key):
    for message in (
        Up(key=key, step=0, chunk=0, weight=1.0),
        Down(key=key, step=0, chunk=0, weight=1.0),
        Ready(key=key, step=0, vote=None, contribution=Contribution()),
        Commit(key=key, step=0, switch=None, total=Contribution()),
    ):
        assert chain.syncs["b"].handle(Received("c", message, "bytes")) == []
    assert chain.syncs["b"].early.events == []


def test_messages_from_the_next_step_wait_for_it(chain):
    chain.cut = {("a", "b")}  # b does not get the results of step 0.
    chain.train()
    up = Received("c", Up(key=CHAIN.key, step=1, chunk=0, weight=1.0), "early")
    assert chain.syncs["b"].handle(up) == []
    down = [Down(key=CHAIN.key, step=0, chunk=chunk, weight=3.0) for chunk in (0, 1)]
    commit = Commit(key=CHAIN.key, step=0, switch=None, total=Contribution(weight=3.0))
    effects = [
        effect
        for message in (*down, commit)
        for effect in chain.syncs["b"].handle(Received("a", message, "bytes"))
    ]
    assert fx.Accumulate(range(1), "early", 0) in effects


def test_a_chunk_that_does_not_exist_is_the_peers_mistake(chain):
    with pytest.raises(RemoteProtocolError, match="1 chunks from 7 of 2 on"):
        chain.syncs["b"].handle(Received("c", Up(key=CHAIN.key, step=0, chunk=7, weight=1.0)))


# --- the vote ---


def test_a_view_that_all_have_prepared_is_entered_at_the_same_step_without_a_pause(chain):
    following = view("ab", {"b": "a"}, "a", seq=2)
    for sync in chain.syncs.values():
        sync.prepare(following)
    chain.train()
    assert chain.done["a"][0].commit.switch == (1, 2)
    assert chain.syncs["a"].view == chain.syncs["b"].view == following
    assert kinds(chain.told["c"], fx.Left) == [fx.Left("it asked to")]
    chain.train("a", "b")
    assert (chain.syncs["a"].step, chain.syncs["b"].step) == (2, 2)


def test_one_that_has_not_prepared_the_view_keeps_all_in_the_old_one(chain):
    chain.syncs["a"].prepare(view("ab", {"b": "a"}, "a", seq=2))
    chain.syncs["c"].prepare(view("ab", {"b": "a"}, "a", seq=2))
    chain.train()
    assert chain.done["b"][0].commit.switch is None
    assert {sync.view.key for sync in chain.syncs.values()} == {(1, 1)}


def test_the_vote_is_for_one_view_and_not_for_the_least():
    assert merge_votes([(1, 3), (1, 3)]) == (1, 3)
    assert merge_votes([(1, 3), (1, 4)]) is None
    assert merge_votes([(1, 3), (2, 3)]) is None
    assert merge_votes([(1, 3), None]) is None


def test_until_a_step_completes_in_the_new_view_the_old_one_must_agree_to_decisions(chain):
    following = view("abc", {"b": "a", "c": "a"}, "a", seq=2)
    for sync in chain.syncs.values():
        sync.prepare(following)
    chain.train()
    assert [each.key for each in chain.syncs["b"].electorates()] == [(1, 2), (1, 1)]
    chain.train()
    assert [each.key for each in chain.syncs["b"].electorates()] == [(1, 2)]


# --- flush and install ---


def test_if_nobody_completed_the_step_it_starts_again_from_the_same_contributions(chain):
    chain.train("b", "c")
    after = view("bc", {"c": "b"}, "b", term=2, seq=2)
    chain.flush_and_install(after, step=0)
    assert (chain.syncs["b"].step, chain.syncs["c"].step) == (1, 1)
    assert chain.done["b"][0].commit.total.weight == 2.0
    assert fx.ResetAttempt() in chain.told["b"]


def test_if_somebody_completed_the_step_the_others_adopt_its_result(chain):
    chain.cut = {("a", "b")}
    chain.train()
    assert chain.steps() == {"a": 1, "b": 0, "c": 0}
    chain.cut = set()
    after = view("abc", {"b": "a", "c": "b"}, "a", term=2, seq=2)
    chain.flush_and_install(after, step=1, holder="a")
    assert chain.steps() == {"a": 1, "b": 1, "c": 1}
    assert [len(done) for done in chain.done.values()] == [1, 1, 1]
    assert chain.done["c"][0].commit == chain.done["b"][0].commit == chain.done["a"][0].commit


def test_if_the_holder_dies_before_it_could_pass_the_result_on_the_step_is_done_over(chain):
    """Seed 398: a node that was to adopt a result had thrown its own contribution away."""
    chain.cut = {("a", "b")}
    chain.train()
    after = view("abc", {"b": "a", "c": "b"}, "a", term=2, seq=2)
    chain.flush_and_install(after, step=1, holder="a")
    assert chain.steps() == {"a": 1, "b": 0, "c": 0}
    last = view("bc", {"c": "b"}, "b", term=3, seq=3)
    chain.flush_and_install(last, step=0)
    assert (chain.syncs["b"].step, chain.syncs["c"].step) == (1, 1)
    assert chain.done["c"][0].commit.total.weight == 2.0


def test_only_who_lacks_the_last_result_depends_on_a_listener_that_has_it():
    """Seed 155054 of links with rates: it went before it could pass the result on, and nobody tore the step."""
    cluster = Cluster(view("ab", {"b": "a", "o": "a"}, "a", observers="o"))
    cluster.cut = {("a", "b")}
    cluster.train("a", "b")
    assert cluster.steps() == {"a": 1, "b": 0, "o": 1}
    assert not cluster.syncs["a"].depends_on("o")
    cluster.cut = {("o", "b")}
    left = view("b", {"o": "b"}, "b", observers="o", term=2, seq=2)
    cluster.syncs.pop("a")
    cluster.flush_and_install(left, step=1, holder="o")
    assert cluster.steps()["b"] == 0 and cluster.syncs["b"].depends_on("o")
    cluster.flush_and_install(view("b", {}, "b", term=3, seq=3), step=0)
    assert cluster.syncs["b"].step == 1  # It was done over.


def test_a_listener_is_fed_by_its_neighbours_in_the_trees_alone():
    cluster = Cluster(view("abc", {"b": "a", "c": "a", "o": "b"}, "a", observers="o"))
    assert [name for name, sync in cluster.syncs.items() if sync.feeds("o")] == ["b"]
    assert not any(sync.feeds("a") for sync in cluster.syncs.values())
    cluster.syncs["b"].freeze()
    assert not cluster.syncs["b"].feeds("o")


def test_a_view_that_was_switched_to_by_some_is_not_switched_to_again(chain):
    following = view("abc", {"b": "a", "c": "a"}, "a", seq=2)
    for sync in chain.syncs.values():
        sync.prepare(following)
    chain.cut = {("a", "b")}
    chain.train()
    assert chain.syncs["a"].view.key == (1, 2)
    chain.cut = set()
    after = view("abc", {"b": "a", "c": "a"}, "a", term=2, seq=3)
    chain.flush_and_install(after, step=1, holder="a")
    assert {sync.view.key for sync in chain.syncs.values()} == {(2, 3)}
    assert chain.steps() == {"a": 1, "b": 1, "c": 1}


def test_a_frozen_node_sends_nothing(chain):
    for sync in chain.syncs.values():
        sync.freeze()
    chain.train()
    assert chain.steps() == {"a": 0, "b": 0, "c": 0}
    assert not chain.under_way


def test_who_is_two_steps_behind_cannot_be_installed(chain):
    chain.syncs["b"].freeze()
    install = Install(term=2, number=1, view=CHAIN, priors=(), step=2, deal=(), holder="a")
    with pytest.raises(RemoteProtocolError, match="step 2 while at 0"):
        chain.syncs["b"].start_installed(install, install.view)


def listening(parent):
    return view("ab", {"b": "a", "o": parent}, "a", observers="o")


def test_all_keep_more_results_as_long_as_somebody_joins():
    cluster = Cluster(listening("b"))
    for _ in range(5):
        cluster.train("a", "b")
    assert {tuple(each.step for each in sync.kept) for sync in cluster.syncs.values()} == {(2, 3, 4)}
    assert [done.kept for done in cluster.done["a"]] == [1, 2, 3, 3, 3]
    cluster.flush_and_install(view("ab", {"b": "a"}, "a", seq=2), step=5)
    cluster.train("a", "b")
    assert [commit.step for commit in cluster.syncs["a"].kept] == [5]


def test_what_a_new_member_may_lack_is_kept_until_the_first_step_with_it():
    cluster = Cluster(listening("b"))
    following = view("abo", {"b": "a", "o": "b"}, "a", seq=2)
    cluster.train("a", "b")
    for sync in cluster.syncs.values():
        sync.prepare(following)
    cluster.cut = {("b", "o")}
    for _ in range(2):
        cluster.train("a", "b")
    assert [each.step for each in cluster.syncs["a"].kept] == [0, 1] and cluster.syncs["o"].step == 1
    after = view("abo", {"b": "a", "o": "a"}, "a", seq=3)
    cluster.cut = set()
    cluster.flush_and_install(after, step=2, holder="a")
    cluster.train("o")
    assert set(cluster.steps().values()) == {3}
    assert [each.step for each in cluster.syncs["a"].kept] == [2]


@pytest.mark.parametrize("lacked", [2, 3])
@pytest.mark.parametrize("parent", ["a", "b"])
@pytest.mark.parametrize("becomes", ["observers", "members"])
def test_a_joiner_that_lost_the_results_of_several_steps_gets_them_after_a_flush(lacked, parent, becomes):
    """A link to it was cut: when that was known, the others were two steps further."""
    cluster = Cluster(listening("b"))
    cluster.cut = {("b", "o")}
    for _ in range(lacked):
        cluster.train("a", "b")
    assert cluster.steps() == {"a": lacked, "b": lacked, "o": 0}
    cluster.cut = set()
    after = view("ab", {"b": "a", "o": parent}, "a", observers="o", seq=2)
    if becomes == "members":  # It said that it was about to have the state, and was made one before it had.
        after = view("abo", {"b": "a", "o": parent}, "a", seq=2)
    cluster.flush_and_install(after, step=lacked, holder="a", lacked=lacked)
    assert set(cluster.steps().values()) == {lacked}
    assert [done.commit for done in cluster.done["o"]] == [done.commit for done in cluster.done["a"]]
    assert len([each for each in cluster.told["o"] if isinstance(each, fx.AdoptChunks)]) == 2 * lacked
    cluster.train(*after.member_ids)
    assert set(cluster.steps().values()) == {lacked + 1}
    assert {sync.sums.recovering for sync in cluster.syncs.values()} == {0}


def test_who_lacks_one_result_passes_the_earlier_ones_on_to_who_lacks_more():
    cluster = Cluster(listening("b"))
    cluster.cut = {("b", "o")}
    cluster.train("a", "b")
    cluster.cut |= {("a", "b")}
    cluster.train("a", "b")
    assert cluster.steps() == {"a": 2, "b": 1, "o": 0}
    cluster.cut = set()
    after = view("ab", {"b": "a", "o": "b"}, "a", observers="o", seq=2)
    cluster.flush_and_install(after, step=2, holder="a", lacked=2)
    assert cluster.steps() == {"a": 2, "b": 2, "o": 2}


def test_a_flush_while_it_catches_up_leaves_a_joiner_where_it_is():
    cluster = Cluster(listening("b"))
    cluster.cut = {("b", "o")}
    for _ in range(2):
        cluster.train("a", "b")
    after = view("ab", {"b": "a", "o": "b"}, "a", observers="o", seq=2)
    cluster.flush_and_install(after, step=2, holder="a", lacked=2)
    cluster.train("a", "b")
    assert cluster.steps() == {"a": 3, "b": 3, "o": 0}
    cluster.cut = set()
    again = view("ab", {"b": "a", "o": "a"}, "a", observers="o", seq=3)
    cluster.flush_and_install(again, step=3, holder="a", lacked=3)
    assert cluster.steps() == {"a": 3, "b": 3, "o": 3}


def test_a_retracted_contribution_keeps_the_attempt_from_mixing_old_and_new(chain):
    chain.train("c")
    sync = chain.syncs["b"]
    sync.handle(Contributed((0,), 1.0))
    assert sync.handle(Retracted(2.0, "accumulates")) == [fx.ResetAttempt()]
    assert sync.handle(LocalReady(Contribution(weight=2.0))) == []
    after = view("abc", {"b": "a", "c": "b"}, "a", seq=2)
    chain.train("a")
    chain.flush_and_install(after, step=0)
    assert chain.done["a"][0].commit.total.weight == 4.0


def test_what_is_retracted_while_the_step_is_frozen_goes_out_with_the_next_attempt(chain):
    """Nothing of it is in the attempt that is over: had it to wait for another flush, nobody would ask for that."""
    chain.train("a", "c")
    sync = chain.syncs["b"]
    sync.handle(Contributed((0,), 1.0))
    after = view("abc", {"b": "a", "c": "b"}, "a", seq=2)
    for each in chain.syncs.values():
        each.freeze()
    assert sync.handle(Retracted(2.0, "accumulates")) == []
    sync.handle(LocalReady(Contribution(weight=2.0)))
    install = Install(term=1, number=1, view=after, priors=(), step=0, deal=(), holder="", commit=None)
    for name, each in chain.syncs.items():
        chain.perform(name, each.start_installed(install, after))
    chain.deliver()
    assert chain.done["a"][0].commit.total.weight == 4.0


# --- pure parts ---


@given(chunks=st.integers(0, 200), shares=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=5))
def test_chunks_are_shared_as_the_plan_says_to_within_one_and_a_bit(chunks, shares):
    total = sum(shares)
    trees = tuple(Tree(root="a", parent={}, share=share / total) for share in shares)
    owners = chunk_trees(chunks, trees)
    assert len(owners) == chunks
    for index, tree in enumerate(trees):
        assert abs(owners.count(index) - tree.share * chunks) < len(trees)


def test_contributions_are_merged_like_sums_and_sets():
    one = Contribution(
        weight=2, ranges=((0, 2),), shares={"a": 2}, metrics={"loss": (4.0, 2.0)}, present=b"\x01", dataset=9
    )
    other = Contribution(
        weight=3,
        ranges=((2, 5),),
        shares={"b": 3},
        metrics={"loss": (1.0, 3.0)},
        present=b"\x00\x01",
        leaving=True,
    )
    assert merge([other, one]) == Contribution(
        weight=5,
        ranges=((0, 2), (2, 5)),
        shares={"a": 2, "b": 3},
        metrics={"loss": (5.0, 5.0)},
        present=b"\x01\x01",
        dataset=9,
        leaving=False,
    )


@pytest.mark.parametrize(
    "result_bytes, most",
    [(0, 1024), (2 << 20, 512), (45 << 20, 22), (500 << 20, 8)],
    ids=lambda each: f"{each:,}",
)
def test_an_observer_begins_anew_when_results_that_wait_for_it_would_take_too_much_memory(result_bytes, most):
    sync = StepSync("o", 1, result_bytes)
    listening = view("a", {"o": "a"}, "a", observers="o")
    sync.observe(listening, 0)

    def hears(step):
        commit = Commit(key=listening.key, step=step, switch=None, total=Contribution(weight=1.0))
        return sync.handle(Received("a", commit, None))

    assert [hears(step) for step in range(most + 1)] == (most + 1) * [
        []
    ]  # That of its own step, and early ones.
    assert hears(most + 1) == [fx.FellBehind("a")]
    sync.check_invariants()


@pytest.mark.parametrize(
    "commits, state_bytes, far",
    [(12, 1199, True), (12, 1200, False), (9, 100, True), (8, 100, False), (0, 0, False)],
)
def test_an_observer_knows_by_commits_whether_more_results_wait_than_the_state_is(commits, state_bytes, far):
    """Of few steps they may just be late."""
    sync = StepSync("o", 1, result_bytes=100)
    listening = view("a", {"o": "a"}, "a", observers="o")
    sync.observe(listening, 5)
    total = Contribution(weight=1.0)
    for step in range(5, 5 + commits):
        sync.handle(Received("a", Commit(key=listening.key, step=step, switch=None, total=total), None))
    assert sync.is_far_behind(state_bytes) is far


@pytest.mark.parametrize("stays", [True, False])
def test_results_of_before_are_not_sent_to_observers_that_have_gone_or_begin_anew(stays):
    parent, links = {"b": "a", "o": "b", "p": "b"}, (("a", "b"), ("b", "o"), ("b", "p"))
    cluster = Cluster(view("ab", parent, "a", observers="op", links=links))
    anew = Entering(node="o", sources=("b",))
    left = {} if stays else {"p": "b"}
    tree = {node: parent[node] for node in parent if node not in left}
    observers = "op" if stays else "o"
    following = view("ab", tree, "a", observers=observers, seq=2, links=links, joining=(anew,))
    for sync in cluster.syncs.values():
        sync.prepare(following)
    cluster.train("a", "b")
    dropped = [effect for effect in cluster.told["b"] if isinstance(effect, fx.DropResults)]
    assert dropped == [fx.DropResults(("o", *left), following.key)]


def test_who_has_voted_for_a_view_of_the_other_alone_counts_with_it():
    """The senior of two is a quorum by itself; but the other may go on without it since that vote."""
    sync = StepSync("a", 1)
    sync.enter(view("ab", {"b": "a"}, "a"), 0)
    sync.prepare(view("b", {}, "b", seq=2))
    assert [each.members for each in sync.electorates()] == [("a", "b"), ("b",)]


def test_a_view_without_us_of_two_others_needs_one_who_would_be_missing_in_our_quorum():
    sync = StepSync("a", 1)
    sync.enter(CHAIN, 0)
    sync.prepare(view("bc", {"c": "b"}, "b", seq=2))
    assert [each.members for each in sync.electorates()] == [("a", "b", "c")]


def test_who_begins_later_than_others_takes_up_what_they_have_sent():
    """All are given the first view, and none knows when the others are."""
    view = View(
        term=1, seq=1, scheduler="a", members=(Member(id="a"), Member(id="b")), links=(("a", "b"),),
        trees=(Tree(root="a", parent={"b": "a"}),),
    )  # fmt: skip
    sync = StepSync("a", 1)
    up = Received("b", Up(key=(1, 1), step=0, chunk=0, weight=2.0), "of b")
    assert sync.handle(up) == []
    assert fx.Accumulate(range(1), "of b", 0) in sync.begin(view, 0)
