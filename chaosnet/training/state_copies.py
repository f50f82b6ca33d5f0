"""Copies of the training state between two steps: for a joining node, for a checkpoint, or one for both."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from ..node.session import Session
from ..node.state.checkpoint_plan import Mark
from ..node.state.flat_state import NO_MEMORY, Capture, Snapshot, StateChanged
from ..node.state.training_state import TrainingState
from ..protocols.effects import TakeSnapshot
from ..protocols.errors import ConfigError
from .checkpointing import Checkpointing

POLL_S = 0.002


class StateCopies:
    """The copies of one node, one at a time. The methods are for its training thread.

        a step is complete --take--> most is copied beside the next forward --finish--> the optimizer may step

    A blocking joiner is served inside `take`, from the live tensors, as nothing can change them meanwhile.
    """

    def __init__(
        self,
        state: TrainingState,
        session: Session,
        checkpointing: Checkpointing | None,
        say: Callable[[str], None],
    ) -> None:
        self._state, self._session, self._checkpointing, self._say = state, session, checkpointing, say
        self._capture: Capture | None = None
        self._for_joiner = False  # The capture, and not only for a checkpoint.

    def take(
        self, step: int, runtime: dict[str, Any], joiner: TakeSnapshot | None, mark: Mark | None
    ) -> None:
        """Copy the state after `step` steps, for `joiner`, the checkpoint `mark`, or both."""
        self.finish()
        # It gets little, at once; a checkpoint is another copy.
        if joiner is not None and self._state.parted:
            self._take(step, runtime, joiner, None)
            self.finish()
            joiner = None
        if joiner is not None or mark is not None:
            self._take(step, runtime, joiner, mark)

    def _take(
        self, step: int, runtime: dict[str, Any], joiner: TakeSnapshot | None, mark: Mark | None
    ) -> None:
        checkpointing = self._checkpointing
        part = checkpointing.tensors_of(mark) if checkpointing and mark else None
        only, for_joiner = (part, False) if joiner is None else (None, bool(self._state.parted))
        held = joiner is not None and joiner.blocking and mark is None
        try:
            capture = self._state.begin_capture(step, runtime, only, for_joiner, held)
        except (ConfigError, *NO_MEMORY) as error:  # What was in extra_state at the start was checked then.
            self._say(f"the state cannot be copied for {'a joiner' if joiner else 'a checkpoint'}: {error}")
            if joiner is not None:
                self._session.serve_snapshot(joiner.step, None)
            if checkpointing is not None and mark is not None:
                checkpointing.not_begun(mark)
            return
        begun = (
            checkpointing is None or mark is None or part is None or checkpointing.begin(capture, mark, part)
        )
        if not begun and joiner is None:
            return
        self._capture, self._for_joiner = capture, joiner is not None
        if joiner is not None and joiner.blocking:
            self._run(capture, joiner)
            self._capture = None
            self._await_end(joiner.step)
        else:
            self._begin(capture, joiner)

    def _begin(self, capture: Capture, joiner: TakeSnapshot | None) -> None:
        """Have a thread run it beside the next forward; at once where there are as many threads as may be."""
        try:
            arguments = (capture, joiner)
            threading.Thread(target=self._run, args=arguments, name="chaosnet-snapshot", daemon=True).start()
        except RuntimeError:
            self._run(capture, joiner)

    def _run(self, capture: Capture, joiner: TakeSnapshot | None) -> None:
        capture.run()
        if joiner is not None:
            self._session.serve_snapshot(joiner.step, self._copied(capture))

    def _copied(self, capture: Capture) -> Snapshot | None:
        try:
            return capture.wait()
        except StateChanged as error:
            self._say(f"no copy of the state for a joiner: {error}; from now on it is copied inside update()")
        except NO_MEMORY as error:
            self._say(f"no copy of the state for a joiner: {error}")
        return None

    @property
    def serves(self) -> bool:
        """Is the state copied for a joiner that streams?"""
        return self._capture is not None and self._for_joiner

    def serve_fellows(self, step: int | None) -> None:
        """Wait until fellows have fetched what has arrived here: it must not change before."""
        if step is not None:
            self._await_end(step)

    def _await_end(self, step: int) -> None:
        """Wait until no joiner needs the state of that step any more."""
        while self._session.serves(step):
            time.sleep(POLL_S)

    def finish(self) -> None:
        """Wait until nothing is being copied any more, as the optimizer is about to step."""
        if self._capture is not None:
            with contextlib.suppress(StateChanged, *NO_MEMORY):  # Whom it was for knows.
                self._capture.wait()
            self._capture = None
