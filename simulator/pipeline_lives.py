"""Random lives of pipelines, and a crash at every message of a step, against rules that must hold after each message.

Links deliver in order; which one delivers next is drawn from the seed. Who crashes has sent, on each of its links, a
part of what was under way: as much as is drawn, and then the other end learns of the death.

The rules:
- A sum has each grain of its step once, all of one round, and computed from version s of every layer.
- Whatever version of a chunk a node has is the one that a single process would have; nobody is ahead of a commit.
- A chunk is lost only if all have died that its view promised to keep it. A view that adds keepers promises those
  of the view before, until a step was committed in it: what the new ones lack may still be on its way to them.
- When no message is left, all who live have done all steps, in one view.
"""

from __future__ import annotations

import enum
import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .pipeline_step import Commit, Ended, Flush, Install, Lost, Message, PlacedSync, Status, mix
from .pipeline_view import Policy, Regroup, View, grown


class Broken(AssertionError):
    """A rule; with the end of the story."""


class Crash(enum.Enum):
    """Who crashes at a message, and when."""

    SENDER_BEFORE = "sender-before"  # The message is lost with it.
    SENDER_AFTER = "sender-after"
    RECEIVER_BEFORE = "receiver-before"
    RECEIVER_AFTER = "receiver-after"


@dataclass(frozen=True, slots=True)
class Shape:
    """How a life begins, and what may happen in it."""

    view: View
    copies: int
    stop: int
    restless: float
    leaver: str
    crashes: int  # At most so many, at random.

    @classmethod
    def drawn(cls, rng: random.Random) -> Shape:
        """One or two pipelines of one to three nodes, and one or two nodes without a role."""
        layers, parts = rng.randint(2, 3), rng.randint(1, 2)
        lengths = [rng.randint(1, min(layers, 3)) for _ in range(rng.randint(1, 2))]
        nodes = [f"n{at}" for at in range(sum(lengths) + rng.randint(1, 2))]
        copies = min(rng.choice((1, 2, 2, 3)), len(nodes) - 1)
        workers = iter(rng.sample(nodes, sum(lengths)))
        pipelines = []
        for length in lengths:
            cuts = sorted(rng.sample(range(1, layers), length - 1))
            stages = [next(workers) for _ in range(length)]
            pipelines.append(tuple(stages[sum(cut <= layer for cut in cuts)] for layer in range(layers)))
        routes = [rng.choice(pipelines) for _ in range(rng.randint(1, 2))] + pipelines
        keepers = tuple(tuple(rng.sample(nodes, copies)) for _ in range(layers * parts))
        view = View((0, 0), tuple(nodes), tuple(routes), keepers)
        leaver = rng.choice(nodes) if len(nodes) > 3 and rng.random() < 0.3 else ""
        restless = rng.choice((0.0, 0.1, 0.3))
        return cls(view, copies, rng.randint(3, 6), restless, leaver, rng.choice((0, 1, 1, 2)))


# Two pipelines of two nodes, four grains, three layers in two chunks each with a spare copy, one node to spare;
# n2 is to leave. In four steps keepers are added, dropped and made root, and layers move away from it.
TWO_BY_TWO = Shape(
    View(
        key=(0, 0),
        nodes=("n0", "n1", "n2", "n3", "n4"),
        routes=(("n0", "n0", "n1"), ("n2", "n3", "n3")) * 2,
        keepers=(("n0", "n3"), ("n2", "n1"), ("n0", "n3"), ("n3", "n0"), ("n1", "n2"), ("n3", "n0")),
    ),
    copies=2,
    stop=4,
    restless=0.3,
    leaver="n2",
    crashes=0,
)


def reference(view: View, steps: int) -> tuple[list[list[int]], list[dict[tuple[int, int], int]]]:
    """One process that trains alone. Returns: chunks by version, and gradients by step, of a grain and a chunk."""
    states, sums = [[mix(chunk) for chunk in range(len(view.keepers))]], []
    layers = range(len(view.routes[0]))
    for step in range(steps):
        old = states[-1]
        grads: dict[tuple[int, int], int] = {}
        for grain in range(len(view.routes)):
            value, inputs = mix(step, grain), []
            for layer in layers:
                inputs.append(value)
                value = mix(value, *(old[chunk] for chunk in view.chunks(layer)))
            value = mix(value)
            for layer in reversed(layers):
                value = mix(value, inputs[layer], *(old[chunk] for chunk in view.chunks(layer)))
                grads |= {(grain, chunk): mix(value, chunk) for chunk in view.chunks(layer)}
        sums.append(grads)
        grains = range(len(view.routes))
        states.append([mix(state, *(grads[g, chunk] for g in grains)) for chunk, state in enumerate(old)])
    return states, sums


class Life:
    """One cluster, from a seed."""

    def __init__(
        self,
        seed: int,
        core: type[PlacedSync] = PlacedSync,
        grow: Regroup = grown,
        shape: Shape | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.shape = shape or Shape.drawn(self.rng)
        view, stop = self.shape.view, self.shape.stop
        policy = Policy(self.rng, self.shape.copies, self.shape.restless, self.shape.leaver, grow)
        self.nodes = {name: core(name, view, stop, policy.propose) for name in view.nodes}
        self.slow = {(a, b) for a in view.nodes for b in view.nodes if self.rng.random() < 0.2}
        self.living = dict.fromkeys(view.nodes)
        self.links: dict[tuple[str, str], deque[Message]] = {}
        self.busy: list[tuple[str, str]] = []
        self.states, self.sums = reference(view, stop)
        self.before: dict[tuple[int, int], View | None] = {view.key: None}  # Of a view that was voted for.
        self.settled: set[tuple[int, int]] = set()  # Views in which a step was committed.
        self.committed: set[int] = set()
        self.delivered = self.crashed = 0
        self.turning = False  # Was a message delivered that decides something? Then crashes are likelier.
        self.kinds: Counter[str] = Counter()
        self.story: deque[tuple[str, str, object]] = deque(maxlen=60)

    def run(self, crashes: Mapping[int, Crash] | None = None) -> Life:
        """Until no message is left. `crashes`: at which delivery, instead of at random. Raises: Broken."""
        try:
            for name, node in self.nodes.items():
                self._post(name, node.start())
            left = self.shape.crashes if crashes is None else 0
            while self.busy:
                if left and self.rng.random() < (0.05 if self.turning else 0.006):
                    left -= 1
                    self._crash(self.rng.choice([*self.living]))
                else:
                    self._deliver(crashes.get(self.delivered) if crashes else None)
            self._check_rest()
        except Exception as error:
            story = [f"{sender} -> {to}: {what}" for sender, to, what in self.story]
            raise Broken("\n".join([f"{type(error).__name__}: {error}", *story])) from error
        return self

    def _post(self, sender: str, messages: Iterable[tuple[str, Message]]) -> None:
        for to, message in messages:
            if to in self.living:
                link = self.links.setdefault((sender, to), deque())
                if not link:
                    self.busy.append((sender, to))
                link.append(message)

    def _deliver(self, crash: Crash | None) -> None:
        at = self.rng.randrange(len(self.busy))
        for _ in range(4 * (self.busy[at] in self.slow)):
            at = self.rng.randrange(len(self.busy))
        sender, to = self.busy[at]
        link = self.links[sender, to]
        message = link.popleft()
        if not link:
            self.busy[at] = self.busy[-1]
            self.busy.pop()
        self.delivered += 1
        self.kinds[type(message).__name__] += 1
        self.turning = isinstance(message, Commit | Flush | Install)
        if crash is Crash.SENDER_BEFORE and sender in self.living:
            link.clear()
            self._crash(sender)
        elif crash is Crash.RECEIVER_BEFORE:
            self._crash(to)
        else:
            self._handle(sender, to, message)
            victim = {Crash.SENDER_AFTER: sender, Crash.RECEIVER_AFTER: to}.get(crash) if crash else None
            if victim in self.living:
                self._crash(victim)

    def _handle(self, sender: str, to: str, message: Message) -> None:
        self.story.append((sender, to, message))
        node = self.nodes[to]
        view = node.view
        self._post(to, node.handle(sender, message))
        if node.view is not view:
            voted = node.installed != node.view.key
            self.before.setdefault(node.view.key, view if voted else None)
        if node.commit is not None:
            self.settled.add(node.commit.name[0])
            self.committed.add(node.commit.name[1])
        self._check(node)
        if node.ended is not None:
            self._check_loss(node.ended)
        if node.status is not Status.ACTIVE:
            self.story.append((to, to, node.status))
            self._end(to)

    def _crash(self, victim: str) -> None:
        self.story.append((victim, victim, "crashes"))
        self.crashed += 1
        for (sender, _), link in self.links.items():
            if sender == victim:
                for _ in range(self.rng.randint(0, len(link))):
                    link.pop()
        self._end(victim)

    def _end(self, name: str) -> None:
        """All others learn that it has gone, after what it has sent."""
        del self.living[name]
        for (_, to), link in self.links.items():
            if to == name:
                link.clear()
        self.busy = [pair for pair in self.busy if self.links[pair]]
        self._post(name, [(other, Lost()) for other in self.living])

    # --- rules --------------------------------------------------------------------------------------------

    def _check(self, node: PlacedSync) -> None:
        for chunk, (version, value) in node.states.items():
            assert version == 0 or version - 1 in self.committed, f"{node.me}: chunk {chunk} before commit"
            assert value == self.states[version][chunk], f"{node.me}: chunk {chunk} of version {version}"
        for (chunk, step), grads in node.sums.items():
            grains = [grain for grain, _, _ in grads]
            assert grains == [*range(len(self.shape.view.routes))], f"{node.me}: {chunk}, {step}: {grains}"
            rounds = {key for _, key, _ in grads}
            assert len(rounds) == 1, f"{node.me}: {chunk}, {step}: of several rounds"
            assert node.frozen or min(rounds) >= node.installed, (
                f"{node.me}: {chunk}, {step}: of a void round"
            )
            for grain, _, value in grads:
                assert value == self.sums[step][grain, chunk], f"{node.me}: {chunk}, {step}: grain {grain}"
        if node.status is Status.ACTIVE and node.step < self.shape.stop:
            for chunk, value in node.params.items():
                assert value == self.states[node.step][chunk], f"{node.me}: gathered chunk {chunk}"

    def _check_loss(self, ended: Ended) -> None:
        view = ended.view
        old = self.before[view.key] if view.key not in self.settled else None
        for chunk in ended.chunks:
            promised = {*view.keepers[chunk]}
            if old is not None and promised.issuperset(old.keepers[chunk]):
                promised = {*old.keepers[chunk]}
            alive = [each for each in promised if each in self.living]
            assert not alive, f"chunk {chunk} is lost, and yet {alive} live"

    def _check_rest(self) -> None:
        nodes = [self.nodes[name] for name in self.living]
        for node in nodes:
            where = f"{node.me} rests in {node.view.key} at step {node.step}, frozen: {node.frozen}"
            assert node.step == self.shape.stop and not node.frozen, where
            assert node.view.key == nodes[0].view.key, where
            for chunk in node.kept:
                assert node.states.get(chunk, (-1, 0))[0] == self.shape.stop, f"{where}: chunk {chunk}"


@dataclass(slots=True)
class Searched:
    """What came of many lives."""

    lives: int = 0
    messages: int = 0
    crashes: int = 0
    left: int = 0  # Nodes that did what they were asked to.
    lost: int = 0  # Lives that ended because all copies of something had died.
    kinds: Counter[str] = field(default_factory=Counter)
    broken: dict[str, str] = field(default_factory=dict)  # Seed or point: the story.

    def add(self, name: str, life: Life, crashes: Mapping[int, Crash] | None = None) -> None:
        """Play it."""
        self.lives += 1
        try:
            life.run(crashes)
        except Broken as error:
            self.broken[name] = str(error)
        self.messages += life.delivered
        self.crashes += life.crashed
        self.lost += any(node.status is Status.ENDED for node in life.nodes.values())
        self.left += sum(node.status is Status.LEFT for node in life.nodes.values())
        self.kinds.update(life.kinds)


def search(
    seeds: Iterable[int], core: type[PlacedSync] = PlacedSync, grow: Regroup = grown, most: int = 1
) -> Searched:
    """A random life for each seed, until so many have broken a rule."""
    found = Searched()
    for seed in seeds:
        found.add(f"seed {seed}", Life(seed, core, grow))
        if len(found.broken) >= most:
            break
    return found


def crash_points(seed: int, shape: Shape, first: Mapping[int, Crash] | None = None) -> list[dict[int, Crash]]:
    """A crash of either end at every message of a life, which may have one crash already: then after that one."""
    life = Life(seed, shape=shape).run(first or {})
    start = max(first or {}, default=-1) + 1
    return [{**(first or {}), at: crash} for at in range(start, life.delivered) for crash in Crash]


def play_points(
    seed: int,
    shape: Shape,
    points: Iterable[Mapping[int, Crash]],
    core: type[PlacedSync] = PlacedSync,
    grow: Regroup = grown,
    most: int = 1,
) -> Searched:
    """A life for each, until so many have broken a rule; all of them are alike until the crash."""
    found = Searched()
    for point in points:
        name = ", ".join(f"{crash.value} at {at}" for at, crash in point.items())
        found.add(f"seed {seed}: {name}", Life(seed, core, grow, shape), point)
        if len(found.broken) >= most:
            break
    return found
