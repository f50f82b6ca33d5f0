"""Seeds: the same draws as with torch's own function, without what that does for devices that are not there."""

from __future__ import annotations

import random

import numpy as np
import torch

from chaosnet.training.randomness import seed_generators

SEED = (7 << 40) + 5


def draws() -> tuple[list[float], float, float]:
    return torch.rand(3).tolist(), random.random(), float(np.random.rand())


def test_seeds_are_those_of_torch_itself():
    seed_generators(SEED)
    first, initial = draws(), torch.initial_seed()
    seed_generators(SEED)
    assert draws() == first
    torch.manual_seed(SEED)
    assert initial == torch.initial_seed() == SEED
    assert torch.rand(3).tolist() == first[0]


def test_other_seeds_draw_other_numbers_of_each_kind():
    seed_generators(SEED)
    first = draws()
    seed_generators(SEED + (1 << 33) + 1)
    assert all(a != b for a, b in zip(draws(), first, strict=True))
