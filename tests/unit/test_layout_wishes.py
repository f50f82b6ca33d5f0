"""What clients ask of the pipelines' layout, and what each of them is told."""

from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from chaosnet.engines.layout_wishes import LayoutWishes


@pytest.fixture
def asked():
    """Two clients' wishes heard within one step, and the answers: (client, whether it runs)."""

    def hear(first, second):
        answers, waiting = [], SimpleQueue()
        session = SimpleNamespace(
            loop=SimpleNamespace(asked=waiting), post=lambda event: answers.append((event.asker, event.ok))
        )
        wishes = LayoutWishes(session, "", layers=4, micro_batches=4)
        for asker, layout in (("a", first), ("b", second)):
            waiting.put(SimpleNamespace(asker=asker, layout=layout))
        wishes.hear(4)
        wishes.agree(wishes.own)
        wishes.answer(None, None, step=7)
        return answers

    return hear


def test_two_who_ask_for_the_same_are_both_told_once_it_is_agreed(asked):
    assert asked("2+2", "2+2") == [("a", True), ("b", True)]


def test_of_two_who_ask_for_other_layouts_the_first_is_told_that_it_will_not_be(asked):
    assert asked("2+2", "4") == [("a", False), ("b", True)]
