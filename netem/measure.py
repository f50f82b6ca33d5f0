"""What the links of a testbed really do, beside what is set."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterable
from typing import Any

from .backend import Backend, TestbedError
from .topology import GOODPUT, Link, Topology

PORT = 5201
PATIENCE_S = 30.0


def measure(
    backend: Backend,
    topology: Topology,
    seconds: float = 1.0,
    links: Iterable[Link] | None = None,
) -> Iterable[dict[str, Any]]:
    """Yields one row a link and direction, one after the other: set_mbit, mbit, error, set_rtt_ms, rtt_ms.

    A link that is cut has only what is set, and `cut`: nothing passes.
    """
    for link in topology.links if links is None else links:
        spec = topology.spec(link)
        for sender, receiver in (link, link[::-1]):
            set_mbit, cut = spec.rate_from(sender == link[0]), link in backend.cuts
            row = {
                "from": sender,
                "to": receiver,
                "set_mbit": set_mbit,
                "set_rtt_ms": 2 * spec.delay_ms,
                "cut": cut,
            }
            if cut:
                yield row
                continue
            found = _flow(backend, sender, receiver, seconds)
            yield row | {
                "mbit": round(found["mbit"], 1),
                "error": round(found["mbit"] / (GOODPUT * set_mbit) - 1, 4),
                "rtt_ms": round(found["rtt_median_ms"], 3),
                "congestion_control": found["congestion_control"],
            }


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median and worst error of the goodput, as shares; nothing if no link was measured."""
    errors = [abs(row["error"]) for row in rows if "error" in row]
    if not errors:
        return {}
    return {"median_error": statistics.median(errors), "worst_error": max(errors)}


def _flow(backend: Backend, sender: str, receiver: str, seconds: float) -> dict[str, Any]:
    program = [backend.python, "-m", f"{__package__}.flow"]
    listen, at = backend.endpoints(sender, receiver, PORT)
    serving = backend.start(
        receiver, [*program, "recv", *listen.split(":")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert serving.stdout is not None
        if serving.stdout.readline().strip() != b"READY":
            raise TestbedError(f"{receiver} does not listen: {_last_line(serving.communicate()[1])}")
        sending = backend.start(
            sender, [*program, "send", *at.split(":"), str(seconds)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, err = sending.communicate(timeout=PATIENCE_S + seconds)
        if sending.returncode != 0:
            raise TestbedError(f"nothing passes from {sender} to {receiver}: {_last_line(err)}")
        found: dict[str, Any] = json.loads(out)
        return found
    except subprocess.TimeoutExpired:
        sending.kill()
        raise TestbedError(
            f"nothing passes from {sender} to {receiver}, or too slowly (waited {PATIENCE_S + seconds:g} s)"
        ) from None
    finally:
        serving.kill()
        serving.wait()


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
