"""`chaosnet demo --pipeline`: pipelines on this machine that lose a worker, get another, and lose a whole stage.

Starts six nodes as processes of their own (demo_gpt.py), kills some, and in the end lets one process do the same
steps by itself. What it reports is computed from what the nodes wrote down about each step, and each computation.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from ..callbacks import LayersComputed
from ..terminal.console import console
from .demo_stage import DemoFailed, free_ports
from .node_processes import (
    NodeProcess,
    end_all,
    lines_of,
    run_command,
    run_folder,
    sigterm_as_ctrl_c,
    wait_until,
)

PIPELINES, STAGES = 2, 3
LAYOUT = f"{PIPELINES}x{STAGES}"
PAUSE_S = 0.005  # That a block takes forwards, so that a person can see something.
CALM_STEPS, LAST_STEPS = 5, 3  # That are done in peace before the next thing happens; before the end.
PATIENCE_S = 120.0  # For each thing to be over.


class Committed(msgspec.Struct):
    """A line of a node about a step. `at_s`: by time.monotonic()."""

    at_s: float
    step: int
    round: int
    loss: float
    members: int
    layout: str
    why: str


@dataclass(frozen=True, slots=True)
class Loss:
    """Of these nodes, killed at that time. `kind`: "worker" or "stage"."""

    kind: str
    nodes: tuple[str, ...]
    at_s: float


class Stager(NodeProcess):
    """One process, and what it has written down. `fate`: what the demo did to it; "" for a survivor."""

    def __init__(self, name: str, address: str, out: Path, command: list[str]) -> None:
        self.name, self.address, self.fate = name, address, ""
        self.steps: list[Committed] = []
        self.computed: list[LayersComputed] = []
        self.final: dict[str, Any] = {}
        super().__init__(name, out, self._take, command)

    def _take(self, line: str) -> None:
        try:
            told = json.loads(line)
        except json.JSONDecodeError:
            return  # Half a line: it was killed while it wrote it.
        if "computed" in told:
            self.computed.append(msgspec.convert(told["computed"], LayersComputed))
        elif "step" in told:
            self.steps.append(msgspec.convert(told, Committed))
        elif "final_step" in told:
            self.final = told

    @property
    def step(self) -> int:
        return self.steps[-1].step if self.steps else 0


@dataclass
class Play:
    """The processes, and what is told of them. Leaving the block ends every process."""

    out: Path
    seed: int
    nodes: list[Stager] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    recovery_s: dict[str, float] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)  # Pipelines, one after the other.

    def __post_init__(self) -> None:
        self.started_s = time.monotonic()
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(PIPELINES * STAGES + 1)]
        self.console = console()

    def __enter__(self) -> Play:
        return self

    def __exit__(self, *exc_info: object) -> None:
        end_all(self.nodes)

    # --- processes ---

    def start(self) -> Stager:
        """One more, that joins those who live."""
        name, address = f"node-{len(self.nodes) + 1}", self.addresses[len(self.nodes)]
        seeds = ",".join(node.address for node in self.alive())
        options = ["--name", name, "--listen", address, *(["--join", seeds] if seeds else [])]
        return self._start(name, address, options, "--pause", str(PAUSE_S), "--layout", LAYOUT)

    def alone(self) -> Stager:
        """One process that does by itself, without pauses, what all have done."""
        return self._start("alone", "", ["--name", "alone", "--listen", "127.0.0.1:0", "--new"])

    def _start(self, name: str, address: str, options: list[str], *args: str) -> Stager:
        command = run_command(Path(__file__).with_name("demo_gpt.py"), *options)
        command += ["--log", str(lines_of(self.out, name)), "--until", str(self.last_step), *args]
        self.nodes.append(Stager(name, address, self.out, [*command, "--seed", str(self.seed)]))
        return self.nodes[-1]

    @property
    def last_step(self) -> Path:
        return self.out / "last-step"

    def alive(self) -> list[Stager]:
        """The nodes that the demo has done nothing to."""
        return [node for node in self.nodes if not node.fate]

    # --- time passes ---

    def wait(self, until: Callable[[], bool], what: str) -> None:
        """Read what the nodes write. Raises: DemoFailed if it takes too long, or if a node ends."""
        wait_until(until, what, PATIENCE_S, self._tick, DemoFailed)

    def _tick(self) -> None:
        for node in self.nodes:
            node.read()
            if not node.runs and not node.fate and not node.final:
                raise DemoFailed(
                    f"{node.name} ended with exit code {node.process.returncode}: {node.last_words()}"
                )
        self._tell_pipelines()
        time.sleep(0.005)

    def wait_for_steps(self, count: int, members: int) -> None:
        """All who live do so many steps among them."""

        def done() -> bool:
            recent = [node.steps[-count:] for node in self.alive()]
            return all(
                len(each) == count and all(step.members == members for step in each) for each in recent
            )

        self.wait(done, f"{members} members have done {count} steps")

    def wait_for_pipelines(self) -> None:
        """Those that were asked for run, and have done so for some steps."""

        def run() -> bool:
            recent = self.alive()[0].steps[-CALM_STEPS:]
            wanted = [STAGES] * PIPELINES
            return len(recent) == CALM_STEPS and all(
                [each.count(">") + 1 for each in step.layout.split("|")] == wanted
                and "gone" not in step.layout
                for step in recent
            )

        self.wait(run, f"{PIPELINES} pipelines of {STAGES} run")

    def _tell_pipelines(self) -> None:
        steps = self.alive()[0].steps
        if (
            steps
            and steps[-1].layout != (self.ran[-1] if self.ran else "")
            and self.alive()[0].name != "alone"
        ):
            self.ran.append(steps[-1].layout)
            self.say(f"   step {steps[-1].step}, pipelines ({steps[-1].why}): {steps[-1].layout}")

    def say(self, text: str) -> None:
        self.console.print(f"{time.monotonic() - self.started_s:5.1f} s  {text}", soft_wrap=True)

    # --- losses ---

    def middle(self) -> tuple[tuple[int, int], list[Stager]] | None:
        """The layers between the first and the last ones, and who computes them. None: other pipelines run."""
        found: dict[tuple[int, int], list[Stager]] = defaultdict(list)
        for node in self.alive():
            if node.computed and node.computed[-1].round >= node.steps[-1].round:
                found[node.computed[-1].layers].append(node)
        stages = sorted(found.items())
        return stages[1] if [len(nodes) for _, nodes in stages] == [PIPELINES] * STAGES else None

    def kill(self, kind: str, most: int) -> None:
        """So many of the middle stage at once, in the middle of a step. Then wait until the others have done one."""
        usual_s = statistics.median(b.at_s - a.at_s for a, b in pairwise(self.alive()[0].steps[-CALM_STEPS:]))
        before = self.alive()[0].step
        self.wait(lambda: self.alive()[0].step > before, "a step begins")
        middle_s = self.alive()[0].steps[-1].at_s + usual_s / 2
        self.wait(lambda: time.monotonic() > middle_s and self.middle() is not None, "all compute")
        (first, stop), victims = self.middle() or ((0, 0), [])
        victims = victims[-most:]
        self.losses.append(Loss(kind, tuple(node.name for node in victims), time.monotonic()))
        for node in victims:
            node.process.kill()
            node.fate = "killed"
        who = " and ".join(node.name for node in victims)
        layers = f"layers {first} to {stop - 1}" if stop - first > 1 else f"layer {first}"
        who += f" at once, all who compute {layers}" if most > 1 else ""
        self.say(f"{len(self.losses)}. kill -9 of {who}, in the middle of step {self.alive()[0].step + 1}")
        killed_s = self.losses[-1].at_s
        last = max(step.step for node in self.nodes for step in node.steps if step.at_s <= killed_s)

        def ended_s(node: Stager) -> float:
            return next((s.at_s for s in node.steps if s.step > last and s.at_s > killed_s), 0.0)

        self.wait(lambda: all(map(ended_s, self.alive())), "the others do the next step")
        self.recovery_s[kind] = max(map(ended_s, self.alive())) - killed_s
        self.say(
            f"   the others' next common step was done {self.recovery_s[kind]:.2f} s later, from its beginning"
        )


def play(on: Play) -> Stager:
    """All that happens. Returns: the one that did it alone."""
    count = PIPELINES * STAGES
    on.say(
        f"{count} processes start: {PIPELINES} pipelines of {STAGES} are wanted; two keep each layer's state"
    )
    for _ in range(count):
        on.start()
        if len(on.nodes) == 1:
            on.wait(lambda: on.nodes[0].step > 0, "the first trains")
    on.wait_for_steps(1, members=count)
    on.wait_for_pipelines()
    on.kill("worker", 1)
    on.wait_for_steps(CALM_STEPS, members=count - 1)
    joiner = on.start()
    on.say(f"   {joiner.name} starts in its place (Python and torch take a moment)")
    on.wait_for_steps(1, members=count)
    on.wait_for_pipelines()
    on.kill("stage", PIPELINES)
    on.wait_for_steps(CALM_STEPS, members=count - PIPELINES)
    last = on.alive()[0].step + LAST_STEPS
    _write_whole(on.last_step, str(last))
    survivors = on.alive()
    on.wait(lambda: all(node.final for node in survivors), "all have finished")
    on.say(f"{len(survivors)} processes are left, and stop after step {last}. One does the same alone")
    alone = on.alone()
    on.wait(lambda: bool(alone.final), "one process has done the same")
    on.wait(lambda: not any(node.runs for node in on.alive()), "all have ended")
    return alone


def _write_whole(path: Path, text: str) -> None:
    """So that nobody reads half of it."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


def summarize(on: Play, alone: Stager) -> dict[str, Any]:
    """What summary.json holds."""
    others = [node for node in on.nodes if node is not alone]
    alone_loss = {step.step: step.loss for step in alone.steps}
    seen = {step.step for node in others for step in node.steps}
    survivors = [node for node in others if not node.fate]
    return {
        "steps": max(seen),
        "steps_lost": len(set(range(1, max(seen) + 1)) - seen),
        "steps_that_differ": sum(
            step.loss != alone_loss.get(step.step) for node in others for step in node.steps
        ),
        "loss": survivors[0].steps[-1].loss,
        "loss_alone": alone.steps[-1].loss,
        "models_identical": len({(n.final["final_step"], n.final["hash"]) for n in [*survivors, alone]}) == 1,
        "recovery_seconds": on.recovery_s,
        "losses": [{"kind": each.kind, "nodes": each.nodes} for each in on.losses],
        "pipelines": on.ran,
        "exit_codes": {node.name: node.process.returncode for node in [*survivors, alone]},
        "seconds": round(time.monotonic() - on.started_s, 1),
        "seed": on.seed,
    }  # fmt: skip


def broken_promises(summary: dict[str, Any]) -> list[str]:
    """What the summary says that should not be; empty if all went well."""
    broken = [
        f"{name} is {summary[name]} (expected 0)"
        for name in ("steps_lost", "steps_that_differ")
        if summary[name]
    ]
    if summary["loss"] != summary["loss_alone"]:
        broken.append(f"loss is {summary['loss']} (expected {summary['loss_alone']}, as of one process)")
    if not summary["models_identical"]:
        broken.append("models_identical is false (expected that of one process on all survivors)")
    broken += [f"{name} ended with exit code {code}" for name, code in summary["exit_codes"].items() if code]
    return broken


def run_demo(out: Path, seed: int) -> None:
    """Play, sum up, draw. Raises: DemoFailed if a promise was broken."""
    from .pipeline_picture import draw

    run_folder(out)
    with sigterm_as_ctrl_c(), Play(out, seed) as on:
        alone = play(on)
        summary = summarize(on, alone)
        on.last_step.unlink()
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        draw(out / "demo-pipeline.png", [node for node in on.nodes if node is not alone], on.losses)
        on.say(
            f"loss after step {summary['steps']}: {summary['loss']!r}; of one process: {summary['loss_alone']!r}"
        )
        on.say(f"written: {out / 'summary.json'}, {out / 'demo-pipeline.png'}, and a log of each node")
    if broken := broken_promises(summary):
        raise DemoFailed(f"demo: {'; '.join(broken)} (the nodes' logs are in {out})")
