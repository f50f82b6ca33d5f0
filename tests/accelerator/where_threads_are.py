"""Where the threads of two nodes are while they train on one device: to find what a step waits for. No test.

.venv/bin/python tests/accelerator/where_threads_are.py cuda --mb 45
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import torch

STEPS = 25
EVERY_S, DEPTH, LEAST_SHARE = 0.002, 7, 0.02


@contextmanager
def sampled() -> Iterator[Counter[tuple[str, str]]]:
    """Counts, by thread and innermost calls, how often a look at all threads found them there."""
    found: Counter[tuple[str, str]] = Counter()
    over = threading.Event()

    def look() -> None:
        while not over.wait(EVERY_S):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident != threading.get_ident():
                    found[names.get(ident, "not Python's"), " < ".join(calls(frame))] += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def calls(frame: FrameType | None) -> Iterator[str]:
    for _ in range(DEPTH):
        if frame is None:
            return
        code = frame.f_code
        yield f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back


def node(rank: int, pipe: Connection, device: str, mb: float) -> None:
    from chaosnet import Cluster, Trainer
    from chaosnet.benchmarks.step import net
    from chaosnet.node.devices import wait_for_device

    torch.set_num_threads(1)
    model, x = (each.to(device) for each in net(round(mb * 1e6), parameters=0))
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    join = pipe.recv() if rank else ""
    trainer = Trainer(model, optimizer, cluster=Cluster(join=join, listen="127.0.0.1:0"), quiet=True)
    if not rank:
        pipe.send(trainer.status().members[0].addresses[0])

    def backward() -> None:
        model(x).square().mean().backward()

    while len(trainer.status().active) < 2:
        backward()
        trainer.update()
    for _ in range(STEPS):
        backward()
        trainer.update()
    parts = [
        [timed(each) for each in (backward, wait_for_device, trainer.update, wait_for_device)]
        for _ in range(STEPS)
    ]
    medians = ", ".join(f"{1e3 * sorted(part)[STEPS // 2]:.1f}" for part in zip(*parts, strict=True))
    print(
        f"node {rank}: ms of forward and backward, the wait for them, update(), the wait for it: {medians}",
        flush=True,
    )
    with sampled() as found:
        for _ in range(2 * STEPS):
            backward()
            trainer.update()
    if not rank:
        tell(found)
    trainer.request_node_exit()


def timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def tell(found: Counter[tuple[str, str]]) -> None:
    for name in sorted({name for name, _ in found}):
        mine = Counter({where: count for (thread, where), count in found.items() if thread == name})
        print(f"thread {name}:")
        for where, count in mine.most_common():
            if count >= LEAST_SHARE * mine.total():
                print(f"  {count / mine.total():4.0%}  {where}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", help="as torch names it")
    parser.add_argument("--mb", type=float, default=45.0, help="of the model's parameters")
    told = parser.parse_args()
    start = multiprocessing.get_context("spawn")
    pipes = [start.Pipe() for _ in range(2)]
    nodes = [
        start.Process(target=node, args=(rank, pipes[rank][1], told.device, told.mb)) for rank in range(2)
    ]
    for each in nodes:
        each.start()
    pipes[1][0].send(pipes[0][0].recv())
    for each in nodes:
        each.join()


if __name__ == "__main__":
    main()
