"""What engines have in common: a training state that a session offers, loads, and copies for others and for disks."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from ..callbacks import StateLoaded
from ..data.evaluation import Evaluation
from ..node.session import Offer, Session
from ..node.state.flat_state import Arrival
from ..node.state.training_state import TrainingState
from ..node.sums.gradients import Gradients
from ..node.sums.layer_sums import LayerSums
from ..protocols.errors import ConfigError
from ..protocols.sentences import in_again
from ..training.agreement import Agreement
from ..training.checkpointing import Checkpointing
from ..training.state_copies import StateCopies


class TrainingEngine:
    """The part of an engine (node/session.py) that is about its state, and not about how that is trained.

    Attributes:
        round: Steps of the all-reduce, also those in which nothing was trained.
        step: Updates of the model, by anybody, since the cluster began; `samples`: the samples behind them;
            `joined_step`: the value of `step` when this node last became a member.
    """

    state: TrainingState
    agreement: Agreement
    checkpointing: Checkpointing | None
    copies: StateCopies

    def __init__(self, session: Session) -> None:
        self.session, self.evaluation = session, Evaluation(session.name)
        self.round = self.step = self.joined_step = 0
        self.samples = 0.0
        self._run = secrets.token_hex(8)  # Of the cluster since it was founded or resumed.
        self._loaded: StateLoaded | None = None
        self._step_left = 0  # When the cluster went on without this node.

    @property
    def store(self) -> Gradients | LayerSums:
        """See `Engine`."""
        raise NotImplementedError

    def offer(self) -> Offer:
        """See `Engine`."""
        return Offer(
            digest=self.state.spec_digest(),
            spec=self.state.spec(),
            chunks=len(self.store.chunks),
            borders=self.store.borders,
            result_bytes=self.store.total_bytes,
            state_bytes=self.state.state_bytes(),
            layer_bytes=self.state.layer_bytes(),
        )

    def founded(self) -> None:
        """See `Engine`."""
        self.state.watch()
        if self.checkpointing is not None:
            self.checkpointing.founded()
        if self._loaded is not None:
            self.loaded()

    def load(self, arrival: Arrival) -> None:
        """See `Engine`."""
        self._load(arrival)
        self._tell_size()
        self.state.watch()  # It reads all of it, so before the others wait for this node.

    def loaded(self) -> None:
        """See `Engine`."""
        raise NotImplementedError

    def _stepped(self) -> None:
        """One more update of the model. Joiners have more to fetch since: the optimizer has made its state."""
        self.step += 1
        is_power_of_two = self.step & (self.step - 1) == 0
        if is_power_of_two:  # Seldom, as it takes milliseconds if there are many tensors.
            self._tell_size()

    def _tell_size(self) -> None:
        with contextlib.suppress(ConfigError):  # What cannot be sent is told once somebody is to have it.
            self.session.rates.state_bytes = self.state.state_bytes()

    def _load(self, arrival: Arrival) -> None:
        """Load the state of others, or of a checkpoint."""
        raise NotImplementedError

    def places(self) -> dict[str, torch.Tensor]:
        """See `Engine`."""
        return self.state.places()

    def entered(self, fetched: int | None) -> None:
        """See `Engine`."""
        self.joined_step = self.step
        self.copies.serve_fellows(fetched)
        if self.checkpointing is not None:
            self.checkpointing.started(self.step, self._run)

    def left_behind(self) -> None:
        """See `Engine`."""
        self.copies.finish()
        self._step_left = self.step

    def rejoined(self) -> None:
        """See `Engine`."""
        self.session.say(in_again(self.session.name, self._step_left, self.step))

    # --- what the script's node asks (`ScriptEngine`) ---

    @property
    def epoch(self) -> int:
        """Epochs that the cluster has completed."""
        raise NotImplementedError

    def detach(self) -> None:
        """Give the gradients back to the script, if this engine holds them."""

    def let_go(self) -> None:
        """Give the steps of optimizer and scheduler back to the script, if this engine has replaced them."""

    def close(self, abandon: bool) -> None:
        """End: with the checkpoint under way, or without it if the cluster went on without this node."""
        if self.checkpointing is not None:
            self.checkpointing.close(abandon)

    def _load_state(self, arrival: Arrival, without: Collection[nn.Parameter] = ()) -> dict[Any, Any]:
        """Become the state in `arrival`, and go on from where it is. Arguments and result: of TrainingState.load."""
        before = self.agreement.settings.fixed()
        runtime = self.state.load(arrival, without)
        replaced = self.agreement.settings.replaced(before)
        if replaced and self._loaded is None:  # Later loads replace what an earlier one has brought.
            self.session.say(replaced)
        self.agreement.forget()
        self.round, self.step, self.samples = runtime["round"], runtime["step"], runtime["samples"]
        self._run = runtime["run"]
        return runtime
