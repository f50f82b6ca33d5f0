"""`chaosnet.node.telling`: what people hear of waits."""

import asyncio

from chaosnet.node.telling import WAIT_TOLD_S, Telling


def told_in(waits):
    """What is told of these calls of a telling, by a loop."""
    told = []

    async def wait():
        telling = Telling(None, told.append, None, None, why=lambda: None)
        for call in waits:
            call(telling)
            await asyncio.sleep(WAIT_TOLD_S + 0.1)

    asyncio.run(wait())
    return told


def test_a_wait_that_a_rejoin_ends_is_over():
    """Neither the old life nor the new one says that it goes on, as in neither it both waited and went on."""
    assert told_in(
        [lambda telling: telling.parked("alone"), Telling.forget, lambda telling: telling.parked(None)]
    ) == [
        "alone",
        None,
    ]


def test_what_is_about_to_be_told_of_a_life_that_is_over_is_not():
    def ends(telling):
        telling.parked("alone")
        telling.forget()

    assert told_in([ends, lambda telling: telling.parked(None)]) == []
