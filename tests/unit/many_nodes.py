"""Statuses of clusters of any size, for the page: they look like those of a real one."""

import math
import random

from chaosnet.protocols import status as s

BEGAN_S = 1.75e9


def cluster(count, steps=400, joining=True, seed=1, cluster="0badcafe", pipelines="", began_s=BEGAN_S):
    """`count` members with links, trees and a history; with `joining` one more that pulls the state."""
    rng = random.Random(seed)
    names = [f"n{place}" for place in range(count)]
    pairs = links_of(count, rng)
    if joining:
        pairs |= {(0, count), (min(1, count - 1), count)}
        names.append(f"n{count}")
    pairs = {tuple(sorted((names[a], names[b]))) for a, b in pairs}
    used = tree_of(sorted(pairs), names[:count])
    links = tuple(link_row(*pair, used, rng) for pair in sorted(pairs))
    around = {
        name: tuple(sorted({a if b == name else b for a, b in pairs if name in (a, b)})) for name in names
    }
    members = [member_row(name, place, around, steps, rng) for place, name in enumerate(names[:count])]
    if joining:
        pulled = {"n0": 180_000_000, names[min(1, count - 1)]: 95_000_000}
        members.append(
            s.MemberRow(
                node=names[-1], id=names[-1], state="standby", addresses=(f"10.0.0.{count % 250}:5555",),
                joined_step=steps, neighbors=around[names[-1]], report_age_s=0.2, pulls_state=True,
                pulls_bytes=524_000_000, pulled=pulled, state_bytes=524_000_000, memory_bytes=700_000_000,
            )
        )  # fmt: skip
    gone = s.MemberRow(node="n-lost", id="n-lost", state="failed", addresses=(), joined_step=0, neighbors=())
    rows = tuple(step_row(step, rng, began_s) for step in range(1, steps + 1))
    return s.Status(
        node="n0", phase="member", cluster=cluster, scheduler="n0", term=2, view=(2, 17), step=steps + 1,
        samples_per_s=412.0 * count, metrics=rows[-1].metrics if rows else {}, parked=None, waiting=None,
        handling_ms={},
        members=(*members, gone), links=links, events=events(steps, began_s), steps=rows, strangers_refused={},
        trees=(s.TreeRow(root="n0", share=0.6), s.TreeRow(root=names[1 % count], share=0.4)), pipelines=pipelines,
    )  # fmt: skip


def links_of(count, rng):
    """A ring, and half as many chords."""
    ring = {tuple(sorted((place, (place + 1) % count))) for place in range(count)} if count > 1 else set()
    chords = {tuple(sorted(rng.sample(range(count), 2))) for _ in range(count // 2)} if count > 3 else set()
    return {pair for pair in ring | chords if pair[0] != pair[1]}


def tree_of(pairs, names):
    """Links of a spanning tree: what the first tree uses."""
    root = {name: name for name in names}

    def find(name):
        while root[name] != name:
            name = root[name]
        return name

    used = set()
    for a, b in pairs:
        if a in root and b in root and find(a) != find(b):
            root[find(a)] = find(b)
            used.add((a, b))
    return used


def link_row(a, b, used, rng):
    rate = rng.choice([50, 100, 250, 500, 1000])
    trees = (
        (0, 1)
        if (a, b) in used and rng.random() < 0.4
        else (0,)
        if (a, b) in used
        else (1,)
        if rng.random() < 0.5
        else ()
    )
    return s.LinkRow(
        a=a, b=b, rate_mbit=rate * rng.uniform(0.85, 1), rate_age_s=4.0, rate_source="traffic",
        rate_back_mbit=rate * rng.uniform(0.3, 1), rate_back_age_s=6.0, rate_back_source="probe",
        rtt_min_ms=rng.uniform(1, 20), rtt_median_ms=22.0, trees=trees,
    )  # fmt: skip


def member_row(name, place, around, steps, rng):
    sync_s = 0.11 if place == 2 else rng.uniform(0.16, 0.27)
    return s.MemberRow(
        node=name, id=name, state="active", addresses=(f"10.0.{place // 250}.{place % 250 + 1}:5555",), joined_step=0,
        neighbors=around[name], report_age_s=0.4, step=steps + 1, samples_per_s=412.0, sync_delay_s=sync_s,
        state_bytes=524_000_000, cpu_pct=rng.uniform(80, 240), memory_bytes=int(rng.uniform(0.8, 1.4) * 1e9),
        sent_bytes=int(rng.uniform(1, 9) * 1e9), received_bytes=int(rng.uniform(1, 9) * 1e9),
    )  # fmt: skip


def step_row(step, rng, began_s):
    loss = 2.3 * math.exp(-step / 160) + 0.18 + rng.gauss(0, 0.05)
    took_s = 0.42 + (0.9 if step in (150, 151) else 0) + rng.gauss(0, 0.015)
    metrics = {"loss": loss, "accuracy": 1 - loss / 3}
    return s.StepRow(step=step, time_s=began_s + 0.42 * step, seconds=took_s, samples=128.0, metrics=metrics)


def events(steps, began_s):
    told = [
        ("joined", "n1", "now 2 members; pulled 524 MB in 0.9 s from n0", 20),
        ("link-up", "n1 - n2", "measured: 480 Mbit/s, 2.1 ms", 60),
        ("scheduler", "n0", "elected in term 2", 148),
        ("node-failure", "n-lost", "silent for 1.3 s; the others go on from step 150", 150),
        ("new-plan", "", "2 trees, predicted 0.11 s a step", 151),
        ("scale-out", "n8", "asks to be let in", max(steps - 3, 0)),
    ]
    return tuple(
        s.EventRow(
            kind=kind, node=node, detail=detail, step=step, time_s=began_s + 0.42 * step, handling_ms=0.3
        )
        for kind, node, detail, step in told
        if step <= steps
    )
