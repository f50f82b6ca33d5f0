"""The event-driven simulation of training: what a system gets done between events."""

import pytest

from chaosnet.simulator.training import Decision, Event, Span, train


class Scripted:
    """Decides what it was told to."""

    name = "scripted"

    def __init__(self, *decisions):
        self.first, *self.others = decisions

    def began(self):
        return self.first

    def met(self, event):
        return self.others.pop(0)


def test_training_stands_still_for_a_transition_and_goes_on_at_the_new_speed():
    system = Scripted(Decision(2.0, 0.0, "stay"), Decision(1.0, 10.0, "layout"))
    run = train(system, ["a", "b"], [Event(40.0, gone=("b",))], 100.0)
    assert run.samples == 40 * 2.0 + 50 * 1.0 and run.stood_s == 10
    assert run.spans == [Span(0.0, 2.0, 2), Span(40.0, 0.0, 1), Span(50.0, 1.0, 1)]


def test_a_transition_is_not_shorter_because_another_event_comes_in_between():
    system = Scripted(
        Decision(1.0, 0.0, "stay"), Decision(1.0, 60.0, "checkpoint"), Decision(0.5, 2.0, "fill")
    )
    run = train(system, ["a", "b"], [Event(10.0, gone=("b",)), Event(20.0, come=("b",))], 100.0)
    assert run.stood_s == pytest.approx(60) and run.samples == pytest.approx(10 + 0.5 * 30)
    assert [span.from_s for span in run.spans] == sorted(span.from_s for span in run.spans)
    assert run.spans[-1] == Span(70.0, 0.5, 2)
