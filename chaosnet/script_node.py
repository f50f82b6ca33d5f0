"""The node in a script's process: it ends with the script, by Ctrl+C, or when the cluster goes on without it."""

from __future__ import annotations

import os
import threading

from . import endings, exit_event
from .engines.data_parallel import DataParallel
from .node.outcomes import Ended
from .node.session import Session
from .page.of_node import NodePage
from .protocols.errors import ScaleOutFailed, describe
from .remembered import Remembered
from .script_steps import ScriptSteps


class ScriptNode:
    """From its first step in a cluster to the last.

    Attributes:
        driver: The thread that called attach or update last.
        must_leave: A callback has asked for it; it is done when the script comes to its next step, or ends.
    """

    def __init__(self, session: Session, engine: DataParallel, members: Remembered, page: NodePage) -> None:
        self.name, self._session, self._engine, self._members = session.name, session, engine, members
        self._page = page
        self.steps = ScriptSteps(session, engine, self)
        self.driver = threading.current_thread()
        self._pid = os.getpid()
        self._closed = self.must_leave = False

    def enter(self) -> None:
        """Become a member. Raises: as Session.enter."""
        exit_event.install(self._session.want_out)
        endings.opened(self)
        try:
            self._session.enter()
        except (ScaleOutFailed, SystemExit) as error:
            if self._session.ended is None:  # It is the script's own, of a callback.
                self.crash(describe(error))
            else:
                self._closed = isinstance(error, SystemExit)
                self._stop()
            raise
        self.steps.begin()
        self.steps.await_round()

    @property
    def _is_over(self) -> bool:
        return self._closed or self._pid != os.getpid()  # A forked child is not the node.

    @property
    def _in_callback(self) -> bool:
        """Is it the script's function that calls, which chaosnet has called? Another thread's is no matter."""
        within = self._engine.rules.place and threading.current_thread() is self.driver
        return bool(within or self._session.loop.is_here)

    def request_node_exit(self) -> None:
        """See `Trainer`."""
        if self._is_over:
            return
        session, engine = self._session, self._engine
        session.leave()
        if self._in_callback:  # The step under way ends first.
            self.must_leave = True
            return
        while self.steps.skip():
            pass
        self._closed = True
        engine.close(abandon=False)
        self._stop()
        assert session.ended is not None
        if session.ended.last:
            self._members.forget()
        session.say(
            f"{self.name} left after step {engine.step} ({session.ended.reason}): "
            f"{self.steps.updates_here} steps with samples from here, joined at step {session.joined_step}"
        )

    def crash(self, reason: str, blames: bool = False) -> None:
        """See `Trainer`."""
        if self._is_over:
            return
        session, engine = self._session, self._engine
        self._closed = True
        session.crash(reason, engine.share.blamed() if blames else (), engine.share.epoch)
        self._stop()
        engine.gradients.detach()
        engine.close(abandon=True)
        session.say(f"{self.name} left after step {engine.step}: its script ended with {reason}")

    def ended(self, ended: Ended) -> None:
        """The session is over, by whatever."""
        self._engine.gradients.detach()
        if ended.how == "left":
            if not self._session.leaving:
                exit_event.want_exit()  # It was `chaosnet leave`: the script hears of it as of Ctrl+C.
            return
        self._stop()
        self._engine.close(abandon=True)

    def leave_if_wanted(self) -> bool:
        """Ctrl+C with a script that never asks for it: leave, and end the script. True if out already."""
        session = self._session
        if session.leaving:
            return True  # Another thread sees to that: what this one has is not counted.
        if not session.done or exit_event.script_captures_exit():
            return session.ended is not None
        if exit_event.exit_wanted():
            self.request_node_exit()
            raise SystemExit(0)
        return True

    def _stop(self) -> None:
        """Nobody is left to leave: signals and the script's end mean what they meant without a trainer."""
        self._engine.rules.remove()
        self._session.stop()
        self._page.stop()
        exit_event.remove(self._session.want_out)
        endings.closed(self)
