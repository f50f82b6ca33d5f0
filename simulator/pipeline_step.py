"""A step whose nodes compute different layers: what StepSync would have to become for pipelines. A study, no torch.

    GATHER      the root of a chunk sends version s of its parameters to the holders that do not keep it
    compute     each grain goes forward along its route and back; a layer waits for its parameters
    contribute  a holder sends the root its gradient of a layer, when the last of its grains has come back
    sum         the root adds them and sends the sum to the other keepers, and to keepers-to-be
    Ready       up the control tree: what I compute is done, and of all that I keep, the sum is here. With the vote
    Commit      from the root of the control tree to all
    STEP        each keeper goes from version s to s + 1

The rule that carries it: a node says Ready only when it has the sums of all that it keeps. So whoever learns that a
step is committed can finish it alone, and whoever does not has changed nothing. After a loss (FLUSH, INSTALL) all
sums are kept until it is known which of the two it is. Then the step is finished, or done over, by another plan.

A try at a step is named by the key of its view, which INSTALL always changes, and the step. What has an older name is
dropped, what has a later one is kept for a moment. Values are numbers that stand for tensors: equal ones were
computed from equal inputs. The scheduler is the most senior node alive, which stands for elections and quorums.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from .pipeline_view import Copy, Key, View, instant_plan

Name = tuple[Key, int]  # Of an attempt: key of its view, step.
Grad = tuple[int, Key, int]  # Grain, round it was computed in, value.
Propose = Callable[[View, Collection[Copy], Key], View | None]


class Pass(enum.Enum):
    """Which way a grain goes."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()


@dataclass(frozen=True, slots=True)
class Params:
    """Root to holder: GATHER."""

    name: Name
    chunk: int
    value: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """Holder to the next or the one before: the input of a layer, or the gradient of its output."""

    name: Name
    way: Pass
    grain: int
    layer: int
    value: int


@dataclass(frozen=True, slots=True)
class Up:
    """Holder to root: its gradients of this chunk."""

    name: Name
    chunk: int
    grads: tuple[Grad, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """Root to keepers, and to keepers-to-be."""

    name: Name
    chunk: int
    grads: tuple[Grad, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """Up the control tree, for all below: the view we have prepared, and keepers-to-be that have the state."""

    name: Name
    vote: Key | None
    caught: frozenset[Copy]


@dataclass(frozen=True, slots=True)
class Commit:
    """Down the control tree: the step is decided, and `switch` is the view of the next."""

    name: Name
    switch: Key | None
    caught: frozenset[Copy]


@dataclass(frozen=True, slots=True)
class Pull:
    """Keeper-to-be to root: the state of this chunk, please."""

    name: Name
    chunk: int


@dataclass(frozen=True, slots=True)
class State:
    """The answer; `asked` is the name of the Pull."""

    asked: Name
    chunk: int
    version: int
    value: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Scheduler to all: vote for this view."""

    view: View


@dataclass(frozen=True, slots=True)
class Lost:
    """Of a link: its other end has died, or left. Everything that did come from there has come."""


@dataclass(frozen=True, slots=True)
class Abort:
    """To the scheduler: somebody in my view, of this key, is lost."""

    key: Key


@dataclass(frozen=True, slots=True)
class Flush:
    """Scheduler to all: stop, and say where you are."""

    number: Key


@dataclass(frozen=True, slots=True)
class FlushOk:
    """`has`: the versions of chunks that this node has, or gets by itself once it knows of the commit."""

    number: Key
    view: View
    step: int
    commit: Commit | None
    has: frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Install:
    """Scheduler to all: go on with `step` in `view`. Who is behind by one finishes its step by `commit`."""

    number: Key
    view: View
    step: int
    commit: Commit | None


@dataclass(frozen=True, slots=True)
class Ended:
    """Scheduler to all: it cannot go on, nobody has these chunks of the newest view."""

    chunks: tuple[int, ...]
    view: View


@dataclass(frozen=True, slots=True)
class Gone:
    """To a node that was dropped by a view that it has not heard of."""


OfStep = Params | Tensor | Up | Sum | Ready | Commit | Pull
Message = OfStep | State | Prepare | Lost | Abort | Flush | FlushOk | Install | Ended | Gone


class Status(enum.Enum):
    """Of a node."""

    ACTIVE = enum.auto()
    LEFT = enum.auto()
    ENDED = enum.auto()  # Layers are lost: it would go on from a checkpoint.


def mix(*values: int) -> int:
    """A value computed from others. Numbers hash alike in every process."""
    return hash(values)


class PlacedSync:
    """The steps of one node, until `stop` are done. A message in, messages out."""

    def __init__(self, me: str, view: View, stop: int, propose: Propose) -> None:
        self.me, self.rank, self.stop, self.propose = me, int(me[1:]), stop, propose
        self.status, self.frozen = Status.ACTIVE, False
        self.dead: set[str] = set()
        self.view, self.step, self.made = view, 0, view.key[1]
        self.states = {chunk: (0, mix(chunk)) for chunk, nodes in enumerate(view.keepers) if me in nodes}
        self.sums: dict[tuple[int, int], tuple[Grad, ...]] = {}  # By chunk and step: kept until STEP.
        self.commit: Commit | None = None  # Of step - 1.
        self.prepared: dict[Key, View] = {}
        self.caught: frozenset[Copy] = frozenset()
        self.pulling: dict[int, Name] = {}
        self.early: list[tuple[str, OfStep]] = []
        self.flush: Key = (-1, 0)  # The newest that we have heard of.
        self.installed = view.key  # The last view that came by INSTALL.
        self.answers: dict[str, FlushOk] | None = None  # To a flush of ours.
        self.ended: Ended | None = None
        self._out: list[tuple[str, Message]] = []
        self._inbox: deque[tuple[str, Message]] = deque()
        self._reset()

    def start(self) -> list[tuple[str, Message]]:
        """Begin the first step."""
        self._out = []
        self._enter(self.view)
        self._lead()
        return self._drain()

    def handle(self, peer: str, message: Message) -> list[tuple[str, Message]]:
        """What came from `peer`. Returns: whom to send what."""
        self._out = []
        self._inbox.append((peer, message))
        return self._drain()

    def _drain(self) -> list[tuple[str, Message]]:
        while self._inbox and self.status is Status.ACTIVE:
            self._receive(*self._inbox.popleft())
        return self._out

    def _send(self, to: str, message: Message) -> None:
        if to == self.me:
            self._inbox.append((to, message))
        elif to not in self.dead:
            self._out.append((to, message))

    def _receive(self, peer: str, message: Message) -> None:
        match message:
            case Lost():
                self._on_lost(peer)
            case Abort() | Flush() if peer not in self.view.nodes:
                self._send(peer, Gone())
            case Abort(key):
                if self.scheduler == self.me and self.answers is None and key >= self.installed:
                    self._start_flush()
            case Flush():
                self._freeze(peer, message)
            case FlushOk():
                self._on_flush_ok(peer, message)
            case Install():
                self._install(message)
            case Prepare(view):
                if view.key > self.view.key:
                    self.prepared[view.key] = view
            case State():
                self._on_state(message)
            case Gone():
                self.status = Status.LEFT
            case Ended():
                self.status, self.ended = Status.ENDED, message
            case _:
                self._of_step(peer, message)

    # --- a step -----------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Nothing of an attempt is done yet."""
        self.params: dict[int, int] = {}  # What GATHER brought.
        self.visits: list[Tensor] = []  # That wait for parameters.
        self.inputs: dict[tuple[int, int], int] = {}  # By grain and layer.
        self.grads: dict[int, list[Grad]] = {}  # By layer.
        self.ups: dict[int, dict[str, tuple[Grad, ...]]] = {}  # At the root: by chunk and holder.
        self.readies: dict[str, Ready] = {}
        self.ready_sent = False

    def _enter(self, view: View) -> None:
        """The step under way is done in `view`."""
        self.view = view
        self.prepared = {key: each for key, each in self.prepared.items() if key > view.key}
        self.parent, self.children = view.control_tree(self.me)
        self.kept = [chunk for chunk, nodes in enumerate(view.keepers) if self.me in nodes]
        self.coming = [chunk for chunk, node in sorted(view.coming) if node == self.me]
        self.computed = [layer for layer in range(len(view.routes[0])) if self.me in view.holders(layer)]
        mine = {*self.kept, *self.coming}
        self.states = {chunk: state for chunk, state in self.states.items() if chunk in mine}
        self.sums = {key: grads for key, grads in self.sums.items() if key[0] in mine}
        self.pulling = {chunk: (view.key, self.step) for chunk in self.coming if chunk not in self.states}
        for chunk, name in self.pulling.items():
            self._send(view.keepers[chunk][0], Pull(name, chunk))
        self._begin()

    def _begin(self) -> None:
        """GATHER, and the first layers; and what came too early."""
        self._reset()
        view, name = self.view, (self.view.key, self.step)
        if self.step < self.stop:
            for chunk in self.kept:
                root, *others = view.keepers[chunk]
                if root == self.me:
                    for node in sorted(view.holders(chunk // view.parts).difference(others, [root])):
                        self._send(node, Params(name, chunk, self.states[chunk][1]))
            for grain, route in enumerate(view.routes):
                if route[0] == self.me:
                    self.visits.append(Tensor(name, Pass.FORWARD, grain, 0, mix(self.step, grain)))
            self._work()
        self._inbox.extend(self.early)
        self.early = []

    def _of_step(self, peer: str, message: OfStep) -> None:
        name, here = message.name, (self.view.key, self.step)
        if name > here and not (self.frozen and name[0] == self.view.key):
            self.early.append((peer, message))
        elif self.frozen or not (
            self._is_of_now(message)
            or (isinstance(message, Sum) and name[0] >= self.installed)  # All these were committed.
            or (isinstance(message, Pull) and name[0] == self.view.key)
        ):
            return  # Of an attempt that is over.
        else:
            self._take(peer, message)
            self._work()

    def _is_of_now(self, message: OfStep) -> bool:
        return message.name == (self.view.key, self.step)

    def _take(self, peer: str, message: OfStep) -> None:
        match message:
            case Params(_, chunk, value):
                self.params[chunk] = value
            case Tensor():
                self.visits.append(message)
            case Up():
                self._on_up(peer, message)
            case Sum(name, chunk, grads):
                if chunk in self.kept or chunk in self.coming:
                    self.sums[chunk, name[1]] = grads
                    self._step_up()
            case Ready():
                self.readies[peer] = message
            case Commit():
                for child in self.children:
                    self._send(child, message)
                self._complete(message)
            case Pull(name, chunk):
                self._send(peer, State(name, chunk, *self.states[chunk]))

    def _work(self) -> None:
        """Compute all that can be; then say so, if that was all."""
        while visit := next((each for each in self.visits if self._parameters(each.layer)), None):
            self.visits.remove(visit)
            self._visit(visit)
        self._say_ready()

    def _parameters(self, layer: int) -> list[int] | None:
        """Of all its chunks, in the version of this step; None while one is missing."""
        found = []
        for chunk in self.view.chunks(layer):
            version, value = self.states.get(chunk, (-1, 0))
            if chunk in self.kept and version == self.step:
                found.append(value)
            elif chunk in self.params:
                found.append(self.params[chunk])
            else:
                return None
        return found

    def _visit(self, visit: Tensor) -> None:
        grain, layer, key = visit.grain, visit.layer, self.view.key
        route, parameters = self.view.routes[grain], self._parameters(layer) or []
        if visit.way is Pass.FORWARD:
            self.inputs[grain, layer] = visit.value
            out = mix(visit.value, *parameters)
            if layer + 1 < len(route):
                self._send(route[layer + 1], Tensor(visit.name, Pass.FORWARD, grain, layer + 1, out))
            else:  # The loss.
                self._send(self.me, Tensor(visit.name, Pass.BACKWARD, grain, layer, mix(out)))
            return
        back = mix(visit.value, self.inputs[grain, layer], *parameters)
        if layer:
            self._send(route[layer - 1], Tensor(visit.name, Pass.BACKWARD, grain, layer - 1, back))
        grads = self.grads.setdefault(layer, [])
        grads.append((grain, key, back))
        if len(grads) == sum(each[layer] == self.me for each in self.view.routes):
            for chunk in self.view.chunks(layer):
                own = tuple((grain, key, mix(back, chunk)) for grain, key, back in grads)
                self._send(self.view.keepers[chunk][0], Up(visit.name, chunk, own))

    def _on_up(self, peer: str, up: Up) -> None:
        holders, ups = self.view.holders(up.chunk // self.view.parts), self.ups.setdefault(up.chunk, {})
        if peer in ups or peer not in holders:
            return
        ups[peer] = up.grads
        if ups.keys() >= holders:
            grads = tuple(sorted(grad for each in ups.values() for grad in each))
            listening = sorted(node for chunk, node in self.view.coming if chunk == up.chunk)
            for node in (*self.view.keepers[up.chunk], *listening):
                self._send(node, Sum((self.view.key, self.step), up.chunk, grads))

    def _is_gated(self) -> bool:
        """Is all here that we keep: the state, and its sum?"""
        return all(
            self.states.get(chunk, (-1, 0))[0] == self.step and (chunk, self.step) in self.sums
            for chunk in self.kept
        )

    def _say_ready(self) -> None:
        done = all(
            len(self.grads.get(layer, ())) == sum(route[layer] == self.me for route in self.view.routes)
            for layer in self.computed
        )
        if self.ready_sent or self.frozen or self.step >= self.stop or not done:
            return
        if self.readies.keys() < {*self.children} or not self._is_gated():
            return
        self.ready_sent = True
        votes = {max(self.prepared, default=None), *(each.vote for each in self.readies.values())}
        vote = votes.pop() if len(votes) == 1 else None
        caught = [(each, self.me) for each in self.coming if self.states.get(each, (-1, 0))[0] >= self.step]
        everybodys = frozenset(caught).union(*(each.caught for each in self.readies.values()))
        name = (self.view.key, self.step)
        if self.parent is None:
            self._send(self.me, Commit(name, vote, everybodys))
        else:
            self._send(self.parent, Ready(name, vote, everybodys))

    def _complete(self, commit: Commit) -> None:
        self.step += 1
        self.commit, self.caught = commit, commit.caught
        self._step_up()
        if commit.switch is None:
            self._begin()
        elif self.me in self.prepared[commit.switch].nodes:
            self._enter(self.prepared[commit.switch])
        else:
            self.status = Status.LEFT
            return
        self._lead()

    def _step_up(self) -> None:
        """STEP: of what we keep or are about to keep, as far as is committed and the sums are here."""
        for chunk, (version, value) in self.states.items():
            while self._may_step(version) and (chunk, version) in self.sums:
                value = mix(value, *(value for _, _, value in self.sums.pop((chunk, version))))
                version += 1
            self.states[chunk] = version, value
        old = [key for key in self.sums if key[0] in self.states and key[1] < self.states[key[0]][0]]
        for key in old:
            del self.sums[key]

    def _may_step(self, version: int) -> bool:
        return version < self.step

    def _on_state(self, message: State) -> None:
        if self.pulling.get(message.chunk) == message.asked:
            del self.pulling[message.chunk]
            self.states[message.chunk] = message.version, message.value
            self._step_up()
            self._work()

    # --- losses -------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> str:
        """The most senior that is alive, as far as this node knows."""
        return next(node for node in self.view.nodes if node not in self.dead)

    def _lead(self) -> None:
        """The scheduler may want another view."""
        if self.scheduler != self.me or self.prepared or self.frozen or self.step >= self.stop:
            return
        view = self.propose(self.view, self.caught, (self.rank, self.made + 1))
        if view is not None:
            self.made += 1
            for node in self.view.nodes:
                self._send(node, Prepare(view))

    def _on_lost(self, peer: str) -> None:
        self.dead.add(peer)
        if peer not in self.view.nodes:
            return
        if self.answers is not None:
            self._start_flush()
        else:
            self._send(self.scheduler, Abort(self.view.key))

    def _start_flush(self) -> None:
        self.answers = {}
        for node in self.view.nodes:
            self._send(node, Flush((self.rank, self.flush[1] + 1)))

    def _freeze(self, peer: str, message: Flush) -> None:
        """The attempt is void. What was summed is kept until INSTALL says whether it was committed."""
        if message.number <= self.flush:
            return
        self.flush, self.frozen = message.number, True
        self._reset()
        has = {(chunk, version) for chunk, (version, _) in self.states.items()}
        has |= {(chunk, step + 1) for chunk, step in self.sums if (chunk, step) in has}
        self._send(peer, FlushOk(message.number, self.view, self.step, self.commit, frozenset(has)))

    def _on_flush_ok(self, peer: str, message: FlushOk) -> None:
        if self.answers is None or message.number != self.flush:
            return
        self.answers[peer] = message
        if not self.answers.keys() >= {node for node in self.view.nodes if node not in self.dead}:
            return
        answers, self.answers = self.answers, None
        base = max((each.view for each in answers.values()), key=lambda view: view.key)
        newest = max(answers.values(), key=lambda each: each.step)
        full = self._full_copies(answers, newest.step)
        self.made += 1
        plan = instant_plan(base, answers.keys(), full, (self.rank, self.made))
        for node in sorted(answers):
            if isinstance(plan, View):
                self._send(node, Install(self.flush, plan, newest.step, newest.commit))
            else:
                self._send(node, Ended(tuple(plan), base))

    def _full_copies(self, answers: dict[str, FlushOk], step: int) -> set[Copy]:
        return {(c, node) for node, each in answers.items() for c, version in each.has if version == step}

    def _install(self, message: Install) -> None:
        if message.number != self.flush or not self.frozen:
            return
        if self.step < message.step:
            self.step, self.commit = message.step, message.commit
            self._step_up()
        self.frozen, self.caught = False, frozenset()
        self.sums, self.prepared, self.installed = {}, {}, message.view.key
        self.states = {chunk: state for chunk, state in self.states.items() if state[0] == self.step}
        if self.me not in message.view.nodes:
            self.status = Status.LEFT
            return
        self._enter(message.view)
        self._lead()
