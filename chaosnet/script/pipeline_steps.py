"""Steps of pipelines: each is a step of the cluster, of which this node computes its part."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from ..callbacks import StepDone
from ..engines.pipelines import Pipelines
from ..node.mailbox import Interrupted
from ..node.outcomes import StepOutcome
from ..node.session import Session
from ..protocols.errors import ConfigError, describe
from ..protocols.messages import Contribution
from ..scheduler.elastic.keeping import Table
from . import endings
from .modes import no_modes
from .process import ScriptNode

WAIT_S = 0.05


class PipelineSteps:
    """What this node does at each step of the cluster. For the thread that trains.

    Attributes:
        ran: The pipelines of the last step, in words.
        updates_here: Steps of which this node has computed a part.
    """

    def __init__(
        self, session: Session, engine: Pipelines, node: ScriptNode, say: Callable[[str], None]
    ) -> None:
        self._session, self._engine, self._node, self._say = session, engine, node, say
        self._turn = threading.RLock()  # The main thread may end beside the one that trains.
        self.ran = ""
        self._kept = "-"  # What this node keeps of the training state, as it was told.
        self._table: Table = ()  # Who keeps what, as it was told.
        self._lacked = 0  # Members, as it was told.
        self.updates_here = 0

    @property
    def has_model(self) -> bool:
        """See `EvaluationSteps`."""
        return self._engine.keeping is None or self._engine.keeping.has_model

    def cut_short(self) -> None:
        """See `ScriptNode`."""
        self._node.cut_short()

    def entered(self) -> None:
        """See `NodeSteps`."""

    def next(self) -> StepDone | None:
        """Do the step that is due. Returns: None if what this node had for it does not count."""
        self._node.driver = threading.current_thread()
        self._await_first()
        with self._turn:
            done = None if self._session.ended else self._take_part()
            if self._node.must_leave:
                self._node.request_node_exit()
        endings.rest_if_all_ends()
        return done

    def _await_first(self) -> None:
        """While members are lacking, say how many, and slow down: such steps only let others in."""
        lacking = self._engine.lacks_members
        if lacking and lacking != self._lacked:
            self._say(f"{self._session.name} waits for {lacking} more to train with")
        self._lacked = lacking
        if lacking:
            time.sleep(WAIT_S)

    def await_round(self) -> None:
        """Take part until nobody evaluates anything."""
        while self._engine.evaluation.under_way and not self._session.done:
            self.skip()

    def has_missed(self) -> bool:
        """See `EvaluationSteps`. Scripts of pipelines go on where the cluster is."""
        return False

    def aside(self) -> AbstractContextManager[None]:
        """See `EvaluationSteps`. Between two steps this node has nothing in hand."""
        return nullcontext()

    def skip(self) -> bool:
        """See `NodeSteps`.

        Computes this node's layers all the same: the others need them until it is out of their view.
        """
        with self._turn, no_modes(()):  # Autocast may be what the script computes its layers with.
            if self._session.ended:
                return False
            if self._engine.is_wanted and not self._engine.batches.own_length:
                self._node.crash("it has no data")
                return False
            self._take_part()
            return self._session.ended is None

    def _take_part(self) -> StepDone | None:
        """Do the step that is due. Raises: ConfigError within a step."""
        calling = self._engine.calling
        if calling.under_way:
            raise ConfigError(
                "PipelineTrainer: a function that runs in the middle of a step asked for another one, by steps(), "
                "gather() or evaluate() (expected these between steps, not in a callback, a layer, the loss or a "
                "measure)"
            )
        calling.under_way = True
        try:
            return self._do_step()
        finally:
            calling.under_way = False

    def _do_step(self) -> StepDone | None:
        session, engine = self._session, self._engine
        record, before, began_s = self._node.record, engine.step, time.monotonic()
        # An interrupt may have left the step before under way, as at a prompt.
        contribution = self._compute() if not session.is_waiting else None
        waited_s = time.monotonic()
        outcome = session.hear() if contribution is None else session.step(contribution, engine.key)
        came_s = time.monotonic()
        record.computing += waited_s - began_s
        record.summing += came_s - waited_s
        if session.ended is not None:
            return None
        if outcome is None:
            record.void(engine.step, self._has_part())
            return None
        session.rates.sync_delay_s = came_s - waited_s
        try:
            session.adopt(outcome)
        except BaseException as error:
            is_whole = engine.last is not None and engine.last.round == outcome.step
            if not is_whole and session.ended is None:  # No other member has such a state.
                self._node.crash(describe(error))
            raise
        finally:  # What raised may be a function of the script's, which may go on.
            self._tell_kept()
            self._record(outcome, before, began_s, came_s)
        return engine.last

    def _record(self, outcome: StepOutcome, before: int, began_s: float, came_s: float) -> None:
        """Note an adopted step for status and summary. `before`: the model's updates before it."""
        session, engine, record = self._session, self._engine, self._node.record
        if engine.step < before:  # Layers were lost, and all have gone back.
            record.void(engine.step, computed=False)
        record.updating += time.monotonic() - came_s
        record.stepped(engine.step, outcome.commit.total.shares, {})
        if engine.step > before:
            record.measured(engine.means.last)
            record.samples_here += engine.sums.loss_samples
        took_s = max(time.monotonic() - began_s, 1e-6)
        session.rates.samples_per_s = engine.sums.loss_samples / took_s if engine.step > before else 0.0
        self.updates_here += engine.step > before and self._has_part()

    def _compute(self) -> Contribution | None:
        """Compute this node's part of the step. Returns: None if the step is void, and the session is to be heard."""
        try:
            contribution = self._engine.compute()
        except Interrupted:
            return None
        self._tell_pipelines()
        return contribution

    def _tell_kept(self) -> None:
        """Put what members keep of the state into the status; tell people what this node keeps, if that is new."""
        keeping, rates = self._engine.keeping, self._session.rates
        if keeping is None:
            return
        if keeping.table != self._table:
            self._table, rates.kept, rates.keepers = keeping.table, keeping.kept, keeping.fewest
        if self._engine.step and not keeping.made.fresh and keeping.layers != self._kept:
            self._kept = keeping.layers
            noun = "layer" if self._kept.isdigit() else "layers"
            size = f"({keeping.parts.held_bytes / 1e6:.1f} MB)"
            kept = f"{noun} {self._kept} {size}" if self._kept else "no layer"
            self._say(f"{self._session.name} keeps the state of {kept}")

    def _has_part(self) -> bool:
        running = self._engine.running
        return running is not None and self._session.name in running.program.instructions

    def _tell_pipelines(self) -> None:
        """Tell the pipelines of the step under way, if it trains and they have changed."""
        running, predicted = self._engine.running, self._engine.predicted
        if running is None or predicted is None or str(running.laid) == self.ran:
            return
        self.ran = self._session.rates.pipelines = str(running.laid)
        if not self._engine.pace.is_measured:  # Costs are a guess until then.
            self._say(
                f"pipelines ({running.why}): {running.laid}; predicted nothing yet, as no layer is measured"
            )
            return
        more_us = predicted.usual_us - running.predicted_us
        others = "".join(
            f"; {why} {(us + more_us) / 1000:.1f} ms" for why, us in running.others if why != running.why
        )
        self._say(f"pipelines ({running.why}): {running.laid}; {predicted}{others}")
