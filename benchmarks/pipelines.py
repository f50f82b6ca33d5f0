"""Steps of pipelines among real processes on loopback, beside what they could be at best.

    program   four stages of emulated layers: a step by the time that the compiled program takes with these layers; so
              is one of the same program over bare sockets (bare_pipelines.py). With short layers, where what a step
              adds weighs most, and with layers as long as those that pipelines_size.py gives GPT-2 small
    two       two stages of real layers on two processors, by one process with the same layers. In turns, within one
              cluster; and so is a plain loop of the same micro-batches, without a cluster. And over bare sockets
    choose    which pipelines run after one of 16 members is lost: processor time
    device    the same two stages and turns on an accelerator (`--accelerator`), with layers of GPT-2 small's sizes.
              Both members share one device: it tells what handing on costs, and not how fast two devices are
    kill      kill -9 in the middle of a step, until the next one is committed, less a step of the pipelines that are
              left: what it takes to notice, to agree, and to begin anew
    flush     one of four, and of 16, is killed: from the FLUSH until all first stages compute; what a member uses of
              a processor until then, and to enter the view without the lost one, with its links and trees

`choose` and `kill` need little of a processor. `two` needs two that nobody else uses, and so does `program` for the
moments in which all four have something to do.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import nn

from ..node.devices import wait_for_device
from ..scheduler.elastic.cluster import Cluster, Worker
from ..scheduler.elastic.estimator import ProfiledCosts, time_program
from ..scheduler.elastic.profile import Layer, Profile
from ..scheduler.elastic.program import Program
from ..terminal.outputs import json_option, write_json
from .accelerators import device_for
from .bare_pipelines import bare_step_s
from .choices import measure_choose
from .figures import middle_half
from .flush_watch import Flushed, FlushWatch, times_of
from .pipelines_size import size_command
from .processes import Pipe, WorkerFailed, Workers

__all__ = ["pipelines_command", "size_command"]

PARTS = ("program", "two", "choose", "kill", "flush")
DEVICE = "device"
FORWARDS_S = 0.010, 0.030  # Of an emulated layer; backward takes twice as long.
TOKENS, WIDTH = 64, 256  # Of what goes from one emulated layer to the next, for one micro-batch: 64 kB.
ROWS, QUICK_ROWS, REAL_WIDTH = 1024, 32, 512  # Of a real one: 2 MB, or less if it is to be quick.
# The first layer has no gradient of its input to find: five products instead of six. So both take as long.
INNER_WIDTHS = 576, 480
# On an accelerator a stage is so many feed-forward blocks of GPT-2 small's sizes; a micro-batch is 4 x 1024 tokens.
DEVICE_DEPTH, DEVICE_WIDTH, DEVICE_ROWS = 8, 768, 4096
FLUSHED = 1, 4  # Pipelines of four.
CALM_STEPS = 3  # After a change, before steps count.
PATIENCE_S = 120.0


class Training(NamedTuple):
    """What a cluster trains.

    `rows`: of what real layers are given; 0: they are emulated, and forward takes `forward_s`. `blocks`: layouts that
    take turns, each for so many steps; "": a plain loop. `watch`: note flushes instead.
    """

    layout: str
    micro_batches: int
    rows: int = 0
    forward_s: float = FORWARDS_S[0]
    stages: int = 1
    blocks: tuple[str, ...] = ()
    block_steps: int = 0
    device: str = "cpu"
    watch: bool = False

    @property
    def width(self) -> int:
        """Of a row that real layers are given."""
        return REAL_WIDTH if self.device == "cpu" else DEVICE_WIDTH

    @property
    def layer_s(self) -> tuple[float, float]:
        """Forward and backward of an emulated layer and a micro-batch."""
        return self.forward_s, 2 * self.forward_s

    def layers(self) -> list[nn.Module]:
        """The same on all members."""
        if not self.rows:
            from ..emulated import Emulated

            return [Emulated(*self.layer_s) for _ in range(4)]
        torch.manual_seed(0)
        width = self.width
        if self.device != "cpu":
            return [
                nn.Sequential(*(_feed_forward(width) for _ in range(DEVICE_DEPTH))).to(self.device)
                for _ in range(2)
            ]
        return [
            nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))
            for inner in INNER_WIDTHS
        ]

    def data(self) -> Repeated:
        """Each sample is a matrix, and a micro-batch has one."""
        shape = (self.rows, self.width) if self.rows else (TOKENS, WIDTH)
        torch.manual_seed(1)
        return Repeated(1000 * self.micro_batches, (torch.randn(shape), torch.randn(shape)))


def _feed_forward(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Repeated:
    """A data set of one sample, many times."""

    def __init__(self, length: int, sample: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._length, self._sample = length, sample

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._sample


class Seen(NamedTuple):
    """A step that is committed. `layout`: as it was computed; `compiled_s`: what its program takes, if emulated."""

    at_s: float
    step: int
    members: int
    layout: str
    compiled_s: float

    @property
    def stages(self) -> list[int]:
        """Of each pipeline."""
        return [each.count(">") + 1 for each in self.layout.split("|")]


def _worker(pipe: Pipe, name: str, join: str, task: Training) -> list[tuple[str, float]] | list[Flushed]:
    """Trains until it is told to leave. The founder sends what it has seen of each step.

    Returns: blocks of steps, and the seconds of a step in each; or its flushes.
    """
    from ..pipeline_trainer import PipelineTrainer
    from ..settings.groups import Cluster as At

    torch.set_num_threads(1)
    layers = task.layers()
    optimizer = torch.optim.SGD(nn.ModuleList(layers).parameters(), 1e-3)
    trainer = PipelineTrainer(
        layers, optimizer, nn.functional.mse_loss, batch=task.micro_batches, micro_batch=1, layout=task.layout,
        stages=task.stages, cluster=At(join=join, name=name, listen="127.0.0.1:0", new=not join), quiet=True,
    )  # fmt: skip
    pipe.send("in" if join else trainer.status().members[0].addresses[0])
    watch = FlushWatch(trainer, layers[0]) if task.watch else None
    data = task.data()
    plain = _plain_loop(layers, optimizer, data, task)
    turns = _turns(trainer, task, plain) if task.blocks and not join else None
    blocks: list[tuple[str, float]] = []
    for done in trainer.steps(data, epochs=10**9):
        if not join:
            running = trainer.engine.running
            compiled_s = _compiled_s(running.program, task, len(layers)) if running else 0.0
            pipe.send(Seen(time.monotonic(), done.step, len(done.members), trainer.layout, compiled_s))
        if pipe.poll():
            break
        if turns is not None and len(done.members) > 1:
            blocks += next(turns)
    trainer.request_node_exit()
    return watch.seen if watch else blocks


def _compiled_s(program: Program, task: Training, layers: int) -> float:
    """Of emulated layers, without what it takes to send anything."""
    profile = Profile("emulated", (Layer({1: task.layer_s}, 0, 0, 0, 0, 0),) * layers)
    workers = {name: Worker() for name in program.plan.placement}
    return time_program(program, ProfiledCosts(profile, Cluster(workers, latency_s=0.0))).step_s


def _plain_loop(
    layers: Sequence[nn.Module], optimizer: torch.optim.Optimizer, data: Repeated, task: Training
) -> Callable[[], None]:
    """A step of one process that knows of no cluster. It leaves the weights as they are."""
    model = nn.Sequential(*layers)

    def step() -> None:
        for number in range(task.micro_batches):
            x, y = (each.unsqueeze(0).to(task.device) for each in data[number])
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.zero_grad(set_to_none=True)
        wait_for_device()

    return step


def _turns(trainer: Any, task: Training, plain: Callable[[], None]) -> Iterator[list[tuple[str, float]]]:
    """Is asked after each step for what comes next. Gives the blocks that are over."""
    for layout in itertools.cycle(task.blocks):
        if not layout:
            began_s = time.monotonic()
            for _ in range(task.block_steps):
                plain()
            yield [("", (time.monotonic() - began_s) / task.block_steps)]
            continue
        trainer.relayout(layout)
        while len(trainer.layout.split(">")) != int(layout):
            yield []
        yield []  # What changes, changes in the step before.
        began_s = time.monotonic()
        for _ in range(task.block_steps - 1):
            yield []
        yield [(layout, (time.monotonic() - began_s) / (task.block_steps - 1))]


class Group:
    """The processes of a cluster; `with` ends them. `seen`: by the founder."""

    def __init__(self, task: Training, count: int) -> None:
        self.task, self.workers = task, Workers()
        self.names: list[str] = []
        self.seen: list[Seen] = []
        self._number = itertools.count()
        self._address = ""
        self._count = count

    def __enter__(self) -> Group:
        self.workers.__enter__()
        for _ in range(self._count):
            self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.workers.__exit__(*exc_info)

    def start(self) -> None:
        """One more. The founder is waited for."""
        name = f"n{next(self._number)}"
        self.workers.start(name, _worker, name, self._address, self.task)
        if not self.names:
            self._address = self.workers.receive(name)
        self.names.append(name)

    def next(self) -> Seen:
        """The next step."""
        self.seen.append(Seen(*self.workers.receive(self.names[0], PATIENCE_S)))
        return self.seen[-1]

    def until(self, wanted: Callable[[Seen], bool], patience_s: float = PATIENCE_S) -> None:
        """Let it train until a step is as wanted, and some more so that it is calm."""
        began_s = time.monotonic()
        while not wanted(self.next()):
            if time.monotonic() - began_s > patience_s:
                raise WorkerFailed(f"it trains as {self.seen[-1].layout!r} after {patience_s:g} s")
        for _ in range(CALM_STEPS):
            self.next()

    def run(self, steps: int, tell_every: int = 0) -> list[Seen]:
        """So many steps, and the one before."""
        first = len(self.seen) - 1
        for number in range(1, steps + 1):
            self.next()
            if tell_every and not number % tell_every:
                _progress(f"{number} of {steps} steps")
        return self.seen[first:]

    def leave(self) -> list[Any]:
        """All. Returns: what each has measured, the founder first."""
        for name in self.names:
            self.workers.tell(name, "leave")
        return [self._last_of(name) for name in self.names]

    def _last_of(self, name: str) -> Any:
        while isinstance(told := self.workers.receive(name, PATIENCE_S), Seen | str):
            pass
        return told


def _progress(text: str) -> None:
    """How far it is, beside what it finds."""
    click.echo(f"  {text}", err=True)


def _lengths(seen: Sequence[Seen]) -> list[float]:
    """Of steps that ran as the one before them did."""
    return [b.at_s - a.at_s for a, b in itertools.pairwise(seen) if a.layout == b.layout]


# --- the three ---


def measure_program(steps: int, forward_s: float) -> dict[str, Any]:
    """Four emulated stages, 16 micro-batches."""
    _progress(f"layers of {1e3 * forward_s:.0f} ms")
    with Group(Training("4", micro_batches=16, forward_s=forward_s), 4) as group:
        group.until(lambda seen: seen.stages == [4])
        seen = group.run(steps, tell_every=10)
        group.leave()
    compiled_s = seen[-1].compiled_s
    ratios = [took_s / compiled_s for took_s in _lengths(seen)]
    return {
        "steps": len(ratios),
        "forward_s": forward_s,
        "compiled_s": compiled_s,
        "measured_s": statistics.median(ratios) * compiled_s,
        "ratio": statistics.median(ratios),
        "middle_half": middle_half(ratios),
        "bare_ratio": bare_step_s(group.task, 4, steps) / compiled_s,
        "plain_ratio": _plain_ratio(group.task),
    }


def _plain_ratio(task: Training) -> float:
    """What a plain loop over emulated layers takes in this process, by the seconds that they are given."""
    layers = task.layers()
    step = _plain_loop(layers, torch.optim.SGD(nn.ModuleList(layers).parameters()), task.data(), task)
    step()  # The first one loads what torch needs.
    began_s = time.monotonic()
    step()
    given_s = task.micro_batches * len(layers) * sum(task.layer_s)
    return (time.monotonic() - began_s) / given_s


def measure_two(rounds: int, steps: int, rows: int, device: str = "cpu") -> dict[str, Any]:
    """Two real stages, 8 micro-batches, beside one process."""
    micro_batches = 8
    task = Training("2", micro_batches, rows, blocks=("2", "1", ""), block_steps=steps, device=device)
    with Group(task, 2) as group:
        group.until(lambda seen: seen.stages == [2])
        changes = 0
        while changes <= 2 * (rounds + 1):
            before = group.seen[-1].stages
            changed = group.next().stages != before
            changes += changed
            if changed and changes % 2:
                _progress(f"round {changes // 2} of {rounds + 1}")
        blocks = group.leave()[0]
    found = {layout: [took_s for name, took_s in blocks if name == layout][1:] for layout in task.blocks}
    ones = [one / two for one, two in zip(found["1"], found["2"], strict=False)]
    plains = [plain / two for plain, two in zip(found[""], found["2"], strict=False)]
    is_bare = device == "cpu"  # Its tensors travel as they lie in memory.
    bare_s = [bare_step_s(task, stages, steps * rounds) for stages in (1, 2)] if is_bare else []
    return {
        "rounds": len(ones),
        "one_s": statistics.median(found["1"]),
        "two_s": statistics.median(found["2"]),
        "plain_s": statistics.median(found[""]),
        "speedup": statistics.median(ones),
        "speedup_over_plain": statistics.median(plains),
        "bare_s": bare_s,
        "middle_half": middle_half(ones),
        "bound": 2 * micro_batches / (micro_batches + 1),
    }


def measure_kill(kills: int, steps: int) -> dict[str, Any]:
    """Two emulated pipelines of two; each loss is made good before the next."""
    took_s, step_s = [], []
    with Group(Training("2x2", micro_batches=8, stages=2), 4) as group:
        for index in range(kills):
            if index:
                group.start()
            group.until(lambda seen: seen.stages == [2, 2])
            killed_s, next_s = _lose(group, 1 + index % 3, steps)
            for _ in range(CALM_STEPS):
                group.next()
            step_s.append(statistics.median(_lengths(group.run(steps))))
            took_s.append(next_s - killed_s - step_s[-1])
            _progress(f"kill {index + 1} of {kills}: {took_s[-1]:.3f} s")
        group.leave()
    return {
        "kills": kills,
        "seconds": took_s,
        "median_s": statistics.median(took_s),
        "step_after_s": statistics.median(step_s),
    }


def _lose(group: Group, victim: int, steps: int) -> tuple[float, float]:
    """Kill one in the middle of a step, after so many usual ones. Returns: when, and when the next was committed."""
    usual_s = statistics.median(_lengths(group.run(steps)))
    name = group.names.pop(victim)
    time.sleep(max(group.seen[-1].at_s + usual_s / 2 - time.monotonic(), 0.0))
    killed_s = group.workers.kill(name)
    while group.next().at_s < killed_s:
        pass
    return killed_s, group.seen[-1].at_s


def measure_flush(kills: int, steps: int, pipelines: int) -> dict[str, Any]:
    """So many emulated pipelines of four; each loss is made good before the next."""
    members, moments = 4 * pipelines, []
    task = Training(f"{pipelines}x4", micro_batches=4 * pipelines, stages=4, watch=True)
    with Group(task, members) as group:
        for index in range(kills):
            if index:
                group.start()
            group.until(lambda seen: seen.members == members and seen.stages == [4] * pipelines)
            moments.append(_lose(group, 1 + index % (members - 1), steps))
            _progress(f"kill {index + 1} of {kills}")
        found = group.leave()
    times = [times_of(found, *each) for each in moments]
    edits_s = [edit_s for each in times for edit_s in each.edits_s]
    return {
        "members": members,
        "kills": kills,
        "to_first_s": [each.to_first_s for each in times],
        "processor_s": statistics.median(each.processor_s for each in times),
        "edit_median_s": statistics.median(edits_s),
        "edit_most_s": max(edits_s),
    }


# --- the command ---


def _line(part: str, found: dict[str, Any]) -> str:
    if part == "program":
        return "\n".join(map(_program_line, found["cases"]))
    if part in ("two", DEVICE):
        low, high = found["middle_half"]
        told = (
            f"{part}: 2 stages, 8 micro-batches: a step {1e3 * found['two_s']:.0f} ms, of one member "
            f"{1e3 * found['one_s']:.0f} ms: {found['speedup']:.2f} times as fast "
            f"(middle half of {found['rounds']}: {low:.2f} to {high:.2f}; at most {found['bound']:.2f}); a plain "
            f"loop {1e3 * found['plain_s']:.0f} ms: {found['speedup_over_plain']:.2f} times as fast"
        )
        if not found["bare_s"]:
            return told
        bare_one_s, bare_two_s = found["bare_s"]
        return told + (
            f"; over bare sockets {1e3 * bare_two_s:.0f} ms, of one process {1e3 * bare_one_s:.0f} ms: "
            f"{bare_one_s / bare_two_s:.2f} times as fast"
        )
    if part == "choose":
        return f"choose: 16 members, one is lost: {'; '.join(map(_choice, found['cases']))}"
    if part == "flush":
        return "\n".join(map(_flush_line, found["cases"]))
    each = ", ".join(f"{seconds:.3f}" for seconds in sorted(found["seconds"]))
    return (
        f"kill: kill -9 to the next committed step, less a step ({1e3 * found['step_after_s']:.0f} ms): "
        f"{found['median_s']:.3f} s (median of {each})"
    )


def _program_line(case: dict[str, Any]) -> str:
    low, high = case["middle_half"]
    return (
        f"program: 4 stages, 16 micro-batches, {1e3 * case['forward_s']:.0f} ms forward: a step "
        f"{1e3 * case['measured_s']:.1f} ms, compiled {1e3 * case['compiled_s']:.1f} ms, ratio {case['ratio']:.3f} "
        f"(middle half of {case['steps']}: {low:.3f} to {high:.3f}); over bare sockets {case['bare_ratio']:.3f}; "
        f"a plain loop by what its layers are given: {case['plain_ratio']:.3f}"
    )


def _flush_line(case: dict[str, Any]) -> str:
    each = ", ".join(f"{1e3 * seconds:.0f}" for seconds in sorted(case["to_first_s"]))
    return (
        f"flush: {case['members']} members, one is lost: from the first FLUSH until all first stages compute "
        f"{1e3 * statistics.median(case['to_first_s']):.0f} ms (median of {each}); of a member's processor time "
        f"{1e3 * case['processor_s']:.0f} ms, {1e3 * case['edit_median_s']:.1f} of them to enter the view (the most: "
        f"{1e3 * case['edit_most_s']:.1f})"
    )


def _choice(case: dict[str, Any]) -> str:
    return (
        f"{case['stages']} stages, {case['micro_batches']} micro-batches: {case['median_ms']:.1f} ms "
        f"({case['least_ms']:.1f} to {case['most_ms']:.1f}), the first of these layers {case['first_ms']:.0f} ms"
    )


@click.command("pipelines")
@click.option(
    "--parts",
    default=",".join(PARTS),
    show_default=True,
    help="What to measure; `two` needs a quiet machine.",
)
@click.option("--quick", is_flag=True, help="Few steps, and one kill: to see that it runs.")
@click.option(
    "--accelerator", is_flag=True, help=f"The part {DEVICE!r} instead, on the device that torch finds."
)
@json_option
def pipelines_command(parts: str, quick: bool, accelerator: bool, json_file: Path | None) -> None:
    """Steps of pipelines beside their program, one process, and a step without a loss."""
    wanted = parts.split(",")
    for part in wanted:
        if part not in PARTS:
            raise click.UsageError(f"--parts: {part!r} (expected some of {', '.join(PARTS)})")
    if accelerator and parts != ",".join(PARTS):
        raise click.UsageError(
            f"--parts: {parts!r} beside --accelerator, whose part is {DEVICE!r} (expected one of them)"
        )
    device = device_for("pipelines", accelerator)
    if accelerator:
        wanted = [DEVICE]
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "program": lambda: {
            "cases": [
                measure_program(5 if quick else 30, each) for each in FORWARDS_S[: 1 if quick else None]
            ]
        },
        "two": lambda: measure_two(*(1, 3, QUICK_ROWS) if quick else (3, 5, ROWS)),
        DEVICE: lambda: measure_two(*(1, 3, QUICK_ROWS) if quick else (3, 5, DEVICE_ROWS), device),
        "choose": lambda: measure_choose(3 if quick else 15),
        "kill": lambda: measure_kill(1 if quick else 3, 3 if quick else 5),
        "flush": lambda: {
            "cases": [
                measure_flush(1 if quick else 5, 3 if quick else 5, each)
                for each in FLUSHED[: 1 if quick else None]
            ]
        },
    }
    figures: dict[str, Any] = {"processors": os.cpu_count(), "load_before": os.getloadavg()[0]}
    click.echo(f"{figures['processors']} processors, load {figures['load_before']:.1f} before")
    for part in wanted:
        click.echo(f"{part} ...", err=True)
        figures[part] = measures[part]()
        click.echo(_line(part, figures[part]))
    write_json(json_file, figures)
