"""Links on which bytes take time: a rate for each direction, and the queue of bulk that waits for it.

Between two machines control and bulk have a connection each, which share the link. Bulk waits in a queue, of which
what has the lower `Rank` goes first (outgoing.py), until the kernel has room for it; what the kernel has can be
neither overtaken nor taken back. Control overtakes what waits; what the kernel has may hold it up for a moment, as
in a router's queue.

How large a state is, and how long it takes, is drawn by steps of training, not by bytes a second: so lives with
large states and slow links are no longer than they must be.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

from ..node.transport.outgoing import Rank
from ..protocols.events import Received
from ..protocols.messages import Down, Message, Probe, Shard, Up, ViewKey

CONTROL_BYTES = 300  # Of a control message, or of bulk without a payload.
STATES = 3 << 20, 40 << 20, 40 << 20, 160 << 20  # Bytes.
# The share of the state that a step sums: of adapters, of all with Adam, with plain SGD.
RESULTS_OF_STATE = 0.001, 0.03, 1 / 3, 1 / 3, 1.0
COMPUTES_S = 0.03, 0.03, 0.1  # Short steps: a simulated second costs more than a step, for its heartbeats.
STATE_STEPS = -0.5, 2.3  # Decimal logarithm of the steps' time that the state takes over a usual link.
MOST_STEPS, MOST_STATE_S, MOST_RESULT_S = 300, 20.0, 1.0  # Over any link; so lives end.
SPREADS = 1, 10, 100, 1000  # Between the fastest link and the slowest.
CHANGES = 0.03, 0.1, 0.3, 3.0, 10.0
AHEAD_BYTES = 0, 64 << 10, 2 << 20  # That the kernel takes.
SHOWS_S = 0.0, 0.0, 0.05, 0.25  # So long at most bulk in the kernel holds up control.

_CHUNKS = Up, Down


def rank_of(message: Message) -> Rank:
    """The rank of a message in the queue, as node/sums/all_reduce.py and node/state/replica.py give it."""
    return Rank.CHUNK if isinstance(message, _CHUNKS) else Rank.STATE


def turn_of(message: Message) -> tuple[int, int]:
    """The turn of a message within its rank, as node/sums/all_reduce.py gives it."""
    return (message.step, message.chunk) if isinstance(message, _CHUNKS) else (0, 0)


@dataclass(slots=True)
class BulkQueue:
    """Bulk on its way over one connection in one direction."""

    waiting: list[tuple[int, tuple[int, int], int, int, Received]] = field(default_factory=list)
    """Rank, turn, number, bytes, event; a heap."""
    count: int = 0
    free_at_s: float = 0.0  # All that the kernel has is through.
    pump_at_s: float = -1.0  # When the kernel has room for the next; -1: nobody waits for that.
    full_s: float | None = None  # Since then more has waited; as Outgoing.
    carried: tuple[int, float] = 0, 0.0  # As Outgoing.

    def push(self, event: Received, size: int) -> None:
        """Add a message to the queue."""
        message = event.message
        self.count += 1
        item = (int(rank_of(message)), turn_of(message), self.count, size, event)
        heapq.heappush(self.waiting, item)

    def take(self, now_s: float) -> tuple[int, Received]:
        """Take out what the kernel sends next. Returns: bytes, event."""
        _, _, _, size, event = heapq.heappop(self.waiting)
        if self.full_s is not None:
            total, took_s = self.carried
            self.carried = total + size, took_s + now_s - self.full_s
            self.full_s = now_s
        return size, event

    def forget(self, before: ViewKey) -> int:
        """Take back the chunks of views before this one. Returns: how many."""
        waited = len(self.waiting)
        self.waiting = [
            item for item in self.waiting
            if not (isinstance(item[4].message, _CHUNKS) and item[4].message.key < before)
        ]  # fmt: skip
        heapq.heapify(self.waiting)
        return waited - len(self.waiting)

    @property
    def count_of_chunks(self) -> int:
        return sum(isinstance(item[4].message, _CHUNKS) for item in self.waiting)


class LinkRates:
    """What the links of one life carry, bytes a second. All is drawn from the life's own generator."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.compute_s = rng.choice(COMPUTES_S)
        self.state_bytes = rng.choice(STATES)
        self.result_bytes = max(int(self.state_bytes * rng.choice(RESULTS_OF_STATE)), 1)
        self.ahead_bytes, self.shows_s = rng.choice(AHEAD_BYTES), rng.choice(SHOWS_S)
        steps = 10 ** rng.uniform(*STATE_STEPS)
        self.usual = self.state_bytes / (steps * self.compute_s)
        self.spread = rng.choice(SPREADS)
        self.one_way = rng.random() < 0.3  # Each direction has a rate of its own.
        most_s = min(MOST_STEPS * self.compute_s, MOST_STATE_S)
        self.slowest = max(self.state_bytes / most_s, self.result_bytes / MOST_RESULT_S)
        self.by_way: dict[tuple[str, str], float] = {}

    def class_of(self) -> str:
        """The class of this life by G / (R T), the share of a usual link that results of steps take."""
        share = self.result_bytes / (self.usual * self.compute_s)
        return "results below 0.1 of them" if share < 0.1 else "0.1 to 2" if share < 2 else "above 2"

    def of(self, sender: str, receiver: str) -> float:
        """The rate of this direction of the link between two machines."""
        way = sender, receiver
        if way not in self.by_way:
            back = self.by_way.get((receiver, sender))
            alike = back is not None and not self.one_way
            self.by_way[way] = back if back is not None and alike else self._draw()
        return self.by_way[way]

    def _draw(self) -> float:
        return max(self.usual * self.spread ** self.rng.uniform(-0.5, 0.5), self.slowest)

    def change(self, sender: str, receiver: str, factor: float) -> float:
        """Change a rate by `factor`, within bounds. Returns: the factor by which it has really changed."""
        before = self.of(sender, receiver)
        self.by_way[sender, receiver] = max(before * factor, self.slowest)
        return self.by_way[sender, receiver] / before

    def bytes_of(self, message: Message, payload: object, chunks: int) -> int:
        """The bytes of one message of bulk."""
        if isinstance(message, Shard):
            return message.stop - message.start
        if isinstance(message, Probe):
            return len(payload) if isinstance(payload, bytes) else 0
        if isinstance(message, _CHUNKS) and message.weight:
            return self.result_bytes * message.count // chunks
        return CONTROL_BYTES
