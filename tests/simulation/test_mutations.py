"""A simulation that finds nothing may look at nothing: it must notice when a rule is broken on purpose."""

import msgspec
import pytest

from chaosnet.node import core as node_core
from chaosnet.protocols import overlay, step_sync
from chaosnet.protocols.effects import ResetAttempt
from chaosnet.protocols.election import Election
from chaosnet.scheduler.core import Scheduler
from chaosnet.simulator import Violation, run

SEEDS = 250  # Tried in order; the first that notices ends the search.


def no_quorum(monkeypatch):
    """Whoever can be reached goes on, in all parts of a partition."""
    monkeypatch.setattr(overlay, "has_quorum", lambda electorate, alive, crashed: True)


def silence_proves_a_crash(monkeypatch):
    monkeypatch.setattr(overlay.Overlay, "crashed", property(lambda self: {*self.graph} - self.reachable))


def several_votes_a_term(monkeypatch):
    original = Election.on_request

    def forgetful(self, request, key, scheduler_missing):
        self.voted_term = 0
        self.term = min(self.term, request.term - 1)
        return original(self, request, key, scheduler_missing)

    monkeypatch.setattr(Election, "on_request", forgetful)


def sums_survive_a_flush(monkeypatch):
    original = node_core.Agent.handle

    def handle(self, event, now_s):
        return [each for each in original(self, event, now_s) if not isinstance(each, ResetAttempt)]

    monkeypatch.setattr(node_core.Agent, "handle", handle)


def attempts_have_no_name(monkeypatch):
    """Messages count by their step alone, whichever attempt they are of."""
    original = step_sync.StepSync._received

    def received(self, event):
        message = event.message
        if self.view is not None and message.step == self.step and not self.frozen:
            message = msgspec.structs.replace(message, key=self.view.key)
        return original(self, type(event)(event.peer, message, event.payload))

    monkeypatch.setattr(step_sync.StepSync, "_received", received)


def results_are_not_passed_on(monkeypatch):
    """Who has completed the step that others have not keeps the result for itself."""
    monkeypatch.setattr(step_sync.StepSync, "_serve_last_result", lambda self: [])


def a_step_that_somebody_completed_is_done_over(monkeypatch):
    """A flush asks the others, and not those who are ahead."""
    original = Scheduler._on_flush_ok

    def on_flush_ok(self, answer):
        behind = msgspec.structs.replace(answer, step=min(answer.step, self.sync.step))
        return original(self, behind)

    monkeypatch.setattr(Scheduler, "_on_flush_ok", on_flush_ok)


def parts_are_added_twice(monkeypatch):
    original = step_sync.StepSync._on_up

    def on_up(self, peer, up, payload):
        effects = original(self, peer, up, payload)
        return effects[:1] + effects

    monkeypatch.setattr(step_sync.StepSync, "_on_up", on_up)


def views_are_switched_to_without_being_prepared_by_all(monkeypatch):
    monkeypatch.setattr(
        step_sync, "merge_votes", lambda votes: max((vote for vote in votes if vote), default=None)
    )


@pytest.mark.parametrize(
    "mutate",
    [
        no_quorum,
        silence_proves_a_crash,
        several_votes_a_term,
        sums_survive_a_flush,
        attempts_have_no_name,
        results_are_not_passed_on,
        a_step_that_somebody_completed_is_done_over,
        parts_are_added_twice,
        views_are_switched_to_without_being_prepared_by_all,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_the_simulation_notices_when(mutate, monkeypatch):
    mutate(monkeypatch)
    for seed in range(SEEDS):
        try:
            run(seed)
        except Violation as violation:
            assert f"seed {seed}" in str(violation)
            return
    raise AssertionError(f"{SEEDS} runs did not notice")
