"""`chaosnet.node.mailbox`: what the training thread waits for."""

import threading

import pytest

from chaosnet.node.mailbox import Interrupted, Mailbox, TensorName
from chaosnet.protocols.messages import Tensor

NAME = TensorName("a", 3, 2)


def part(index=0, of=1, seq=1, step=5):
    return Tensor(key=(1, seq), step=step, target="b", way="a", micro_batch=3, layer=2, part=index, parts=of)


@pytest.fixture
def called():
    return threading.Event()


@pytest.fixture
def mailbox(called):
    mailbox = Mailbox(called.is_set)
    mailbox.begin((1, 1), 5)
    return mailbox


def test_parts_come_in_any_order_and_are_given_in_theirs(mailbox):
    mailbox.put(part(1, of=2), "second")
    mailbox.put(part(0, of=2), "first")
    assert [payload for _, payload in mailbox.take(NAME)] == ["first", "second"]


def test_who_waits_is_woken_by_the_last_part(mailbox):
    timer = threading.Timer(0.01, lambda: mailbox.put(part(), "late"))
    timer.start()
    assert mailbox.take(NAME)[0][1] == "late"


def test_who_waits_is_woken_by_something_else_to_hear(mailbox, called):
    def call():
        called.set()
        mailbox.wake()

    threading.Timer(0.01, call).start()
    with pytest.raises(Interrupted):
        mailbox.take(NAME)


def test_what_has_come_for_an_earlier_attempt_is_void(mailbox, called):
    mailbox.put(part(), "of the void one")
    mailbox.begin((1, 2), 5)
    mailbox.put(part(seq=1), "late")
    called.set()
    with pytest.raises(Interrupted):
        mailbox.take(NAME)


def test_what_comes_for_the_next_step_is_kept(mailbox):
    mailbox.put(part(step=6), "early")
    mailbox.begin((1, 1), 6)
    assert mailbox.take(NAME)[0][1] == "early"
