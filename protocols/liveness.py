"""Which of the open connections still carry anything: heartbeats, and questions when somebody doubts.

It judges links, never nodes. A node is gone when none of its links is left (overlay.py), so a dead link
between live nodes costs that link and nothing else.

A link is lost when nothing was heard for `SUSPECT_AFTER_S` plus twice what either end says its loop was
recently held up. That is what keeps a busy machine from false suspicion without a timeout to guess. Most
of that patience is for the node at the other end, which may be held up and not know it yet. So when a link
falls silent, its other end is asked around it, over other links (Echo): if it answers, it is the link that
is dead, and `DEAD_LINK_S` is enough.
When a neighbour reports a node's link lost, the others probe it at once (as SWIM's indirect probes) and
give it `PROBE_PATIENCE_S` instead of the whole of their own patience.

If there are only two members, their patience with each other is longer, and nothing shortens it: until it is over,
the death of the other can be proved even if it had fallen silent before (deaths.py).
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from .effects import Effect, Transmit
from .messages import Message, Ping, Pong

PING_EVERY_S = 0.25
SUSPECT_AFTER_S = 1.25  # Five heartbeats; with the flush, who is stopped costs the others less than 2 s.
PROBE_PATIENCE_S = 0.6
ECHO_AFTER_S = 0.4  # Of silence: one heartbeat is missing.
DEAD_LINK_S = 0.75  # Two more are, while the other end answers around the link.
# If the other end was held up, what it had sent over the link comes with its answer, or, if the way around is the
# shorter one, up to a round trip later.
ECHO_GRACE_S = 0.15
RTTS_KEPT = 20
RTT_SLACK = 4  # Round trips that a heartbeat may take longer.
STALL_MEMORY_S = 60.0
MIN_STALL_S = 0.1  # Less is ordinary scheduling.
MAX_STALL_S = 10.0
# So much longer our patience counts with a stall than we tell of it: others count on that.
STALL_USED_S = 30.0
PAIR_PATIENCE_S = 2.5  # Of two members with each other.
PAIR_PROOF_S = 2.2  # Less by more than two clocks drift apart in that time.
# Who is away for longer, as a laptop that sleeps, is given up however patient others are. It tells nothing of how
# long its loop is held up while it works.
AWAY_S = PAIR_PATIENCE_S + 2 * MAX_STALL_S
PROOF_WINDOW_S = 0.5  # Less than any patience above: who closes for silence was silent for longer.


@dataclass(slots=True)
class _Peer:
    heard_s: float  # Put off by our own stalls.
    spoke_s: float  # When it was really heard last.
    ping_at_s: float
    doubted_at_s: float | None = None
    paired: bool = False  # It is the only other member.
    known_s: float = float("-inf")  # It has heard us since: when we sent the last Ping that it has answered.
    stall_s: float = 0.0
    rtts_s: deque[float] = field(default_factory=lambda: deque(maxlen=RTTS_KEPT))
    asked_s: float = -1.0  # When the other end was last asked around the link.
    vouched_s: tuple[float, float] = (-1.0, -1.0)  # Its last answer: asked and heard at.

    @property
    def dead_at_s(self) -> float | None:
        """When the silent link counts as dead, if its other end has answered over other links; else None."""
        asked_s, answered_s = self.vouched_s
        if self.paired or asked_s < self.heard_s + ECHO_AFTER_S:
            return None
        # The median: single late heartbeats come from busy machines, and this one answers.
        rtt_s = statistics.median(self.rtts_s) if self.rtts_s else 0.0
        return max(self.heard_s + DEAD_LINK_S + RTT_SLACK * rtt_s, answered_s + ECHO_GRACE_S + rtt_s)

    @property
    def wake_at_s(self) -> float:
        dead_at_s = self.dead_at_s
        return self.ping_at_s if dead_at_s is None else min(self.ping_at_s, dead_at_s)


class Liveness:
    """Watches the open connections of one node."""

    def __init__(self) -> None:
        self.peers: dict[str, _Peer] = {}
        self.stall_s = 0.0  # How long our own loop was held up lately.
        self.stalled_at_s = 0.0
        self.back_at_s = -PROOF_WINDOW_S  # When the loop last went on after a long stop.
        self.last_tick_s: float | None = None
        self.pair = ""  # The other of two members.
        self.wake_at_s: float | None = None

    def _plan(self) -> None:
        """Set the time of the next Tick. If a deadline is put off meanwhile, the Tick finds nothing to do."""
        self.wake_at_s = min((peer.wake_at_s for peer in self.peers.values()), default=None)

    def pairs_with(self, peer: str) -> None:
        """`peer` is the other voter of a view with two; "": the view has more."""
        self.pair = peer
        for name, state in self.peers.items():
            state.paired = name == peer
        self._plan()

    def opened(self, peer: str, now_s: float) -> None:
        """Watch a new connection."""
        if not self.peers:
            self.last_tick_s = now_s  # Until now nobody wanted us to be on time.
        self.peers[peer] = _Peer(heard_s=now_s, spoke_s=now_s, ping_at_s=now_s, paired=peer == self.pair)
        self._plan()

    def closed(self, peer: str) -> None:
        """Watch the connection no longer."""
        self.peers.pop(peer, None)
        self._plan()

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
                state.known_s = max(state.known_s, message.sent_s)
                state.rtts_s.append(max(now_s - message.sent_s, 0.0))
        return []

    def rtt_s(self, peer: str) -> tuple[float, float]:
        """Minimum and median of the last round trips over the control connection; (0, 0) before the first."""
        rtts_s = self.peers[peer].rtts_s if peer in self.peers else ()
        return (min(rtts_s), statistics.median(rtts_s)) if rtts_s else (0.0, 0.0)

    @property
    def slowest_rtt_s(self) -> float:
        """The longest of the links' median round trips; 0 before the first."""
        return max((self.rtt_s(peer)[1] for peer in self.peers), default=0.0)

    def vouched(self, peer: str, asked_s: float, now_s: float) -> None:
        """`peer` has answered over other links, so its process lives. `asked_s`: when we had asked, as it says."""
        state = self.peers.get(peer)
        if state is not None and asked_s <= state.asked_s:  # Else we have not asked yet.
            state.vouched_s = (asked_s, now_s)
            self._plan()

    def spoke_lately(self, peer: str, now_s: float) -> bool:
        """Would a break of the connection now mean that the peer's process has died?

        Not after a long silence, or if we were away for long: the other end may have given us up, and the network
        just delivers that news.
        """
        state = self.peers.get(peer)
        was_away = self.last_tick_s is not None and now_s - self.last_tick_s > SUSPECT_AFTER_S
        if state is None or was_away or now_s < self.back_at_s + PROOF_WINDOW_S:
            return False
        return now_s < state.spoke_s + PROOF_WINDOW_S + 2 * min(state.stall_s, MAX_STALL_S)

    def proof_until_s(self, peer: str) -> float:
        """Until when a refusal proves that the other of two members died before it could go on without us."""
        state = self.peers.get(peer)
        return state.known_s + PAIR_PROOF_S if state is not None else float("-inf")

    def hold_until_s(self, peer: str) -> float:
        """Until when the other of two members may count on us not to go on without it; 0 for anybody else."""
        state = self.peers.get(peer)
        return state.heard_s + PAIR_PATIENCE_S if state is not None and state.paired else 0.0

    def silent_s(self, peer: str, now_s: float) -> float:
        """So long nothing has come over the link to `peer`, our own stalls left out; 0 without a link."""
        state = self.peers.get(peer)
        return max(now_s - state.heard_s, 0.0) if state is not None else 0.0

    def doubt(self, peer: str, now_s: float) -> list[Effect]:
        """Somebody else lost its link to `peer`: ask it now, and wait less."""
        state = self.peers.get(peer)
        if state is None or state.doubted_at_s is not None:
            return []
        state.doubted_at_s = now_s
        state.ping_at_s = min(state.ping_at_s, now_s + PING_EVERY_S)
        self._plan()
        return [Transmit(peer, Ping(sent_s=now_s, stall_s=self._stall(now_s)))]

    def tick(self, now_s: float) -> tuple[list[str], list[str], list[Effect]]:
        """Returns: peers whose links are lost, peers to be asked over other links, and the pings that are due."""
        self._notice_own_stall(now_s)
        lost: list[str] = []
        silent: list[str] = []
        effects: list[Effect] = []
        for name in sorted(self.peers):
            state = self.peers[name]
            if now_s >= self._deadline_s(state):
                lost.append(name)
            elif now_s >= state.ping_at_s:
                state.ping_at_s = now_s + PING_EVERY_S
                effects.append(Transmit(name, Ping(sent_s=now_s, stall_s=self._stall(now_s))))
            if name not in lost and self._ask_around(state, now_s):
                silent.append(name)
        self._plan()
        return lost, silent, effects

    def _ask_around(self, state: _Peer, now_s: float) -> bool:
        if now_s < max(state.heard_s + ECHO_AFTER_S, state.asked_s + PING_EVERY_S):
            return False
        if state.dead_at_s is not None:
            return False  # It has answered.
        state.asked_s = now_s
        return True

    def _deadline_s(self, state: _Peer) -> float:
        dead_at_s, silent_at_s = state.dead_at_s, self._silent_at_s(state)
        return silent_at_s if dead_at_s is None else min(silent_at_s, dead_at_s)

    def _silent_at_s(self, state: _Peer) -> float:
        slack_s = 2 * min(max(state.stall_s, self.stall_s), MAX_STALL_S)
        if state.paired:
            return state.heard_s + PAIR_PATIENCE_S + slack_s
        if state.doubted_at_s is not None:
            return min(state.doubted_at_s + PROBE_PATIENCE_S, state.heard_s + SUSPECT_AFTER_S) + slack_s
        return state.heard_s + SUSPECT_AFTER_S + slack_s

    def _notice_own_stall(self, now_s: float) -> None:
        """If our loop was held up, silence is our fault: give everybody that much more time."""
        late_s = now_s - (self.last_tick_s if self.last_tick_s is not None else now_s) - PING_EVERY_S
        self.last_tick_s = now_s
        if late_s < MIN_STALL_S or not self.peers:
            return
        for state in self.peers.values():
            state.heard_s = min(state.heard_s + late_s, now_s)  # It may have been heard since.
        if late_s > SUSPECT_AFTER_S - PING_EVERY_S:
            self.back_at_s = now_s
        if self._stall(now_s) < late_s <= AWAY_S:
            self.stall_s, self.stalled_at_s = min(late_s, MAX_STALL_S), now_s

    def _stall(self, now_s: float) -> float:
        """How long our loop was held up, as we tell others."""
        age_s = now_s - self.stalled_at_s
        if age_s > STALL_MEMORY_S + STALL_USED_S:
            self.stall_s = 0.0
        return self.stall_s if age_s <= STALL_MEMORY_S else 0.0
