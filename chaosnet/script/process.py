"""The node in a script's process: it ends with the script, by Ctrl+C, or when the cluster goes on without it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ..discovery.presence import Presence
from ..discovery.remembered import Remembered
from ..discovery.started_alike import alone_among_many
from ..node.outcomes import Ended
from ..node.session import Hooks, Session
from ..page.of_node import NodePage
from ..protocols.errors import ConfigError, ScaleOutFailed, describe
from ..protocols.messages import Range
from ..protocols.sentences import counted
from ..training.checkpointing import Checkpointing
from . import endings, exit_event
from .teller import Teller


class ScriptEngine(Protocol):
    """What a script trains, as its node sees it."""

    @property
    def step(self) -> int:
        """Updates of the model."""
        ...

    @property
    def joined_step(self) -> int:
        """The value of `step` when this node last became a member."""
        ...

    @property
    def samples(self) -> float:
        """Samples behind these updates."""
        ...

    @property
    def checkpointing(self) -> Checkpointing | None:
        """What writes this node's checkpoints; None if nothing does."""
        ...

    @property
    def epoch(self) -> int:
        """Epochs that the cluster has completed."""
        ...

    @property
    def in_callback(self) -> bool:
        """Is a function of the script's running that the engine has called (a callback, after_step)?"""
        ...

    def blamed(self) -> tuple[Range, ...]:
        """Positions in the epoch of the samples that the script has in hand: suspects, if it ends with an error."""
        ...

    def detach(self) -> None:
        """Give the gradients back to the script. May be called again."""

    def let_go(self) -> None:
        """Give the steps of optimizer and scheduler back to the script. May be called again."""

    def close(self, abandon: bool) -> None:
        """End the engine; with `abandon`, without finishing the checkpoint under way."""


class NodeSteps(Protocol):
    """How a script's node takes part in steps."""

    updates_here: int

    def entered(self) -> None:
        """This node has become a member."""

    def skip(self) -> bool:
        """Take part in a step that the script has not asked for. Returns: False if this node is out."""
        ...


def hooks(teller: Teller, members: Remembered, ended: Callable[[Ended], None]) -> Hooks:
    """How the session of a script's node reaches the script."""
    return Hooks(
        say=teller.say,
        wants_exit=exit_event.exit_wanted,
        ended=ended,
        notice=teller.notice,
        parked=teller.parked,
        view=members.entered,
    )


class ScriptNode:
    """The node of a script, from its first step in a cluster to its last.

    Attributes:
        driver: The thread that called attach or update last.
        record: Figures of the run so far.
        must_leave: A callback has asked to leave; that is done when the script comes to its next step, or ends.
    """

    def __init__(
        self, session: Session, engine: ScriptEngine, members: Remembered, page: NodePage, teller: Teller
    ) -> None:
        self.name, self.session, self._engine, self._members = session.name, session, engine, members
        self._page, self._teller, self.record = page, teller, teller.record
        self._presence = Presence(session)
        self._steps: NodeSteps | None = None
        self.driver = threading.current_thread()
        self._pid = os.getpid()
        self._closed = self.must_leave = self._may_have_asked = False

    @property
    def steps(self) -> NodeSteps:
        assert self._steps is not None, "enter() comes first"
        return self._steps

    def enter(self, steps: NodeSteps) -> None:
        """Become a member. Raises: as Session.enter."""
        self._steps, self.record.began_s = steps, time.monotonic()
        self._page.start(self.session)
        exit_event.install(self.session.want_out)
        endings.opened(self)
        self._presence.begin()
        if told := alone_among_many(self.session.settings, os.environ):
            self.session.say(told)
        try:
            self.session.enter()
            self._presence.entered()
            self.record.entered(self._engine.step, self._engine.samples)
            steps.entered()
        except BaseException as error:
            # Of a callback, say; and the script gets no trainer that it could close.
            if self.session.ended is None:
                self.crash(describe(error))
            elif isinstance(error, ScaleOutFailed | SystemExit):  # Others come by `ended`.
                self._closed = isinstance(error, SystemExit)
                self._stop()
            raise

    @property
    def joined_step(self) -> int:
        return self._engine.joined_step

    @property
    def _is_over(self) -> bool:
        return self._closed or self._pid != os.getpid()  # A forked child is not the node.

    @property
    def _in_callback(self) -> bool:
        """Does the call come from a function of the script's that chaosnet has called? Other threads do not count."""
        within = self._engine.in_callback and threading.current_thread() is self.driver
        return within or self.session.loop.is_here

    def request_node_exit(self) -> None:
        """See `Trainer`."""
        if self._is_over:
            return
        session, engine = self.session, self._engine
        session.leave()
        if self._in_callback:  # The step under way ends first.
            self.must_leave = True
            return
        try:
            while self.steps.skip():
                pass
        except ConfigError as error:
            # The model cannot take part in a step any more, not even without samples.
            self.crash(describe(error))
            raise
        if self._closed:  # It could not take part, as its script had ended.
            return
        self._closed = True
        engine.close(abandon=False)
        self._stop()
        assert session.ended is not None
        if session.ended.last:
            self._members.forget()
        session.say(
            f"{self.name} left after step {engine.step} ({session.ended.reason}): "
            f"{counted(self.steps.updates_here, 'step')} with samples from here, joined at step {engine.joined_step}"
        )
        self._sum_up()

    def _sum_up(self) -> None:
        session, engine = self.session, self._engine
        checkpoint = engine.checkpointing.newest_whole() if engine.checkpointing is not None else None
        summary = self.record.summary(
            engine.samples,
            self.steps.updates_here,
            time.monotonic(),
            rejoins=session.rejoins,
            checkpoint=str(checkpoint[1]) if checkpoint is not None else "",
            checkpoint_step=checkpoint[0] if checkpoint is not None else 0,
            **session.rates.left_out,
        )
        if summary is not None:
            self._teller.summary(summary)

    def crash(self, reason: str, blames: bool = False) -> None:
        """See `Trainer`."""
        if self._is_over:
            return
        session, engine = self.session, self._engine
        self._closed = True
        session.crash(reason, engine.blamed() if blames else (), engine.epoch)
        self._stop()
        engine.detach()
        engine.close(abandon=True)
        session.say(f"{self.name} left after step {engine.step}: its script ended with {reason}")

    def ended(self, ended: Ended) -> None:
        """The session is over, for whatever reason."""
        self._engine.detach()
        if ended.how == "left":
            if not self.session.leaving:
                exit_event.want_exit()  # It was `chaosnet leave`: the script hears of it as of Ctrl+C.
            return
        self._stop()
        self._engine.close(abandon=True)

    def leave_if_wanted(self) -> bool:
        """If Ctrl+C was pressed and the script never asks for it, leave and end the script.

        One that has not asked yet, but has imported `capture_exit_event`, may do so after this step.
        Returns: is this node out?
        """
        session = self.session
        if session.leaving:
            return True  # Another thread sees to that: what this one has is not counted.
        if not session.done or exit_event.script_captures_exit():
            return session.ended is not None
        if exit_event.exit_wanted():
            if exit_event.script_may_capture_exit() and not self._may_have_asked:
                self._may_have_asked = True
                return session.ended is not None
            self.request_node_exit()
            raise SystemExit(0)
        return True

    def cut_short(self) -> None:
        """A loop of the script over data ends before its time. If it never asks for Ctrl+C, end it, too.

        What stands behind the loop expects what has not come, such as the means of an evaluation.
        """
        if exit_event.exit_wanted() and not exit_event.script_may_capture_exit():
            self.leave_if_wanted()

    def _stop(self) -> None:
        """The node is over: signals and the end of the script mean again what they mean without a trainer."""
        self._engine.let_go()
        self.session.stop()
        self._page.stop()
        self._presence.end()
        exit_event.remove(self.session.want_out)
        endings.closed(self)
