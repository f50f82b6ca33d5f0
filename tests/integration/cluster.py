"""Clusters of real processes on loopback: starts them, gives them orders, and judges what they report."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import worker
from torch import nn

PATIENCE_S = 20.0
Record = dict[str, Any]

# Forked from a process that has imported what a script needs: a start costs 30 ms instead of 4 s.
PRELOAD = ["torch", "torch._dynamo", "pytest", "chaosnet.trainer"]  # Optimizers need dynamo.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOAD)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # Inherited by the fork server.


class Node:
    """One process. `records` is what it has told so far, in order."""

    def __init__(
        self, cluster: Cluster, name: str, script: Callable[..., None], settings: dict[str, Any]
    ) -> None:
        self.cluster, self.name = cluster, name
        self.records: list[Record] = []
        self._killed = False
        self.log = cluster.folder / f"{name}.log"
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=worker.run, args=(script, name, settings, theirs, str(self.log)), name=name
        )
        self.process.start()
        theirs.close()

    # What it has told.

    def told(self, what: str) -> list[Record]:
        return [record for record in list(self.records) if record["what"] == what]

    def last(self, what: str) -> Record:
        """The newest of a kind; waits for the first."""
        self.cluster.until(lambda: self.told(what) or self.told("ended"), f"{self.name} tells of {what!r}")
        assert self.told(what), f"{self.name} ended before it told of {what!r}\n{self.cluster.story()}"
        return self.told(what)[-1]

    @property
    def step(self) -> int:
        steps = self.told("step")
        return steps[-1]["step"] if steps else 0

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    @property
    def killed(self) -> bool:
        return self._killed or bool(self.told("dies"))

    def reach(self, step: int) -> None:
        """Wait until it has applied that step."""
        self.cluster.until(
            lambda: self.step >= step, f"{self.name} reaches step {step} (it is at {self.step})"
        )

    def advance(self, steps: int = 30) -> None:
        self.reach(self.step + steps)

    def ended(self) -> Record:
        """Wait for the end of its script. Returns: {"how": "returned" or the exception's name, "reason"}."""
        return self.last("ended")

    # What can happen to it.

    def order(self, **command: Any) -> None:
        self.pipe.send_bytes(json.dumps(command).encode())

    def signal(self, number: signal.Signals) -> float:
        """Returns: the time just before."""
        at_s = time.monotonic()
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        return at_s

    def kill(self) -> float:
        self._killed = True
        return self.signal(signal.SIGKILL)

    def dies(self) -> float:
        """Wait until it has come to the point where it was to die. Returns: when that was."""
        return float(self.last("dies")["at_s"])

    def exit_code(self) -> int:
        """Wait for the process to end."""
        self.process.join(PATIENCE_S)
        assert self.process.exitcode is not None, f"{self.name} does not end"
        return self.process.exitcode


class Cluster:
    """Nodes named a, b, c, ...; the first founds. `settings` are of all nodes started (worker.py)."""

    def __init__(self, folder: Path, script: Callable[..., None] = worker.train, **settings: Any) -> None:
        self.folder, self.script, self.settings = folder, script, settings
        self.nodes: list[Node] = []
        self._by_pipe: dict[Connection, Node] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    # Starting.

    def start(self, script: Callable[..., None] | None = None, **settings: Any) -> Node:
        """Start one more node. It joins through all that are members now; see `joined`."""
        seeds = [node.last("joined")["address"] for node in self.live()]
        join = {"join": ",".join(seeds)} if seeds else {}
        return self.start_alone(script, **{**join, **self.settings, **settings})

    def start_alone(self, script: Callable[..., None] | None = None, **settings: Any) -> Node:
        """Start one more process, which finds the others by itself, if it is to."""
        name = chr(ord("a") + len(self.nodes))
        node = Node(self, name, script or self.script, {**self.settings, **settings})
        self.nodes.append(node)
        self._by_pipe[node.pipe] = node
        return node

    def grow(self, count: int, **settings: Any) -> list[Node]:
        """Start nodes and wait until they are members and have trained together."""
        if not self.nodes:
            self.start(**settings).last("joined")
            count -= 1
        new = [self.start(**settings) for _ in range(count)]
        for node in new:
            node.last("joined")
        self.live()[0].advance(5)
        return self.nodes

    def live(self) -> list[Node]:
        """Nodes whose script has neither ended nor been killed."""
        return [node for node in self.nodes if node.alive and not node.killed and not node.told("ended")]

    def scheduler(self) -> Node:
        """The founder until it is gone; then whoever said to be elected last."""
        elected = [r for node in self.live() for r in node.told("notice") if r["kind"] == "scheduler"]
        name = max(elected, key=lambda r: r["at_s"])["node"] if elected else "a"
        return next(node for node in self.nodes if node.name == name)

    def without(self, name: str, after_s: float, patience_s: float = PATIENCE_S) -> float:
        """Wait until all live nodes have done a step without `name`. Returns: seconds since `after_s`."""
        survivors = [node for node in self.live() if node.name != name]

        def first(node: Node) -> float | None:
            steps = (r for r in node.told("step") if r["at_s"] > after_s and name not in r["by"])
            return next((record["at_s"] for record in steps), None)

        self.until(lambda: all(map(first, survivors)), f"steps without {name}", patience_s)
        return max(first(node) or 0.0 for node in survivors) - after_s

    def notices(self, *kinds: str) -> list[Record]:
        """What the cluster told of events of these kinds, each once."""
        told = {(r["kind"], r["node"], r["step"]): r for node in self.nodes for r in node.told("notice")}
        return [record for record in told.values() if record["kind"] in kinds]

    # Waiting.

    def until(self, happened: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
        """Wait until `happened()` is true. Returns: what it returned."""
        deadline_s = time.monotonic() + patience_s
        with self._changed:
            while not (result := happened()):
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"not in {patience_s:g} s: {what}\n{self.story()}"
                self._changed.wait(min(left_s, 0.5))
        return result

    def _read(self) -> None:
        while not self._closing:
            pipes = list(self._by_pipe)
            for pipe in wait(pipes, timeout=0.05) if pipes else [time.sleep(0.01)]:
                if isinstance(pipe, Connection):
                    self._read_one(pipe)

    def _read_one(self, pipe: Connection) -> None:
        node = self._by_pipe[pipe]
        try:
            record = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            del self._by_pipe[pipe]
            return
        with self._changed:
            node.records.append(record)
            self._changed.notify_all()

    # Ending.

    def leave(self) -> None:
        """Let all live nodes leave at once."""
        live = self.live()
        for node in live:
            node.order(leave=True)
        for node in live:
            assert node.exit_code() == 0, self.story()

    def finish(self) -> None:
        """Let all live nodes leave at once, then check what the whole run has promised."""
        self.leave()
        self.check()

    def close(self) -> None:
        """Kill what still runs; every process is waited for."""
        for node in self.nodes:
            if node.process.is_alive():
                node.process.kill()
        for node in self.nodes:
            node.process.join(PATIENCE_S)
        self._closing = True
        self._reader.join()

    def story(self) -> str:
        """The last lines of every node and where its threads are, for a failed assertion."""
        for node in self.nodes:
            if node.alive:
                node.signal(signal.SIGUSR1)
        time.sleep(0.3)
        lines: list[str] = []
        for node in self.nodes:
            log = node.log.read_text(errors="replace").splitlines() if node.log.exists() else []
            lines.append(f"--- {node.name}: step {node.step}, exit code {node.process.exitcode}")
            lines += log[-40:]
        return "\n".join(lines)

    # Judging.

    def check(self) -> None:
        """No step lost or applied twice, equal states, each sample once, and the losses of one process."""
        self.check_steps()
        self.check_samples()
        self.check_losses()

    def steps(self) -> dict[int, Record]:
        """Step: what all that applied it agree it was. Asserts that they do, and that nobody missed one.

        A node that was killed may alone have completed its last step: then the others did it again without it.
        """
        agreed: dict[int, Record] = {}
        told_by: dict[int, str] = {}
        mains: dict[int, set[str]] = defaultdict(set)
        for node in sorted(self.nodes, key=lambda node: node.killed):
            _check_rounds(node)
            kept = _kept_steps(node)
            for record in kept:
                if not record["applied"]:
                    continue
                step = record["step"]
                other = agreed.setdefault(step, record)
                fields = ("weight", "by", "means", "epoch", "round")
                # As text, for a mean may be NaN, which equals nothing.
                ours, theirs = ([str(each[field]) for field in fields] for each in (record, other))
                died_with_it = node.killed and record is kept[-1] and node.name not in other["by"]
                if ours != theirs and died_with_it:
                    continue
                assert ours == theirs, (
                    f"step {step}, {fields}: {ours} on {node.name}, {theirs} on {told_by[step]}"
                )
                if record["hash"] and other["hash"]:
                    assert record["hash"] == other["hash"], (
                        f"step {step}: the states of {node.name} and {told_by[step]} differ\n{self.story()}"
                    )
                told_by.setdefault(step, node.name)
                mains[step] |= {node.name} if record["is_main"] else set()
        assert max(map(len, mains.values()), default=0) <= 1, f"several are main: {mains}"
        return agreed

    def check_steps(self) -> None:
        """Every node applied every step since it joined, and all to the same effect."""
        steps = self.steps()
        assert sorted(steps) == list(range(1, max(steps) + 1)), f"steps are missing: {_odd(sorted(steps))}"

    def batches(self) -> dict[int, dict[str, Record]]:
        """Step: the batches that counted in it, by node. What a dead node had under way did not count."""
        counted: dict[int, dict[str, Record]] = defaultdict(dict)
        steps = self.steps()
        for node in self.nodes:
            for record in node.told("batch"):
                step, indices = record["step"], record["indices"]
                if step in steps and node.name in steps[step]["by"]:
                    whole = counted[step].setdefault(node.name, {"epoch": record["epoch"], "indices": []})
                    whole["indices"] += indices
        for step, by_node in counted.items():
            sizes = {name: len(record["indices"]) for name, record in by_node.items()}
            assert sum(sizes.values()) == steps[step]["weight"], f"step {step}: {sizes}, {steps[step]}"
        return counted

    def check_samples(self) -> None:
        """Each sample of an epoch exactly once over all nodes; of the last epoch at most once."""
        seen: dict[int, list[int]] = defaultdict(list)
        for _, by_node in sorted(self.batches().items()):
            for record in by_node.values():
                seen[record["epoch"]] += record["indices"]
        length = self.settings.get("samples", 96)
        for epoch in range(max(seen)):
            assert sorted(seen[epoch]) == list(range(length)), (
                f"epoch {epoch} of {length} samples: {seen[epoch]}"
            )
        last = seen[max(seen)]
        assert len(set(last)) == len(last)

    def check_losses(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Callable[[nn.Module, torch.Tensor, torch.Tensor, str], torch.Tensor] = worker.loss_of,
        before_step: Callable[[], Any] = lambda: None,
        after_step: Callable[[float], Any] = lambda mean: None,
        tolerance: float = 1e-3,
    ) -> None:
        """The cluster's mean losses are those of one process that trains on the same global batches."""
        data, model = worker.Numbered(self.settings.get("samples", 96)), model or worker.make_model()
        optimizer = optimizer or worker.make_optimizer(model)
        steps, batches = self.steps(), self.batches()
        for step in sorted(steps):
            mean, total = 0.0, steps[step]["weight"]
            for name, record in batches[step].items():
                indices = record["indices"]
                part = loss(model, data.x[indices], data.y[indices], name) * (len(indices) / total)
                part.backward()
                mean += part.item()
            before_step()
            optimizer.step()
            optimizer.zero_grad()
            after_step(mean)
            theirs = steps[step]["means"]["loss"]
            assert abs(mean - theirs) <= tolerance * max(1.0, abs(theirs)), (
                f"step {step}: mean loss {theirs} in the cluster, {mean} in one process"
            )


@contextmanager
def busy_machine(processes: int, seconds: float) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    spinning = [context.Process(target=worker.spin, args=(seconds,)) for _ in range(processes)]
    for process in spinning:
        process.start()
    try:
        yield
        for process in spinning:
            process.join()
    finally:
        for process in spinning:
            process.kill()
            process.join()


@contextmanager
def cluster_of(count: int, folder: Path, **settings: Any) -> Iterator[Cluster]:
    """A cluster of `count` nodes that train; all processes are gone at the end, whatever happens."""
    torch.set_num_threads(1)
    cluster = Cluster(folder, **settings)
    try:
        if count:
            cluster.grow(count)
        yield cluster
    finally:
        cluster.close()


def longest_gap_s(node: Node, since_s: float = 0.0) -> float:
    """The longest time between two steps that a node applied, from `since_s` on."""
    times = [record["at_s"] for record in node.told("step") if record["at_s"] >= since_s]
    return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def _check_rounds(node: Node) -> None:
    """From the state that it began with, or was sent, every round follows. A joiner may be sent one again."""
    due, rounds = 0, []
    for record in list(node.records):
        if record["what"] == "loaded":
            due = record["round"]
        elif record["what"] == "step":
            rounds.append(record["round"])
            assert record["round"] == due, f"{node.name} applied rounds {_odd(rounds)}, but {due} was due"
            due += 1


def _kept_steps(node: Node) -> list[Record]:
    """Steps behind the state that it has. Who is left behind may end one more by itself: the last before a load."""
    kept: list[Record] = []
    for record in list(node.records):
        if record["what"] == "step":
            kept.append(record)
        elif record["what"] == "loaded" and kept:
            kept.pop()
    return kept


def _odd(numbers: list[int]) -> str:
    """Where consecutive numbers are not."""
    jumps = [(a, b) for a, b in itertools.pairwise(numbers) if b != a + 1]
    return f"{numbers[:1]}...{numbers[-1:]} with jumps {jumps[:5]}"
