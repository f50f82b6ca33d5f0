"""`chaosnet.node.vitals`: what a node knows of itself."""

import psutil

from chaosnet.node.outcomes import Rates
from chaosnet.node.transport.transport import Transport
from chaosnet.node.vitals import NEW_TREES, TIMES_KEPT, Vitals, lately
from chaosnet.protocols.events import Received
from chaosnet.protocols.messages import Envelope, ScaleInRequest
from chaosnet.protocols.sentences import SENTENCES
from chaosnet.protocols.status import EVENTS_TOLD, EventRow


def test_the_last_times_are_kept_that_the_scheduler_took_for_a_request():
    """All of them were, for as long as the process ran."""
    vitals = Vitals()
    for index in range(3 * TIMES_KEPT):
        envelope = Envelope(source="b", target="a", serial=index + 1, body=ScaleInRequest(node="b"))
        vitals.handled(Received("b", envelope), float(index))
    assert [*vitals.handling_ms["ScaleInRequest"]] == [*map(float, range(2 * TIMES_KEPT, 3 * TIMES_KEPT))]


def test_trees_that_are_planned_anew_all_the_time_do_not_hide_what_else_happened():
    def event(kind, step):
        return EventRow(kind=kind, node="a", detail="", step=step, time_s=0.0, handling_ms=0.0)

    assert NEW_TREES in SENTENCES
    happened = [event("joined", step) for step in range(EVENTS_TOLD)]
    trees = [event(NEW_TREES, 100 + step) for step in range(30)]
    assert lately((*happened, *trees)) == (*happened[1:], trees[-1])
    assert lately((*trees[:3], happened[0])) == (trees[2], happened[0])
    assert lately(()) == ()


def test_a_process_that_may_open_no_more_files_trains_on(monkeypatch):
    """Once a second it reads what it has used, from a file; that could not be opened, and the node was dead."""

    def too_many(*paths, **options):
        raise OSError(24, "Too many open files")

    vitals, transport = Vitals(), Transport("a", "", None)
    for name in ("cpu_percent", "memory_info"):
        monkeypatch.setattr(psutil.Process, name, too_many)
    assert vitals.readings(Rates(), {}, transport).memory_bytes == 0
    monkeypatch.undo()
    assert vitals.readings(Rates(), {}, transport).memory_bytes > 0
