"""`chaosnet.simulator.coverage`: what it watches and names is there, or nobody would ever see it."""

import ast
import inspect
import textwrap
import typing

import pytest

from chaosnet.commands.simulation import LIVES_OF_COVERAGE, _tell_summary
from chaosnet.protocols import messages
from chaosnet.protocols.flush import FlushFollower
from chaosnet.protocols.messages import Flush
from chaosnet.simulator import Summary, coverage
from chaosnet.simulator.random_run import LifeOptions


def assigned(core):
    """Names that the class or one below it declares as fields, or that its methods assign to on `self`."""
    return set().union(*(_assigned(each) for each in core.__mro__[:-1]))


def _assigned(core):
    tree = ast.parse(textwrap.dedent(inspect.getsource(core)))
    fields = {node.target.id for node in tree.body[0].body if isinstance(node, ast.AnnAssign)}
    stores = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return fields | {
        node.attr for node in stores if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


@pytest.mark.parametrize("core", coverage._WATCHED, ids=lambda core: core.__name__)
def test_every_watched_attribute_exists(core):
    assert coverage._WATCHED[core].keys() <= assigned(core)


def test_the_transitions_of_exactly_the_watched_cores_are_expected():
    watched = {core.__name__.lstrip("_") for core in coverage._WATCHED}
    assert watched == coverage._LEADS_TO.keys()


def test_kinds_that_are_not_played_exist():
    unions = (messages.WireMessage, messages.Routed)
    assert {kind.__name__ for union in unions for kind in typing.get_args(union)} >= coverage.UNPLAYED


def test_a_flush_is_seen_where_it_begins_and_ends():
    with coverage.watched() as seen:
        follower = FlushFollower("a", None, None)
        follower.flush = Flush(term=1, number=1, scheduler="a", key=(1, 1), step=0)
        follower.flush = None
    assert {"FlushFollower: not frozen -> frozen", "FlushFollower: frozen -> not frozen"} == seen
    assert seen <= coverage.TRANSITIONS


@pytest.mark.parametrize(("runs", "listed"), [(100, False), (LIVES_OF_COVERAGE, True)])
def test_a_few_lives_are_not_blamed_for_what_they_have_not_come_by(runs, listed, capsys):
    summary = Summary(LifeOptions(nodes=(3, 5)), runs)
    _tell_summary(summary, {"seconds": 1.0, "rate_per_s": 100.0})
    told = capsys.readouterr().out
    assert ("not reached: " in told) == listed
    assert ("which is usual" in told) != listed
