"""`chaosnet.integrations.dealt`: when the loop of a framework gets no more batches, and when nothing more at all."""

import copy
import pickle
from types import SimpleNamespace

import pytest

from chaosnet.integrations import dealt


def loader(batches, is_over, done):
    cluster = SimpleNamespace(
        epoch=0, batches=lambda *given, **rules: iter(batches), session=SimpleNamespace(done=done)
    )
    return dealt.DealtLoader(cluster, None, lambda: 1, is_over, {})


def batch(number):
    return SimpleNamespace(data=number)


@pytest.mark.parametrize("batches", [[], [batch(1)]], ids=["between steps", "with a batch in hand"])
def test_a_node_that_has_left_at_ctrl_c_ends_there_and_does_not_evaluate(monkeypatch, batches):
    monkeypatch.setattr(dealt, "exit_wanted", lambda: True)
    monkeypatch.setattr(dealt, "script_captures_exit", lambda: False)
    with pytest.raises(SystemExit):
        list(loader(batches, lambda: True, done=True))


def test_what_was_asked_for_is_done_and_the_script_goes_on():
    assert list(loader([batch(1), batch(2)], lambda: False, done=False)) == [1, 2]
    assert list(loader([batch(1), batch(2)], lambda: True, done=False)) == []


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_schedule_as_a_framework_sees_it_can_be_copied(copied):
    """That ended with a RecursionError."""
    told = dealt.ToldSchedule(SimpleNamespace(base_lrs=[0.1]))
    assert copied(told).base_lrs == [0.1]
    with pytest.raises(AttributeError, match="missing"):
        told.missing  # noqa: B018
