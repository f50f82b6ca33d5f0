"""Worker processes of a benchmark: started together, each reporting one JSON value, always reaped."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from ..protocols.errors import ChaosnetError


class WorkerFailed(ChaosnetError):
    """A worker raised, and the text has its traceback; or it was silent for too long."""


class Workers:
    """Processes that run `target(pipe, *args)`; `with` ends them."""

    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self.pipes: dict[str, Connection] = {}
        self._processes: list[Any] = []

    def start(self, name: str, target: Callable[..., Any], *args: Any) -> None:
        """Start one; it may send and receive over its pipe, and what it returns is sent last."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_run, args=(theirs, target, args), name=name, daemon=True)
        resource_tracker.ensure_running()  # Else the first start begins it, which lets signals through again.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()  # What is blocked stays so in it: Ctrl+C is for us, who end it.
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.pipes[name] = ours
        self._processes.append(process)

    def receive(self, name: str, timeout_s: float = 120.0) -> Any:
        """The next thing that a worker sends. Raises: WorkerFailed."""
        if not wait([self.pipes[name]], timeout_s):
            raise WorkerFailed(f"{name} sent nothing in {timeout_s:g} s")
        try:
            kind, value = self.pipes[name].recv()
        except EOFError:
            raise WorkerFailed(f"{name} ended without a word") from None
        if kind == "error":
            raise WorkerFailed(f"{name}:\n{value}")
        return value

    def tell(self, name: str, value: Any) -> None:
        """Send something to a worker."""
        self.pipes[name].send(value)

    def kill(self, name: str) -> float:
        """With SIGKILL. Returns: the time just before (monotonic)."""
        at_s = time.monotonic()
        next(each for each in self._processes if each.name == name).kill()
        return at_s

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            process.join(0.0 if exc_info[0] else 10.0)
            if process.is_alive():
                process.kill()
                process.join()


class Pipe:
    """A worker's end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, value: Any) -> None:
        """To the parent."""
        self._connection.send(("value", value))

    def receive(self) -> Any:
        """From the parent."""
        return self._connection.recv()

    def poll(self) -> bool:
        """Has the parent sent something?"""
        return self._connection.poll()


def _run(connection: Connection, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if parent := mp.parent_process():
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    try:
        connection.send(("value", target(Pipe(connection), *args)))
    except BaseException:
        with contextlib.suppress(OSError):  # If the parent has gone, nobody wants to know.
            connection.send(("error", traceback.format_exc()))


def _end_with(parent: int) -> None:
    """Nothing else ends a worker that trains when its parent was killed."""
    wait([parent])
    os._exit(1)


# --- workers that train until they are told to stop ---


def own_address(trainer: Any) -> str:
    """Where others reach this node, which has just become a member."""
    address: str = trainer.status().members[-1].addresses[0]
    return address


def train_until_stopped(pipe: Pipe, cluster: Any, pause_s: float, dashboard: int | None = None) -> None:
    """Become a member, and say address, page and process; then steps of a small model, mostly asleep.

    Told anything but "stop": say the step and the time.
    """
    import torch

    from ..trainer import Trainer

    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    trainer = Trainer(model, optimizer, cluster=cluster, quiet=True, dashboard=dashboard)
    (mine,) = (row for row in trainer.status().members if row.node == cluster.name)
    pipe.send((mine.addresses[0], mine.page, os.getpid()))
    while True:
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        trainer.mean(loss, "loss")
        time.sleep(pause_s)
        trainer.update()
        if pipe.poll():
            if pipe.receive() == "stop":
                break
            pipe.send((trainer.step, time.monotonic()))
    trainer.request_node_exit()


def how_far(workers: Workers, name: str) -> tuple[int, float]:
    """The step of one of these, and when it said so (monotonic)."""
    workers.tell(name, "how far?")
    step, at_s = workers.receive(name)
    return int(step), float(at_s)


def stop(workers: Workers, names: Sequence[str]) -> None:
    """All of these, and wait until they have left."""
    for name in names:
        workers.tell(name, "stop")
    for name in names:
        workers.receive(name)
