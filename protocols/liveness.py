"""Which of the open connections still carry anything: heartbeats, and probes when somebody doubts.

It judges links, never nodes. A node is gone when none of its links is left (overlay.py), so a dead link
between live nodes costs that link and nothing else.

A link is lost when nothing was heard for `suspect_after_s` plus twice what either end says its loop was
recently held up. That is what keeps a busy machine from false suspicion without a timeout to guess.
When a neighbour reports a node's link lost, the others probe it at once (as SWIM's indirect probes) and
give it `probe_patience_s` instead of the whole of their own patience.
"""

from __future__ import annotations

from dataclasses import dataclass

from .effects import Effect, Transmit
from .messages import Message, Ping, Pong

PING_EVERY_S = 0.25
SUSPECT_AFTER_S = 1.25  # Five heartbeats; with the flush below the 2 s promised after a SIGSTOP.
PROBE_PATIENCE_S = 0.6
STALL_MEMORY_S = 60.0
MIN_STALL_S = 0.1  # Less is ordinary scheduling.
MAX_STALL_S = 10.0
PROOF_WINDOW_S = 0.5  # Less than any patience above: who closes for silence was silent for longer.


@dataclass(slots=True)
class _Peer:
    heard_s: float  # Put off by our own stalls.
    spoke_s: float  # When it was really heard last.
    ping_at_s: float
    doubted_at_s: float | None = None
    stall_s: float = 0.0
    rtt_s: float = 0.0


class Liveness:
    """Watches the open connections of one node."""

    def __init__(self) -> None:
        self.peers: dict[str, _Peer] = {}
        self.stall_s = 0.0  # How long our own loop was held up lately.
        self.stalled_at_s = 0.0
        self.back_at_s = -PROOF_WINDOW_S  # When the loop last went on after a long stop.
        self.last_tick_s: float | None = None

    @property
    def wake_at_s(self) -> float | None:
        return min((peer.ping_at_s for peer in self.peers.values()), default=None)

    def opened(self, peer: str, now_s: float) -> None:
        """Watch a new connection."""
        self.peers[peer] = _Peer(heard_s=now_s, spoke_s=now_s, ping_at_s=now_s)

    def closed(self, peer: str) -> None:
        """Watch it no longer."""
        self.peers.pop(peer, None)

    def received(self, peer: str, message: Message, now_s: float) -> list[Effect]:
        """Anything that comes from a peer is a sign of life."""
        state = self.peers.get(peer)
        if state is None:
            return []
        state.heard_s = state.spoke_s = now_s
        state.doubted_at_s = None
        match message:
            case Ping():
                state.stall_s = message.stall_s
                return [Transmit(peer, Pong(sent_s=message.sent_s, stall_s=self._stall(now_s)))]
            case Pong():
                state.stall_s = message.stall_s
                sample = max(now_s - message.sent_s, 0.0)
                state.rtt_s = min(sample, state.rtt_s * 1.05) if state.rtt_s else sample  # Slowly forgets.
        return []

    def spoke_lately(self, peer: str, now_s: float) -> bool:
        """If its connection closes now, has its process died?

        After a long silence, or if we were away for long, the other end may have given us up, and the network
        just delivers that news.
        """
        state = self.peers.get(peer)
        was_away = self.last_tick_s is not None and now_s - self.last_tick_s > SUSPECT_AFTER_S
        if state is None or was_away or now_s < self.back_at_s + PROOF_WINDOW_S:
            return False
        return now_s < state.spoke_s + PROOF_WINDOW_S + 2 * min(state.stall_s, MAX_STALL_S)

    def doubt(self, peer: str, now_s: float) -> list[Effect]:
        """Somebody else lost its link to `peer`: ask it now, and wait less."""
        state = self.peers.get(peer)
        if state is None or state.doubted_at_s is not None:
            return []
        state.doubted_at_s = now_s
        state.ping_at_s = min(state.ping_at_s, now_s + PING_EVERY_S)
        return [Transmit(peer, Ping(sent_s=now_s, stall_s=self._stall(now_s)))]

    def tick(self, now_s: float) -> tuple[list[str], list[Effect]]:
        """The peers whose links are lost, and the pings that are due."""
        self._notice_own_stall(now_s)
        lost: list[str] = []
        effects: list[Effect] = []
        for name in sorted(self.peers):
            state = self.peers[name]
            if now_s >= self._deadline_s(state):
                lost.append(name)
            elif now_s >= state.ping_at_s:
                state.ping_at_s = now_s + PING_EVERY_S
                effects.append(Transmit(name, Ping(sent_s=now_s, stall_s=self._stall(now_s))))
        return lost, effects

    def _deadline_s(self, state: _Peer) -> float:
        slack_s = 2 * min(max(state.stall_s, self.stall_s), MAX_STALL_S)
        if state.doubted_at_s is not None:
            return min(state.doubted_at_s + PROBE_PATIENCE_S, state.heard_s + SUSPECT_AFTER_S) + slack_s
        return state.heard_s + SUSPECT_AFTER_S + slack_s

    def _notice_own_stall(self, now_s: float) -> None:
        """If our loop was held up, silence is our fault: give everybody that much more time."""
        late_s = now_s - (self.last_tick_s if self.last_tick_s is not None else now_s) - PING_EVERY_S
        self.last_tick_s = now_s
        if late_s < MIN_STALL_S:
            return
        for state in self.peers.values():
            state.heard_s += late_s
        if late_s > SUSPECT_AFTER_S - PING_EVERY_S:
            self.back_at_s = now_s
        if late_s > self._stall(now_s):
            self.stall_s, self.stalled_at_s = min(late_s, MAX_STALL_S), now_s

    def _stall(self, now_s: float) -> float:
        if now_s - self.stalled_at_s > STALL_MEMORY_S:
            self.stall_s = 0.0
        return self.stall_s
