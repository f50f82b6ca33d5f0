"""`chaosnet.node.vitals`: what a node knows of itself."""

from chaosnet.node.vitals import TIMES_KEPT, Vitals
from chaosnet.protocols.events import Received
from chaosnet.protocols.messages import Envelope, ScaleInRequest


def test_the_last_times_are_kept_that_the_scheduler_took_for_a_request():
    """All of them were, for as long as the process ran."""
    vitals = Vitals()
    for index in range(3 * TIMES_KEPT):
        envelope = Envelope(source="b", target="a", serial=index + 1, body=ScaleInRequest(node="b"))
        vitals.handled(Received("b", envelope), float(index))
    assert [*vitals.handling_ms["ScaleInRequest"]] == [*map(float, range(2 * TIMES_KEPT, 3 * TIMES_KEPT))]
