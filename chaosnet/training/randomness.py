"""Random numbers: what nodes draw for themselves differs between them; what they do alike draws alike.

Each node computes on samples of its own, so its dropout, noise and shuffles are its own, too: nodes with the same
generators would all make the same "random" choice, and a batch of the cluster would hold it once a node. What all
nodes must do to the same effect, the optimizer's step and `after_step`, is the exception.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch

from ..node.state.generators import get_generators, seed_devices, set_generators
from .named_updates import parts_of


def seed_from(*parts: object) -> int:
    """64 bits that depend on all of `parts`, and nothing else."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def seed_generators(seed: int) -> None:
    """Seed the generators of torch on all its devices, of Python's `random` and of numpy. `seed`: 64 bits."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        seed_devices(seed, ())
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])


class Randomness:
    """When this node's generators are seeded, and from what.

    Args:
        same: `Trainer(same_rng=True)`: in each step all nodes draw the same numbers, whatever they drew before.
        devices: Accelerators that have generators of their own.
    Attributes:
        key: Of the run, for what all nodes draw alike. It begins as the founder's seed, and travels with the state.
        workers: Seeds those of all DataLoaders of this node. From the usual generator that would part nodes that
            share one.
    """

    def __init__(self, same: bool, devices: Sequence[torch.device] = ()) -> None:
        self.same, self._devices = same, devices
        self.key = torch.initial_seed()
        self.workers = torch.Generator()
        self.begins(0)

    def begins(self, step: int) -> None:
        """This node founds a cluster, or goes on from a checkpoint."""
        self.workers.manual_seed(seed_from("workers", torch.initial_seed(), step))

    def joined(self, run: str, name: str, step: int) -> None:
        """The state came from another node: seed generators of this node's own."""
        seed_generators(seed_from("node", run, name, step))
        self.workers.manual_seed(seed_from("workers", run, name, step))

    def step_begins(self, step: int) -> None:
        if self.same:
            seed_generators(seed_from("step", self.key, step))

    @contextmanager
    def alike(self, what: str, step: int) -> Iterator[None]:
        """Inside, all nodes draw the same numbers for `what`; afterwards this node goes on with its own."""
        own = get_generators(self._devices)
        seed_generators(seed_from(what, self.key, step))
        try:
            yield
        finally:
            set_generators(own, self._devices)

    def stepping(self, optimizer: torch.optim.Optimizer, step: int) -> AbstractContextManager[None]:
        """As `alike`, for optimizer.step(). Optimizers of torch draw nothing, and are spared the 0.1 ms."""
        parts = parts_of(optimizer).values()
        draws = not all(type(part).__module__.startswith("torch.") for part in parts)
        return self.alike("optimizer", step) if draws else nullcontext()
