"""Tests of links and addresses, as far as they need sockets, processes or time: each ends in an event."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from ..protocols.codec import encode
from ..protocols.events import Event, Iperf3Done, Iperf3Serving, NotReached
from ..protocols.messages import Probe
from ..protocols.probing import PROBE_BYTES
from . import iperf3_probe
from .endpoint import refuses
from .transport.transport import Transport

# A round trip to a far machine. For how long a refusal proves anything, the core knows (deaths.py).
REFUSED_S = 1.0
PROBE_PARTS = 64
# Where memory is shared: what is smaller takes another way.
SHARED_PROBE_PARTS, SHARED_PART_BYTES = 16, 256 << 10


class LinkTests:
    """
    Args:
        post: Hands an event to the core, from any thread.
        at_once: As `post`, but on the loop's thread, and before it returns.
    """

    def __init__(
        self, transport: Transport, post: Callable[[Event], None], at_once: Callable[[Event], None]
    ) -> None:
        self._transport, self._post, self._at_once = transport, post, at_once
        self._looks: set[asyncio.Task[None]] = set()  # asyncio itself keeps no task alive.

    def send_probe(self, peer: str) -> None:
        """Padding, which the peer times."""
        parts, part_bytes = PROBE_PARTS, PROBE_BYTES // PROBE_PARTS
        if self._transport.shares_memory(peer):
            parts, part_bytes = SHARED_PROBE_PARTS, SHARED_PART_BYTES
        for index in range(parts):
            self._transport.send_bulk(peer, encode(Probe(index=index, count=parts)), bytes(part_bytes))

    def serve_iperf3(self, peer: str) -> None:
        """Ends in Iperf3Serving."""
        if _in_thread(lambda: iperf3_probe.serve(lambda port: self._post(Iperf3Serving(peer, port)))):
            self._post(Iperf3Serving(peer, 0))

    def run_iperf3(self, peer: str, address: str) -> None:
        """Ends in Iperf3Done."""

        def run() -> None:
            found = iperf3_probe.run(address)
            self._post(Iperf3Done(peer, found.in_bps, found.out_bps, found.error))

        if why := _in_thread(run):
            self._post(Iperf3Done(peer, 0.0, 0.0, why))

    def look(self, address: str, reason: str) -> None:
        """Nobody could be reached at `address`: find out whether its machine refuses. Ends in NotReached."""
        self._looks = {task for task in self._looks if not task.done()}
        self._looks.add(asyncio.get_running_loop().create_task(self._look(address, reason)))

    async def _look(self, address: str, reason: str) -> None:
        refused = await refuses(address, REFUSED_S)
        self._at_once(NotReached(address, reason, refused))  # What it proves, it proves for a moment only.


def _in_thread(work: Callable[[], None]) -> str:
    """Run `work` in a thread, as it waits for a process. Returns: why it does not run; "" if it does."""
    try:
        threading.Thread(target=work, name="chaosnet-iperf3", daemon=True).start()
    except RuntimeError as error:  # There are as many threads as may be.
        return str(error)
    return ""
