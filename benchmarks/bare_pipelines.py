"""The same pipelines over bare sockets: what this machine takes for them at best.

Each process does its instructions of the compiled program, hands tensors on as they lie in memory, and steps its
optimizer. There is no cluster: no node, no messages with names, no sums, no commit.
"""

from __future__ import annotations

import itertools
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ..scheduler.elastic.program import Instruction, Op
from ..scheduler.elastic.running import Facts, choose
from .processes import Pipe, Workers

COSTS_US = 10_000, 20_000  # Of every layer: of one pipeline they are in the order of its instructions only.
FIRST_STEPS = 3  # They do not count.


class Task(Protocol):
    """What is trained; a micro-batch is one sample."""

    @property
    def micro_batches(self) -> int: ...

    def layers(self) -> list[nn.Module]: ...

    def data(self) -> Any: ...


def bare_step_s(task: Task, stages: int, steps: int) -> float:
    """The median of so many steps of one pipeline."""
    names = [f"n{number}" for number in range(stages)]
    facts = Facts((COSTS_US,) * len(task.layers()), task.micro_batches, wish=str(stages))
    running = choose(names, facts)
    order = running.laid.pipelines[0].workers
    ends: dict[str, dict[str, socket.socket]] = {name: {} for name in names}
    for a, b in itertools.pairwise(order):
        ends[a][b], ends[b][a] = socket.socketpair()
    with Workers() as workers:
        for name in names:
            lines = [line for line in running.program.instructions[name] if line.micro_batches]
            workers.start(name, _worker, ends[name], task, lines, FIRST_STEPS + steps)
        took_s = {name: workers.receive(name) for name in names}
    for each in ends.values():
        for end in each.values():
            end.close()
    return statistics.median(took_s[order[0]][FIRST_STEPS:])  # The first stage is the last to end a step.


def _worker(
    pipe: Pipe, ends: Mapping[str, socket.socket], task: Task, lines: Sequence[Instruction], steps: int
) -> list[float]:
    """Returns: seconds of each step."""
    torch.set_num_threads(1)
    layers, data = task.layers(), task.data()
    optimizer = torch.optim.SGD(nn.ModuleList(layers).parameters(), 1e-3)
    x, y = (each.unsqueeze(0) for each in data[0])  # What goes from layer to layer has the same shape.
    came = {peer: _reader(end, x) for peer, end in ends.items()}
    took_s = []
    for _ in range(steps):
        began_s = time.monotonic()
        _Step(layers, x, y, ends, came).run(lines)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        took_s.append(time.monotonic() - began_s)
    return took_s


def _reader(end: socket.socket, like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A thread takes what comes. Returns: what waits for the next tensor."""
    came: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def read() -> None:
        while True:
            tensor = torch.empty_like(like)
            if end.recv_into(tensor.numpy().data.cast("B"), 0, socket.MSG_WAITALL) < tensor.nbytes:
                return
            came.put(tensor)

    threading.Thread(target=read, daemon=True).start()
    return came.get


class _Step:
    """Of one process; by way and micro-batch, what is here."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        x: torch.Tensor,
        y: torch.Tensor,
        ends: Mapping[str, socket.socket],
        came: Mapping[str, Callable[[], torch.Tensor]],
    ) -> None:
        self.layers, self.x, self.y, self.ends, self.came = layers, x, y, ends, came
        self.here: dict[tuple[str, int], torch.Tensor] = {}
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self, lines: Sequence[Instruction]) -> None:
        """All of them, in their order."""
        for line in lines:
            (number,) = line.micro_batches
            if line.tag is not None and line.op is Op.RECV:
                self.here[line.tag.kind, number] = self.came[line.peer]()
            elif line.tag is not None:
                tensor = self.here.pop((line.tag.kind, number))
                self.ends[line.peer].sendall(tensor.detach().contiguous().numpy().data.cast("B"))
            elif line.op is Op.FORWARD:
                self._forward(number, *line.layers)
            else:
                value, out = self.kept.pop(number)
                out.backward(self.here.pop(("g", number), None))
                if value.grad is not None:
                    self.here["g", number] = value.grad

    def _forward(self, number: int, start: int, stop: int) -> None:
        value = self.here.pop(("a", number)).requires_grad_() if start else self.x
        out = value
        for layer in self.layers[start:stop]:
            out = layer(out)
        if stop == len(self.layers):
            out = nn.functional.mse_loss(out, self.y)
        else:
            self.here["a", number] = out
        self.kept[number] = value, out
