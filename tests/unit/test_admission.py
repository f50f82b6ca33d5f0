"""`chaosnet.scheduler.admission`: whether members wait for a state that is soon there, by how many they are."""

from __future__ import annotations

import pytest

from chaosnet.protocols.messages import LinkReading, Member, View
from chaosnet.scheduler.admission import JOIN_S, Admission, Wanting
from chaosnet.scheduler.views import Entrant

STEP_S, GBPS = 1.0, 1e9


def waits(members: int, fetch_s: float, joiners: int = 1, of_results: float = 3.0) -> bool:
    """Does a cluster wait for joiners whose state is there so soon, over a link to one member?

    `of_results`: bytes of state to one of results.
    """
    state_bytes = round((fetch_s - JOIN_S) * GBPS / 8)
    names = [f"n{number}" for number in range(members)]
    view = View(term=1, seq=1, scheduler="n0", members=tuple(Member(id=name) for name in names))
    admission = Admission(lambda: (round(state_bytes / of_results), STEP_S), lambda: state_bytes)
    for number in range(joiners):
        name = f"j{number}"
        admission.asks(name, 0.0)
        readings = {"n0": LinkReading(rate_bps=GBPS)}
        admission.opened(Wanting(Entrant(name, neighbors=("n0",)), False, 0.0, readings))
    admitted = admission.admissible(view)
    assert [each.node for each in admitted] == [f"j{number}" for number in range(joiners)]
    assert len({each.blocking for each in admitted}) == 1, "for all, or for none"
    return admitted[0].blocking


@pytest.mark.parametrize(
    ("members", "steps"), [(1, 1.0), (2, 1.0), (4, 0.8), (8, 0.55), (20, 0.4)]
)  # At most one, of what a joiner (2 steps) and each member (0.3) save.
def test_the_more_would_wait_the_sooner_the_state_must_be_there(members, steps):
    assert waits(members, steps - 0.01)
    assert not waits(members, steps + 0.01)


def test_for_two_joiners_twice_as_many_wait():
    assert not waits(20, 0.48, of_results=5.5)
    assert waits(20, 0.48, joiners=2, of_results=5.5)
    assert not waits(20, 0.52, joiners=2, of_results=5.5), "nor do results take a tenth of their links"
