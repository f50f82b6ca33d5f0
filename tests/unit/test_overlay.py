"""`chaosnet.protocols.overlay`: who can be reached, who has died, and who may go on."""

import pytest

from chaosnet.protocols.lives import Lives
from chaosnet.protocols.messages import Electorate, LinkNews, Member, View
from chaosnet.protocols.overlay import STRANGERS_TOLD, Overlay, has_quorum, lacking


def voters(*members, key=(1, 1)):
    return Electorate(key=key, members=members)


def view(members, links, observers=(), lives=None):
    lives = lives or {}
    return View(
        term=1,
        seq=1,
        scheduler=members[0],
        members=tuple(Member(id=each, life=lives.get(each, 0)) for each in members),
        observers=tuple(Member(id=each, life=lives.get(each, 0)) for each in observers),
        links=tuple(links),
    )


def news(reporter, peer, state, version=1, life=0, peer_life=0):
    return LinkNews(
        reporter=reporter, peer=peer, version=version, state=state, life=life, peer_life=peer_life
    )


@pytest.fixture
def chain():
    """a - b - c, as a sees it."""
    overlay = Overlay("a")
    overlay.enter(view("abc", [("a", "b"), ("b", "c")]))
    return overlay


# --- quorums ---


@pytest.mark.parametrize("alive", [{"a", "b"}, {"b", "c"}, {"a", "b", "c"}])
def test_a_majority_may_go_on(alive):
    assert has_quorum(voters("a", "b", "c"), alive, crashed=set())


def test_a_minority_may_not_go_on_even_if_it_saw_the_others_die():
    assert not has_quorum(voters("a", "b", "c"), {"a"}, crashed={"b", "c"})


def test_a_minority_goes_on_if_all_others_are_dead_and_a_person_has_said_so_of_some():
    assert has_quorum(voters("a", "b", "c"), {"a"}, crashed={"b", "c"}, word=True)
    assert not has_quorum(voters("a", "b", "c"), {"a"}, crashed={"b"}, word=True)
    assert not has_quorum(voters("a", "b", "c"), set(), crashed={"a", "b", "c"}, word=True)


def test_an_exact_half_goes_on_only_with_the_most_senior():
    assert has_quorum(voters("a", "b", "c", "d"), {"a", "d"}, crashed=set())
    assert not has_quorum(voters("a", "b", "c", "d"), {"b", "c"}, crashed=set())


def test_an_exact_half_goes_on_if_all_others_are_known_to_have_crashed():
    assert has_quorum(voters("a", "b", "c", "d"), {"b", "c"}, crashed={"a", "d"})
    assert not has_quorum(voters("a", "b", "c", "d"), {"b", "c"}, crashed={"d"})


def test_two_nodes_survive_the_crash_of_either():
    assert has_quorum(voters("a", "b"), {"a"}, crashed={"b"})
    assert has_quorum(voters("a", "b"), {"b"}, crashed={"a"})


@pytest.mark.parametrize("size", range(1, 8))
def test_two_parts_of_a_partition_never_both_go_on(size):
    members = [f"n{index}" for index in range(size)]
    for mask in range(1 << size):
        one = {each for index, each in enumerate(members) if mask >> index & 1}
        other = set(members) - one
        assert not (has_quorum(voters(*members), one, set()) and has_quorum(voters(*members), other, set()))


def test_every_view_that_may_still_be_active_must_agree():
    now, before = voters("a", "b", key=(1, 2)), voters("a", "b", "c", "d", "e", key=(1, 1))
    assert lacking([now, before], {"a", "b"}, crashed=set()) == before
    assert lacking([now, before], {"a", "b", "c"}, crashed=set()) is None
    assert lacking([before, now], {"c", "d", "e"}, crashed=set()) == now


def test_an_older_view_whose_other_members_have_all_crashed_is_nobodys():
    now, before = voters("b", key=(1, 2)), voters("a", "c", "d", "b", key=(1, 1))
    assert lacking([now, before], {"b"}, crashed={"a", "c", "d"}) is None
    assert lacking([now, before], {"b"}, crashed={"a", "c"}) == before


# --- who can be reached ---


def test_a_node_is_reached_through_others(chain):
    assert chain.reachable == {"a", "b", "c"}


def test_a_lost_link_cuts_off_what_lies_behind_it(chain):
    assert chain.heard(news("b", "c", "silent"))
    assert chain.reachable == {"a", "b"}
    assert chain.lost == {("b", "c")}


def test_a_node_that_has_lost_one_link_of_two_is_still_reached():
    overlay = Overlay("a")
    overlay.enter(view("abc", [("a", "b"), ("a", "c"), ("b", "c")]))
    overlay.heard(news("a", "c", "closed"))
    assert overlay.reachable == {"a", "b", "c"}
    assert overlay.crashed == set()


def test_an_open_connection_that_is_no_link_of_the_view_counts(chain):
    chain.heard(news("b", "c", "silent"))
    assert chain.heard(news("a", "c", "open"))
    assert chain.reachable == {"a", "b", "c"}
    assert chain.live_links() == {("a", "b"), ("a", "c")}


def test_a_connection_that_one_end_denies_does_not_count(chain):
    chain.heard(news("b", "c", "silent"))
    chain.heard(news("a", "c", "open"))
    chain.heard(news("c", "a", "silent"))
    assert chain.reachable == {"a", "b"}


def test_older_news_of_the_same_end_is_ignored(chain):
    chain.heard(news("b", "c", "silent", version=2))
    assert not chain.heard(news("b", "c", "open", version=1))
    assert chain.reachable == {"a", "b"}


def test_observers_pass_nothing_on():
    overlay = Overlay("a")
    overlay.enter(view("ab", [("a", "o"), ("b", "o")], observers="o"))
    assert overlay.reachable == {"a", "o"}


# --- who has died ---


def test_a_closed_connection_proves_a_crash_and_silence_does_not(chain):
    chain.heard(news("b", "c", "silent", version=1))
    assert chain.crashed == set()
    chain.heard(news("b", "c", "closed", version=2))
    assert chain.crashed == {"c"}


def test_a_witness_that_is_out_of_reach_proves_nothing(chain):
    chain.heard(news("b", "c", "closed"))
    chain.heard(news("a", "b", "silent"))
    assert chain.crashed == set()


def test_a_node_that_can_be_reached_has_not_crashed():
    overlay = Overlay("a")
    overlay.enter(view("abc", [("a", "b"), ("a", "c"), ("b", "c")]))
    overlay.heard(news("b", "c", "closed"))
    assert overlay.crashed == set()


def test_a_farewell_counts_as_a_crash_once_the_node_is_out_of_reach(chain):
    chain.farewell("c", life=0, key=chain.key)
    assert chain.crashed == set()
    chain.heard(news("b", "c", "silent"))
    assert chain.crashed == {"c"}


def test_a_process_started_again_under_the_same_name_is_not_the_member():
    overlay = Overlay("a")
    overlay.enter(view("ab", [("a", "b")], lives={"b": 5}))
    assert overlay.heard(news("b", "a", "open", version=7, life=6))
    assert overlay.reachable == {"a"}


def test_whose_clock_was_set_back_shows_that_it_lives_by_what_it_tells():
    """Its life has the lower number, but a dead process cannot have told what is newer than a later life of it."""
    overlay = Overlay("a")
    overlay.enter(view("ab", [("a", "b")], lives={"b": 5}))
    overlay.heard(news("b", "c", "open", version=12, life=9))
    assert overlay.lives.reborn == {"b"}
    assert overlay.heard(news("b", "a", "open", version=14, life=5))
    assert overlay.reachable == {"a", "b"}
    overlay.heard(news("b", "d", "open", version=13, life=9))  # It was long under way.
    assert overlay.lives.reborn == set()
    overlay.heard(news("a", "b", "closed", version=1, peer_life=9))
    assert overlay.reachable == {"a"}
    assert overlay.crashed == set()


def test_who_went_on_without_us_may_have_left_others_behind_when_it_ended():
    """However we learn that it ended: by its farewell, or because it was started again."""
    overlay = Overlay("a")
    overlay.enter(view("ba", [("a", "b")], lives={"b": 5}))
    overlay.heard(news("a", "b", "silent", version=1))
    newer = (overlay.key[0], overlay.key[1] + 1)
    overlay.farewell("b", life=5, key=newer)
    overlay.heard(news("b", "a", "open", version=7, life=6))
    assert overlay.reachable == {"a"}
    assert overlay.crashed == set()


def test_the_crash_of_an_earlier_life_proves_nothing_of_the_present_one():
    overlay = Overlay("a")
    overlay.enter(view("ab", [("a", "b")], lives={"b": 5}))
    overlay.heard(news("a", "b", "closed", version=1, peer_life=5))
    assert overlay.crashed == {"b"}
    overlay.enter(view("abc", [("a", "c"), ("b", "c")], lives={"b": 6}))
    overlay.heard(news("a", "c", "silent", version=2))
    assert overlay.reachable == {"a"}
    assert overlay.crashed == set()


def test_a_death_that_was_seen_stays_proved_when_a_later_process_of_that_name_answers():
    overlay = Overlay("a")
    overlay.enter(view("ba", [("a", "b")], lives={"b": 5}))
    overlay.heard(news("a", "b", "closed", version=1, peer_life=5))
    overlay.heard(news("a", "b", "open", version=2))
    assert overlay.reachable == {"a", "b"}  # It has not said yet who it is.
    overlay.heard(news("b", "a", "open", version=12, life=9))
    assert (overlay.reachable, overlay.crashed) == ({"a"}, {"b"})
    overlay.heard(news("a", "b", "closed", version=3, peer_life=9))
    overlay.heard(news("a", "b", "open", version=4))
    assert overlay.crashed == {"b"}


def test_a_death_that_was_seen_wrongly_is_taken_back_by_who_saw_it():
    overlay = Overlay("a")
    overlay.enter(view("ba", [("a", "b")], lives={"b": 5}))
    overlay.heard(news("a", "b", "closed", version=1, peer_life=5))
    overlay.heard(news("a", "b", "open", version=2, peer_life=5))
    overlay.heard(news("a", "b", "silent", version=3))
    assert (overlay.reachable, overlay.crashed) == ({"a"}, set())


def test_a_farewell_of_an_earlier_life_proves_nothing_of_the_present_one():
    overlay = Overlay("a")
    overlay.enter(view("ab", [("a", "b")], lives={"b": 6}))
    overlay.farewell("b", life=5, key=overlay.key)
    overlay.heard(news("a", "b", "silent"))
    assert overlay.crashed == set()


def test_the_farewell_of_the_life_in_the_view_counts_whatever_was_said_of_others():
    """Its clock was set back: a farewell of its earlier life, with the greater number, was long under way."""
    overlay = Overlay("a")
    overlay.enter(view("ab", [("a", "b")], lives={"b": 5}))
    overlay.heard(news("b", "a", "open", version=14, life=5))
    overlay.farewell("b", life=9, key=(0, 0))
    overlay.farewell("b", life=5, key=overlay.key)
    overlay.heard(news("a", "b", "silent"))
    assert overlay.crashed == {"b"}


def test_what_is_known_of_departed_nodes_is_forgotten_once_nobody_acts_in_an_older_view(chain):
    chain.heard(news("b", "c", "closed"))
    chain.enter(view("ab", [("a", "b")]))
    assert chain.crashed == {"c"}  # Somebody may still be in the view before, and c votes there.
    chain.settled()
    assert chain.crashed == set()
    assert chain.news == {}


def test_who_begins_to_listen_believes_the_view_about_who_lives_in_it():
    """A clock was set back, and only we, who were away, have heard of a later life of b, and of its end."""
    overlay = Overlay("j")
    overlay.heard(news("b", "a", "open", life=9))
    overlay.heard(news("a", "b", "closed", version=1, peer_life=9))
    overlay.farewell("b", life=9, key=(1, 0))
    now = view("ab", [("a", "b"), ("a", "j"), ("b", "j")], observers="j", lives={"b": 3})
    overlay.listens(now)
    overlay.enter(now)
    overlay.heard(news("a", "b", "open", version=2, peer_life=3))
    assert overlay.reachable == {"a", "b", "j"}
    overlay.heard(news("b", "a", "silent", version=2, life=3))
    overlay.heard(news("b", "j", "silent", life=3))
    assert "b" not in overlay.reachable
    assert "b" not in overlay.crashed


def test_the_crash_of_one_that_has_gone_on_without_us_proves_nothing(chain):
    chain.left_behind = True
    chain.heard(news("a", "b", "closed"))
    assert chain.crashed == set()


def test_of_a_script_that_failed_the_last_view_is_not_told_to_who_knows_another():
    """Its farewell counts for a view that had been voted for; a later view, told by others, would take that back."""
    lives = Lives(view("abc", [("a", "b"), ("a", "c")]))
    life = lives.of("b")
    lives.farewell("b", life, (1, 2), error=True)
    assert lives.farewells() == (("b", life, (1, 2), True),)
    assert not lives.is_news("b", life, (1, 3), error=True)
    lives.farewell("c", lives.of("c"), (1, 2))
    assert lives.is_news("c", lives.of("c"), (1, 3), error=False)
    assert not lives.is_news("c", lives.of("c"), (1, 2), error=False)
    assert not lives.is_news("x", 7, (1, 3), error=False)


def test_joiners_that_died_before_they_were_in_a_view_are_not_told_of_for_ever(chain):
    """Each joiner was told of all of them, and flooded it: 1,500 envelopes over each link, with every join."""
    chain.heard(news("a", "b", "silent", version=2))
    for number in range(500):
        for peer in ("a", "b", "c"):
            chain.heard(news(peer, f"n{number}", "silent"))
    told = chain.losses()
    assert len(told) == 1 + STRANGERS_TOLD
    assert {("a", "b"), ("c", "n499")} <= {(each.reporter, each.peer) for each in told}
