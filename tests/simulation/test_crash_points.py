"""Each negotiation, with a crash at each of its messages: `chaosnet simulate --crash-points` runs them all.

Here: that none is missing, and every so many of them.
"""

import os

import pytest

from chaosnet.protocols.errors import ConfigError
from chaosnet.simulator.coverage import KINDS
from chaosnet.simulator.crash_points import enumerate_points, play, play_all, point_named, points
from chaosnet.simulator.negotiations import BESIDE, NEGOTIATIONS, When

EVERY = 45  # Of the crash points of up to four nodes.

# Sent only when something else fails as well: no share of any negotiation that one crash disturbs. The last one needs
# a lost quorum and a person.
ELSEWHERE = {"PrepareFailed", "NoSnapshot", "Outlived", "ScaleOutRefused", "DeclaredDead"}

# Found something at the time (docs/bugs_found.md).
KEPT = {
    "a joiner became a member without the state it had dropped": "join-streaming/3/0/113/receiver-after",
    "who let a blocking joiner in died before telling it": "join-blocking/3/0/74/receiver-after",
    "a proof of death was lost when the dead was started again": "rejoin/3/0/99/sender-before/restart",
}


@pytest.fixture(scope="module")
def all_points():
    return enumerate_points(range(2, 5), [0])


@pytest.mark.parametrize("name", NEGOTIATIONS)
def test_every_kind_of_message_that_a_negotiation_sends_is_among_its_crash_points(name, all_points):
    struck = {point.sent.kind for point in all_points if point.negotiation == name}
    assert struck >= NEGOTIATIONS[name].kinds


def test_every_kind_of_message_of_the_protocol_is_among_them(all_points):
    beside = {kind.__name__ for kind in BESIDE}
    assert {point.sent.kind for point in all_points} >= KINDS - beside - ELSEWHERE


def test_every_participant_crashes_at_every_message():
    for name in ("join-streaming", "leave", "election"):
        found = list(points(NEGOTIATIONS[name], 4, 0))
        by_index = {}
        for point in found:
            by_index.setdefault(point.index, set()).add(point.when)
        assert sorted(by_index) == list(range(len(by_index)))
        ends = {When.SENDER_BEFORE, When.SENDER_AFTER, When.RECEIVER_BEFORE, When.RECEIVER_AFTER}
        assert all(whens >= ends for whens in by_index.values())
        assert When.SCHEDULER in set().union(*by_index.values())


@pytest.mark.slow
@pytest.mark.parametrize("restart", [False, True], ids=["", "restart"])
def test_whoever_crashes_at_whatever_message_the_others_come_to_rest(restart, all_points):
    chosen = enumerate_points(range(2, 4), [1], restart=True) if restart else all_points
    played = play_all(chosen[:: EVERY * (1 + restart)], processes=os.cpu_count())
    violations = [story for each in played.values() for story in each.violations.values()]
    assert not violations, violations[0]
    reached = sum(each.points - len(each.not_reached) for each in played.values())
    assert reached > 0.8 * sum(each.points for each in played.values())


@pytest.mark.parametrize("name", KEPT.values(), ids=KEPT.keys())
def test_crash_points_that_once_failed_keep_all_rules(name):
    assert play(point_named(name)).victims


def test_an_unknown_crash_point_is_refused():
    with pytest.raises(ConfigError, match="'step/2/0/99999/scheduler' is none"):
        point_named("step/2/0/99999/scheduler")
