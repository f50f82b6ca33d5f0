"""One member's life, whatever it trains: it founds a cluster or joins one, takes part in steps, comes back, leaves.

Trainer   what a script sees           chaosnet/trainer.py
Engine    what is trained, and how     chaosnet/engines/
Session   life in the cluster          here
NodeLoop  sockets and cores            loop.py
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, cast

import torch

from ..protocols.asking import Otherwise
from ..protocols.errors import (
    ChaosnetError,
    LayersLost,
    NodeExpelled,
    ReplicasDiffer,
    ScaleOutFailed,
    describe,
)
from ..protocols.events import CaughtUp, Contributed, Crashed, Event, LeaveWanted, LocalReady, StateRejected
from ..protocols.messages import Contribution, Deal, Notice, Range, View, ViewKey
from ..protocols.status import Status
from ..scheduler.sync_plan import POLICIES, custom
from .agent.core import Agent, CoreSettings
from .interfaces import unheard
from .loop import NodeLoop
from .node_settings import NodeSettings
from .outcomes import (
    Admitted,
    Ended,
    FoundedAt,
    Outcome,
    Rates,
    Redo,
    StateArrived,
    StateDiscarded,
    StepOutcome,
)
from .state.flat_state import Arrival, Snapshot
from .state.plain import decode, encode
from .state.training_state import first_difference
from .sums.all_reduce import ChunkStore
from .transport.transport import Transport

RECALL_PATIENCE_S = 3.0
"""As opening a connection takes at most; a namesake that has died is gone by then, too."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What an engine brings into a cluster.

    Attributes:
        digest, spec: Of all that members must have alike; `spec` in plain data (plain.py), to tell what differs.
        chunks: How many pieces the values of a step are summed in; `borders`: those that begin another vector.
        result_bytes: Of the sum of a step.
        state_bytes: Of the state that a joiner receives; `layer_bytes`: of its smallest and largest layer.
        recomputes: Must a step that is done over be computed anew, as its values hang on who is there?
        parts: Do members keep parts of the state, and so only some sums?
    """

    digest: str
    spec: Any
    chunks: int
    borders: tuple[int, ...]
    result_bytes: int
    state_bytes: int
    layer_bytes: tuple[int, int]
    recomputes: bool = False
    parts: bool = False


class Engine(Protocol):
    """What is trained, as a session sees it. `store` and `round` are read on the loop's thread, too.

    All else is called on the thread that drives the session.

    What `adopt` changes is agreed: from the same outcomes all members come to the same state, to the bit, and that
    is what `capture` copies and `load` replaces. What else an engine has is local, and lost with its node.
    Attributes:
        round: Step of the all-reduce that is due.
    """

    round: int

    @property
    def store(self) -> ChunkStore:
        """Where this node's values come from."""
        ...

    def offer(self) -> Offer: ...

    def places(self) -> dict[str, torch.Tensor]:
        """Where tensors of a joiner's state may be received in place, by name."""
        ...

    def founded(self) -> None:
        """This node has founded the cluster: its state is the cluster's."""

    def load(self, arrival: Arrival) -> None:
        """Replace the agreed state, and `round`. Raises: ChaosnetError if it cannot be: it is pulled again."""

    def loaded(self) -> None:
        """The loaded state counts: outcomes are adopted from here on."""

    def admitted(self, deal: Deal) -> None:
        """This node is a member from the next step on."""

    def acts_in(self, view: View) -> None:
        """The step that is due is done in `view`. Told whenever that may be a new one; an old one may come late."""

    def entered(self, fetched: int | None) -> None:
        """This node is a member and has the state. `fetched`: the step of that state, for which fellows may ask."""

    def adopt(self, outcome: StepOutcome) -> None:
        """Do what all members do with a completed step. Raises: ReplicasDiffer if they have been found to differ."""

    def left_behind(self) -> None:
        """The cluster went on without this node: nothing of the step under way counts."""

    def rejoined(self) -> None:
        """This node is a member again, with the cluster's state."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Who else hears of a session's life.

    Attributes:
        say: A line for the user; from several threads.
        wants_exit: Has the user asked this node to leave?
        ended: The session is over, told before any error is raised. Not after a join that failed, or a crash.
        notice, parked, view: Called on the loop's thread: with an event of the cluster; when a wait begins (with its
            reason) or ends (None); with a new view.
    """

    say: Callable[[str], None]
    wants_exit: Callable[[], bool] = lambda: False
    ended: Callable[[Ended], None] = lambda ended: None
    notice: Callable[[Notice], None] = lambda notice: None
    parked: Callable[[str | None], None] = lambda reason: None
    view: Callable[[View], None] = lambda view: None


@dataclass(slots=True)
class _Entry:
    """How far a node is on its way in.

    Attributes:
        loaded: Does it have the state?
        admitted: The first step that it contributes to. `fetched`: the step whose state has come.
        waiting: What the others have trained meanwhile.
        heard: What it is doing; an interrupt may come in between, and then it is done again.
    """

    loaded: bool
    admitted: int | None = None
    fetched: int | None = None
    waiting: list[StepOutcome] = field(default_factory=list)
    heard: Outcome | None = None


class Session:
    """One node in one cluster, from its start to its end.

    `enter`, `step`, `adopt` and what ends it are for one thread at a time; `post`, `contribute`, `serve_snapshot`,
    `serves`, `want_out` and `status` are for any.

    Attributes:
        ended: How it ended; None while it has not.
        leaving: This node has said that it wants out.
        is_waiting: What becomes of a step, or of a rejoin, is to be heard; if nobody waits for it, an interrupt came
            between.
    """

    def __init__(self, settings: NodeSettings, hooks: Hooks) -> None:
        self.settings, self.hooks, self.name, self.say = settings, hooks, settings.name, hooks.say
        policy = settings.sync_policy
        self._policy = custom(policy) if callable(policy) else POLICIES[policy]
        self._keyring = settings.keyring()
        self.counters: Counter[str] = Counter()
        self.ended: Ended | None = None
        self.leaving = self.is_waiting = False
        self.rejoins = 0
        self._entry: _Entry | None = None  # While it comes back.
        self.join_seconds = 0.0
        self.join_phases: dict[str, float] = {}  # Seconds in each state of a joiner (protocols/scale_out.py).
        self.join_bytes = 0  # Of the state that this node received, and by whom they were sent.
        self.join_bytes_by_source: dict[str, int] = {}
        self._engine: Engine | None = None
        self._loop: NodeLoop | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "open() comes first"
        return self._engine

    @property
    def loop(self) -> NodeLoop:
        assert self._loop is not None, "open() comes first"
        return self._loop

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others reach this node, as it has told them last."""
        return self.loop.agent.settings.addresses

    @property
    def rates(self) -> Rates:
        """What this node tells of its speed."""
        return self.loop.rates

    @property
    def done(self) -> bool:
        """Is this node out, or about to leave?"""
        return self.ended is not None or self.leaving or self.hooks.wants_exit()

    # --- joining ---

    def open(self, engine: Engine, guarded: bool = False) -> None:
        """Listen, as a node that trains with `engine`. `guarded`: see NodeLoop. Raises: ConfigError."""
        self._engine, hooks, name = engine, self.hooks, self.name
        self._offer = engine.offer()
        self._opened_s = time.monotonic()
        self._loop = NodeLoop(
            self.make_agent,
            lambda sink: Transport(name, self.settings.listen, sink, keys=self.settings.keys, keyring=self._keyring),
            engine.store, hooks.notice, hooks.parked,
            guarded=guarded, on_view=hooks.view, on_progress=lambda text: self.say(f"{name} {text}"),
            counters=self.counters,
        )  # fmt: skip
        if why := unheard(self.settings.listen, self._loop.start()):
            self.say(f"{name}: {why}")
        self.rates.state_bytes, self.rates.layer_bytes = self._offer.state_bytes, self._offer.layer_bytes

    def enter(self) -> None:
        """Found a cluster, or become a member of one and hold its state.

        Raises: ScaleOutFailed if it cannot be reached or refuses; SystemExit if the user wants out meanwhile.
        """
        founds = self.settings.founds
        if founds:
            self.say(_founds(self.name, self.addresses))
            self.engine.founded()
            self.loop.found()
        else:
            self._ask_to_join()
        if ended := self._become_member(_Entry(loaded=founds)):
            self._fail_to_join(ended)
        self.join_seconds = time.monotonic() - self._opened_s

    def make_agent(self, addresses: tuple[str, ...], least_life: int) -> Agent:
        """The cores of one life."""
        offer = self._offer
        settings = CoreSettings(
            addresses=addresses,
            seeds=self.settings.seeds,
            peers_at=self.settings.peers_at,
            probe=self.settings.probe,
            chunks=offer.chunks,
            borders=offer.borders,
            result_bytes=offer.result_bytes,
            recomputes=offer.recomputes,
            parts=offer.parts,
            digest=offer.digest,
            spec=encode(offer.spec, "spec"),
            policy=self._policy,
            life=max(time.time_ns(), least_life),  # If the clock was set back: Agent, `Outlived`.
            first_step=self.engine.round,
            keyring=self._keyring,
        )
        return Agent(self.name, settings, random.Random())

    def _ask_to_join(self) -> None:
        s, at = self.settings, ", ".join(self.addresses)
        if s.join:
            self.say(f"{self.name} at {at} joins the cluster at {', '.join(s.join)}")
        elif s.cluster_name:
            self.say(
                f"{self.name} at {at} looks for the cluster {s.cluster_name!r} on this network, and founds it if "
                f"nobody answers in {s.join_patience_s:g} s (at once: --new)"
            )
        else:
            self.say(
                f"{self.name} at {at} was in a cluster when it last ran here: it asks for that at "
                f"{', '.join(s.remembered)}, and founds one if nobody answers in {RECALL_PATIENCE_S:g} s "
                "(at once: --new)"
            )
        if s.introduce is not None:
            try:
                s.introduce()
            except ScaleOutFailed as error:
                self._fail_to_join(Ended("refused", str(error), error=error, lasting=error.lasting))
        otherwise = Otherwise.FOUND if s.may_found else Otherwise.FAIL
        patience_s = s.join_patience_s if s.join or s.cluster_name else RECALL_PATIENCE_S
        places = self.engine.places()
        self.loop.join(s.seeds, s.links, s.neighbors, s.blocking, patience_s, places, otherwise)

    def _become_member(self, own: _Entry) -> Ended | None:
        """Wait for the state and for membership; adopt what the others trained meanwhile.

        `own`: how far this node is already. Returns: why it is no member; None if it is one.
        """
        while not (own.loaded and own.admitted is not None and self.engine.round >= own.admitted):
            again = own.heard is not None
            own.heard = own.heard or self.loop.outcomes.get()
            match own.heard:
                case StateArrived() as arrived:
                    if not (again and own.loaded):  # A callback may have raised an error; it has heard of it.
                        own.loaded, own.fetched = self._load(arrived), arrived.step
                        if own.loaded:
                            self.engine.loaded()
                    while own.loaded and own.waiting:
                        self._adopt_if_new(own.waiting[0])
                        del own.waiting[0]
                    own.waiting.clear()
                    if own.loaded:
                        self.post(CaughtUp())
                case StateDiscarded():
                    own.loaded, own.admitted, own.waiting = False, None, []
                case FoundedAt(addresses):
                    self.say(_founds(self.name, addresses))
                    self.engine.founded()
                    own.loaded = True
                case StepOutcome() as outcome:
                    if own.loaded:
                        self._adopt_if_new(outcome)
                    else:
                        own.waiting.append(outcome)
                case Admitted(step, deal, view):
                    own.admitted = step
                    self.engine.admitted(deal)
                    self.engine.acts_in(view)
                case Redo(view):
                    self.engine.acts_in(view)
                case Ended() as ended:
                    return ended
            own.heard = None
        self.join_phases = self.loop.ask(lambda: self.loop.agent.join_phases)
        self.engine.entered(own.fetched)
        return None

    def _load(self, arrived: StateArrived) -> bool:
        try:
            self.engine.load(arrived.arrival)
        except ChaosnetError as error:
            self.post(StateRejected(str(error)))
            return False
        self.join_bytes = arrived.arrival.manifest.total_bytes
        self.join_bytes_by_source = dict(arrived.bytes_by_source)
        return True

    def _come_back(self) -> None:
        """Become a member once more, with the state that the cluster has now; an interrupted return is continued."""
        self._entry = self._entry or _Entry(loaded=False)
        self.is_waiting = True
        ended = self._become_member(self._entry)
        self._entry, self.is_waiting = None, False
        if ended:
            self.end(ended)
            return
        self.rejoins += 1
        self.engine.rejoined()

    def _adopt_if_new(self, outcome: StepOutcome) -> None:
        if outcome.step >= self.engine.round:
            self.adopt(outcome)
        self.loop.backlog_applied(outcome.nbytes)

    def _fail_to_join(self, ended: Ended) -> NoReturn:
        self.ended = ended
        if ended.how == "left":  # Ctrl+C while it asked: the script has nothing to go on with.
            self.say(f"{self.name} left before it was a member")
            raise SystemExit(0)
        s = self.settings
        remembered = "" if s.join or s.cluster_name else ": the cluster that it was in (another one: --new)"
        seeds = ", ".join(s.seeds) or (f"the cluster {s.cluster_name!r}" if s.cluster_name else "")
        what = (
            f"{self.name} cannot join {seeds}{remembered}" if seeds else f"{self.name} cannot found a cluster"
        )
        raise ScaleOutFailed(f"{what}: {_reason(ended, self._offer)}", ended.lasting) from ended.error

    # --- steps ---

    def post(self, event: Event) -> None:
        """Hand an event to the cores."""
        self.loop.post(event)

    def contribute(self, chunks: range | tuple[int, ...], weight: float, key: ViewKey | None = None) -> None:
        """The engine's values of these chunks may leave, each times `weight`.

        `key`: of the view that they were computed in, if the engine's offer says `recomputes`.
        """
        self.post(Contributed(tuple(chunks), weight, key))

    def step(self, contribution: Contribution, key: ViewKey | None = None) -> StepOutcome | None:
        """Take part in the step under way with what was contributed, and wait until it is complete.

        Returns: its outcome, to `adopt`; None if what this node had does not count, as it is out (`ended`), or was
            and has rejoined, or the step is to be computed anew.
        Raises: NodeExpelled if the cluster went on without this node and does not take it back.
        """
        self.is_waiting = True
        self.post(LocalReady(contribution, key))
        return self.hear()

    def hear(self) -> StepOutcome | None:
        """Wait for what becomes of the step under way, or of a rejoin. Returns and raises: as `step`."""
        if self._entry is not None:
            self._come_back()
            return None
        self.loop.check_process()
        heard = self.loop.outcomes.get()
        self.is_waiting = False
        match heard:
            case StepOutcome() as outcome:
                return outcome
            case Redo(view):
                self.engine.acts_in(view)
            case Ended("out", reason) if self.hooks.wants_exit() or self.leaving:
                self.end(Ended("left", reason))
            case Ended("out", reason) if self.settings.rejoin:
                self.rejoin(reason)
            case Ended() as ended:
                self.end(ended)
            case _:  # StateDiscarded: put out while it loaded the state, it has asked to be let in again.
                self.engine.left_behind()
                self._come_back()
        return None

    def adopt(self, outcome: StepOutcome) -> None:
        """Have the engine adopt the outcome of a step.

        Raises: ReplicasDiffer or LayersLost, after those who are about to join have been told.
        """
        outcome.settle()
        try:
            try:
                self.engine.adopt(outcome)
            finally:  # Also where a function of the script's has raised an error, which the script may catch.
                self.engine.acts_in(outcome.view)
        except (ReplicasDiffer, LayersLost) as error:
            leaving = self.leaving or self.hooks.wants_exit()
            if not leaving:  # To those who are about to join, and have not compared anything.
                self.post(Crashed(describe(error)))
            self.end(Ended("left" if leaving else "broken", str(error), error=None if leaving else error))

    def withdraw(self, contributions: Callable[[], Contribution]) -> Ended:
        """Leave, to come back: take part with `contributions`, which count for nothing, until this node is let go.

        Returns: how the life ended; `Session.ended` stays None.
        """
        self.post(LeaveWanted())
        while True:
            self.post(LocalReady(contributions()))
            match self.loop.outcomes.get():
                case StepOutcome() as outcome:
                    self.adopt(outcome)
                case Ended() as ended:
                    return ended
                case _:  # As in `step`.
                    return Ended("out", "its state was void")

    def serve_snapshot(self, step: int, snapshot: Snapshot | None) -> None:
        """See NodeLoop."""
        self.loop.serve_snapshot(step, snapshot)

    def serves(self, step: int) -> bool:
        """Is the copy of the state at that step still needed by a joiner?"""
        return bool(self.loop.ask(lambda: self.loop.serving(step)))

    # --- coming back ---

    def rejoin(self, reason: str) -> None:
        """The cluster went on without us: pull its state, and go on as if we had been there. Raises: NodeExpelled."""
        self.engine.left_behind()
        settings = self.settings
        self._entry, self.is_waiting = _Entry(loaded=False), True
        ways = self.loop.rejoin(settings.neighbors, settings.blocking, settings.join_patience_s)
        if not ways:
            self.end(Ended("out", f"{reason}; it knows no address of any other member"))
        self.say(f"{self.name} is out of the cluster: {reason}; it rejoins through {', '.join(ways)}")
        if self.hooks.wants_exit():  # It was said while nobody could act upon it.
            self.post(LeaveWanted())
        self._come_back()

    # --- the end ---

    def end(self, ended: Ended) -> None:
        """This node is out for good. Raises: the error that ended it, else NodeExpelled; nothing if it has left."""
        self.ended = ended
        self.hooks.ended(ended)
        if ended.how == "left":
            return
        if ended.error is not None:
            raise ended.error
        again = " and cannot rejoin" if ended.how == "refused" else ""
        raise NodeExpelled(f"{self.name} is out of the cluster{again}: {_reason(ended, self._offer)}")

    def leave(self) -> None:
        """Begin to leave: take part in steps until `ended`; what this node contributes to them counts for nothing."""
        self.leaving = True
        self.want_out()

    def want_out(self) -> None:
        """Ask the others to be let go. From any thread, also within a signal's handler."""
        if self._loop is not None and self.ended is None:
            self._loop.post(LeaveWanted())

    def crash(self, reason: str, blamed: tuple[Range, ...], epoch: int) -> None:
        """The script has ended with an error: say so to the others. `blamed`: the samples of `epoch` in hand."""
        self.leaving = True
        if self.ended is None:
            self.post(Crashed(reason, blamed, epoch))
            self.ended = Ended("left", reason)

    def stop(self) -> None:
        """Close all links."""
        if self._loop is not None:
            self._loop.stop()

    # --- telling ---

    def status(self, history: bool = False) -> Status:
        """The cluster as this node sees it. `history`: with all events and steps that this node has kept."""
        return cast(Status, self.loop.ask(lambda: self.loop.status(history)))


def _reason(ended: Ended, ours: Offer) -> str:
    if not ended.spec:
        return ended.reason
    difference = first_difference(ours.spec, decode(ended.spec))
    return f"{ended.reason}: {difference or 'in its details'}"


def _founds(name: str, addresses: tuple[str, ...]) -> str:
    return f"{name} founds a cluster; join it with CHAOSNET_JOIN={' or '.join(addresses)}"
