"""How long members take to work out which pipelines run after a loss (scheduler/elastic/running.py)."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

from ..node.collector import held_off
from ..scheduler.elastic.running import Facts, choose
from ..scheduler.elastic.traffic import Traffic

MEMBERS, LAYERS = 16, 24
CASES = ((2, 32), (4, 64), (8, 64))  # Stages at least, and micro-batches.
OUT_BYTES, SUM_BYTES = 1 << 20, 4 << 20  # Of each layer.
RATE_MBIT, DELAY_US = 1000, 100


def measure_choose(times: int) -> dict[str, Any]:
    """One of a mesh is lost, in each case so many times. What ran before was chosen with all of them.

    That choice was the first with these costs of layers: nothing was known of them.
    """
    cases = []
    for stages, micro_batches in CASES:
        members = [f"n{number}" for number in range(MEMBERS)]
        facts = _facts(members, stages, micro_batches)
        with held_off():
            began_s = time.process_time()
            before = choose(members, facts).laid
            first_ms = 1e3 * (time.process_time() - began_s)
        left, took_ms = [name for name in members if name != "n5"], []
        for _ in range(times):
            facts = _facts(left, stages, micro_batches)
            with held_off():
                began_s = time.process_time()
                choose(left, facts, before)
                took_ms.append(1e3 * (time.process_time() - began_s))
        cases.append(
            {
                "stages": stages,
                "micro_batches": micro_batches,
                "first_ms": first_ms,
                "median_ms": statistics.median(took_ms),
                "least_ms": min(took_ms),
                "most_ms": max(took_ms),
            }
        )
    return {"members": MEMBERS, "layers": LAYERS, "cases": cases}


def _facts(members: list[str], stages: int, micro_batches: int) -> Facts:
    """Layers of unlike costs, of which each case has its own, all pairs linked, sums along a star."""
    costs = tuple((1000 + stages + 37 * (number % 5), 2000 + 71 * (number % 7)) for number in range(LAYERS))
    pairs = list(itertools.permutations(members, 2))
    traffic = Traffic(
        out_bytes=(OUT_BYTES,) * LAYERS,
        sums=tuple(((layer,), SUM_BYTES) for layer in range(LAYERS)),
        rates_mbit=dict.fromkeys(pairs, RATE_MBIT),
        delays_us=dict.fromkeys(pairs, DELAY_US),
        links=tuple(itertools.combinations(members, 2)),
        trees=((tuple((name, members[0]) for name in members[1:]), 1.0),),
        message_bytes=OUT_BYTES,
    )
    return Facts(costs, micro_batches, least_stages=stages, traffic=traffic)
