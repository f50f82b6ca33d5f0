"""`chaosnet.protocols.view_change`: what a change tells is the view, and its size is that of what has happened."""

import itertools
import random

import networkx as nx
import pytest
from msgspec.structs import replace

from chaosnet.errors import PlanInfeasible, RemoteProtocolError
from chaosnet.protocols.codec import decode, encode
from chaosnet.protocols.messages import Envelope, Member, Prepare, Tree, View, ViewChange
from chaosnet.protocols.view_change import applied, told_against
from chaosnet.scheduler import views
from chaosnet.scheduler.sync_plan import POLICIES
from chaosnet.scheduler.views import AddJoiners, AddLink, Entrant, Nothing, Promote, Remove, RemoveLink


def planned(view):
    graph = nx.Graph([each for each in view.links if {*each} <= view.member_set])
    graph.add_nodes_from(view.member_ids)
    return views.with_trees(view, graph, POLICIES["fapt"])


def ring(nodes):
    names = [f"n{index:03d}" for index in range(nodes)]
    links = {tuple(sorted(pair)) for pair in zip(names, [*names[1:], names[0]], strict=True)}
    members = tuple(Member(id=name, addresses=(f"{name}:1",), life=7) for name in names)
    return planned(View(term=1, seq=1, scheduler=names[0], members=members, links=tuple(sorted(links))))


def let_in(*joiners):
    return AddJoiners(joiners=joiners)


def two_that_hang_together(first, second, member):
    return Entrant(first, neighbors=(member,), blocking=True), Entrant(
        second, neighbors=(first,), blocking=True
    )


def next_views(view, rng, count):
    """Views as a scheduler proposes, or a flush installs, one after the other."""
    numbers = itertools.count()
    while count:
        nodes = sorted(view.node_set)
        again = rng.choice(view.observer_ids or ("x",))
        pair = tuple(sorted(rng.sample(nodes, 2)))
        change = rng.choice(
            [
                let_in(Entrant(f"o{next(numbers)}", neighbors=view.member_ids[:2])),
                let_in(Entrant(again, neighbors=view.member_ids[:1], life=next(numbers))),
                let_in(
                    *two_that_hang_together(f"b{next(numbers)}", f"c{next(numbers)}", view.member_ids[-1])
                ),
                Promote(node=again),
                Remove(node=rng.choice(nodes)),
                AddLink(link=pair),
                RemoveLink(link=rng.choice(view.links), lost=True),
                None,
            ]
        )
        shrinks = change is None or isinstance(change, Remove)
        if change == Remove(node=view.scheduler) or (shrinks and len(view.members) < 4):
            continue  # A term ends with its scheduler.
        key = (view.term + (change is None), view.seq + 1)
        try:
            if change is None:
                alive = {*rng.sample(nodes, len(nodes) - 1)}
                elected = min(alive & view.member_set)
                following = views.survivors(view, alive, {*view.links}, key, elected)
            else:
                following = views.apply_change(view, change, key, step=5)
            following = planned(following)
        except (Nothing, PlanInfeasible):
            continue
        yield view, following
        view, count = following, count - 1


@pytest.mark.parametrize("seed", range(20))
def test_what_is_told_against_a_view_leads_to_the_next_one(seed):
    for base, view in next_views(ring(6), random.Random(seed), 30):
        told = told_against(base, view)
        assert isinstance(told, ViewChange)
        frame = encode(Envelope(source="a", target="*", serial=1, body=Prepare(view=told)))
        assert applied(base, decode(frame).body.view) == view


def test_views_that_no_scheduler_makes_one_of_the_other_are_told_whole():
    view = ring(4)
    backwards = replace(view, seq=2, members=view.members[::-1])
    assert told_against(view, backwards) is backwards


def test_a_change_is_as_large_as_what_has_happened():
    def sizes(nodes):
        base = ring(nodes)
        joined = views.apply_change(base, let_in(Entrant("j", neighbors=base.member_ids[:2])), (1, 2), 5)
        view = planned(joined)
        assert isinstance(told_against(base, view), ViewChange)
        return len(encode(Prepare(view=view))), len(encode(Prepare(view=told_against(base, view))))

    (small, small_change), (large, large_change) = sizes(30), sizes(300)
    assert large > 9 * small
    assert large_change < 1.1 * small_change < 1000


def test_who_shares_the_base_and_the_change_shares_the_view():
    base, view = next(next_views(ring(4), random.Random(1), 1))
    change = told_against(base, view)
    assert applied(base, change) is applied(base, change)


BASE = ring(4)


@pytest.mark.parametrize(
    "lie, told",
    [
        ({"base": (1, 9)}, r"told against \(1, 9\), not \(1, 1\)"),
        ({"gone": ("n001",)}, "an end that is no node"),
        ({"links": (("n000", "n000"),)}, "not in order"),
        ({"scheduler": "x"}, "its scheduler 'x' is no member"),
        ({"observers": (Member(id="o"),)}, "does not reach all nodes"),
    ],
)
def test_a_change_to_what_no_step_could_run_in_is_refused(lie, told):
    change = told_against(BASE, replace(BASE, seq=2))
    assert applied(BASE, change) == replace(BASE, seq=2)
    with pytest.raises(RemoteProtocolError, match=told):
        applied(BASE, replace(change, **lie))


def test_a_tree_in_the_place_of_none_is_told_whole():
    base = replace(BASE, trees=BASE.trees[:1])
    more = Tree(root="n003", parent={"n002": "n003", "n001": "n002", "n000": "n003"}, share=0.5)
    view = replace(base, seq=2, trees=(replace(base.trees[0], share=0.5), more))
    assert applied(base, told_against(base, view)) == view
    assert applied(view, told_against(view, replace(base, seq=3))) == replace(base, seq=3)
