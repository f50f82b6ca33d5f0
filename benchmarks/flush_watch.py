"""When a member of pipelines hears FLUSH, enters the view that is installed, and computes again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn


class Used(NamedTuple):
    """Until `at_s` (monotonic), a process has used so much of the processors."""

    at_s: float
    processor_s: float

    @classmethod
    def now(cls) -> Used:
        return cls(time.monotonic(), time.process_time())


@dataclass
class Flushed:
    """A flush as one member saw it.

    `edit_s`: processor time of its loop to enter the view: links and trees that change, and all that is sent then.
    `first`: when it began a first layer; None if it has none.
    """

    heard: Used
    edit_s: float = 0.0
    first: Used | None = None


class FlushWatch:
    """Notes the flushes of one member, whose first layer is given."""

    def __init__(self, trainer: Any, first: nn.Module) -> None:
        self.seen: list[Flushed] = []
        self._agent = trainer.engine.session.loop.agent
        self._handle = self._agent.handle
        self._agent.handle = self._watched
        first.register_forward_pre_hook(self._computes)

    def _watched(self, event: Any, now_s: float) -> Any:
        before, heard, began_s = self._agent.follower.flush, Used.now(), time.thread_time()
        effects = self._handle(event, now_s)
        flush = self._agent.follower.flush
        if flush is not None and before is None:
            self.seen.append(Flushed(heard))
        elif flush is None and before is not None and self.seen:
            # When the loop comes to this, all effects have been performed.
            asyncio.get_running_loop().call_soon(self._entered, self.seen[-1], began_s)
        return effects

    def _entered(self, seen: Flushed, began_s: float) -> None:
        seen.edit_s = time.thread_time() - began_s

    def _computes(self, *_: object) -> None:
        if self.seen and self._agent.follower.flush is None and self.seen[-1].first is None:
            self.seen[-1].first = Used.now()


class FlushTimes(NamedTuple):
    """Of one flush.

    `to_first_s`: from the first FLUSH that anybody heard until all who have a first layer had begun it.
    `processor_s`: what a member used from its FLUSH until then, the most. `edits_s`: of each member.
    """

    to_first_s: float
    processor_s: float
    edits_s: tuple[float, ...]


def times_of(found: Sequence[Sequence[Flushed]], killed_s: float, committed_s: float) -> FlushTimes:
    """Of the flush after a member was killed, from what each other one saw. `committed_s`: of the step done over."""
    within = ([seen for seen in each if killed_s < seen.heard.at_s < committed_s] for each in found)
    flushed = [each[-1] for each in within if each]
    # Who began later has the first layer only since a later change.
    began = [(seen.heard, seen.first) for seen in flushed if seen.first and seen.first.at_s < committed_s]
    return FlushTimes(
        max(first.at_s for _, first in began) - min(seen.heard.at_s for seen in flushed),
        max(first.processor_s - heard.processor_s for heard, first in began),
        tuple(seen.edit_s for seen in flushed),
    )
