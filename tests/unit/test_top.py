"""`chaosnet top`: its screen, driven by textual's own pilot, and what it remembers of a watch."""

import asyncio
import html
import os
import queue
import re
import signal
from contextlib import asynccontextmanager

import msgspec
import pytest
from statuses import STATUS

from chaosnet import extras
from chaosnet.commands.top import top
from chaosnet.errors import ConfigError, PeerUnreachable
from chaosnet.protocols.status import EventRow, StepRow
from chaosnet.terminal.top_app import TERMINATED, Top
from chaosnet.terminal.top_story import RATE, Story

SMALL, LARGE = (80, 24), (200, 60)
EIGHT = [f"n{number}" for number in range(8)]


def of_eight():
    a = STATUS.members[0]
    around = {name: (EIGHT[at - 1], EIGHT[(at + 1) % 8]) for at, name in enumerate(EIGHT)}
    rows = [
        msgspec.structs.replace(a, node=name, id=name, battery_pct=-1.0, neighbors=around[name])
        for name in EIGHT
    ]
    return msgspec.structs.replace(STATUS, members=tuple(rows), scheduler="n0", links=(), waiting=None)


class Watched:
    """A cluster that is what the test says."""

    def __init__(self):
        self.told = queue.Queue()

    def watch(self, hear):
        while True:
            match self.told.get(timeout=30):
                case PeerUnreachable() as error if str(error).startswith("nobody"):
                    hear(error)
                case PeerUnreachable() as error:
                    raise error
                case status:
                    yield status


@asynccontextmanager
async def screen(size, first):
    """The app, what it watches, and a function that tells what is on the screen once all is shown."""
    watched = Watched()
    app = Top(first, watched.watch)
    async with app.run_test(size=size) as pilot:

        async def shown(*parts):
            """Waits for all of that text."""
            text = ""
            for _ in range(1000):
                await pilot.pause(0.02)
                text = html.unescape(re.sub("<[^>]*>", "\n", app.export_screenshot())).replace("\xa0", " ")
                if all(part in text for part in parts):
                    return text
            raise AssertionError(f"not all of {parts} in {text}")

        try:
            yield app, pilot, watched, shown
        finally:
            watched.told.put(PeerUnreachable("it is over"))  # For its thread.


def played(play, size=SMALL, first=STATUS):
    async def run():
        async with screen(size, first) as parts:
            await play(*parts)

    asyncio.run(run())


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_the_whole_cluster_of_eight_is_on_a_small_screen_and_on_a_large_one(size):
    async def play(app, pilot, watched, shown):
        rows = [f"{name} " for name in EIGHT]
        text = await shown("8 members", *rows, "b joins: in 0.5 s", "loss 0.2500", "quit")
        assert ("n0 - n1" in text) == (size is LARGE)

    played(play, size, of_eight())


def test_a_small_screen_shows_links_at_a_key_and_events_again():
    async def play(app, pilot, watched, shown):
        await pilot.press("l")
        assert "b joins" not in await shown("a - b")
        await pilot.press("l")
        assert "a - b" not in await shown("b joins")

    played(play)


def test_another_cluster_at_the_same_address_has_its_own_events_and_curves():
    event = msgspec.structs.replace(STATUS.events[0], node="z")
    other = msgspec.structs.replace(
        STATUS, cluster="another", step=3, metrics={"accuracy": 0.5}, events=(event,), steps=()
    )

    async def play(app, pilot, watched, shown):
        await shown("b joins", "loss 0.2500")
        watched.told.put(other)
        assert "b joins" not in await shown("accuracy 0.5000", "z ")

    played(play)
    story = Story()
    for status in (STATUS, other):
        story.hear(status)
    assert [*story.events] == [event] and [*story.curves["accuracy"]] == [0.5] and "loss" not in story.curves


def test_what_the_cluster_tells_is_shown_and_a_pause_keeps_what_is():
    async def play(app, pilot, watched, shown):
        watched.told.put(msgspec.structs.replace(STATUS, step=1050, metrics={"loss": 0.125}))
        await shown("loss 0.1250")
        await pilot.press("p")
        await shown("paused")
        watched.told.put(msgspec.structs.replace(STATUS, step=2050))
        watched.told.put(PeerUnreachable("nobody at a:1"))  # Comes after it, and is said.
        text = await shown("nobody at a:1")
        assert "step 1,050" in text and "2,050" not in text
        await pilot.press("p")
        watched.told.put(msgspec.structs.replace(STATUS, step=3050))
        assert "nobody" not in await shown("step 3,050")

    played(play)


def test_the_next_curve_and_the_help_are_a_key_away():
    async def play(app, pilot, watched, shown):
        await shown("loss 0.2500")
        await pilot.press("m")
        await shown("samples/s 812")
        await pilot.press("question_mark")
        await shown("so long its last step has waited")
        await pilot.press("x")
        assert "so long its last" not in await shown("links/events")

    played(play)


def test_it_ends_with_the_reason_when_the_cluster_is_gone():
    async def play(app, pilot, watched, shown):
        watched.told.put(PeerUnreachable("the cluster has not answered for 30 s"))
        for _ in range(1000):
            await pilot.pause(0.02)
            if app.return_code:
                break
        assert (app.return_code, app.return_value) == (1, "the cluster has not answered for 30 s")

    played(play)


def test_a_signal_that_ends_it_leaves_the_terminal_as_it_was():
    async def play(app, pilot, watched, shown):
        await shown("recent events")
        # Or the signal would end the tests.
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100):
            await pilot.pause(0.02)
            if app.return_code:
                break
        assert app.return_code == TERMINATED == 143

    played(play)


def test_a_story_has_each_event_and_each_step_once():
    def at(step, loss, **more):
        return msgspec.structs.replace(STATUS, steps=(), step=step, metrics={"loss": loss}, **more)

    def row(step, loss):
        return StepRow(step=step, time_s=0.0, seconds=0.1, samples=8, metrics={"loss": loss})

    def event(step):
        return EventRow(kind="joined", node="b", detail="", step=step, time_s=0.0, handling_ms=0.0)

    story = Story()
    story.hear(at(8, 3.0, events=(event(1), event(2))))
    story.hear(
        msgspec.structs.replace(at(9, 2.0, events=(event(2), event(3))), steps=(row(6, 9.0), row(8, 2.0)))
    )
    story.hear(at(9, 2.0, events=(event(3),)))
    story.hear(at(11, None, events=()))
    assert [*story.curves["loss"]] == [3.0, 2.0]
    assert [each.step for each in story.events] == [1, 2, 3]
    assert story.names == ["loss", RATE]


def test_without_its_packages_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=r"chaosnet top needs textual.*pip install 'chaosnet\[top\]'"):
        top.main(["127.0.0.1:9"], standalone_mode=False)
