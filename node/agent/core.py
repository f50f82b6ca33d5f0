"""The agent: one node, all of its decisions (Chaos Sec. V-A1: "bridges the node and scheduler").

    OUTSIDE --found or join--> (observer -->) member --leave, expelled--> OUT

A node that is out comes back as a new Agent, as a process does that was started again: of a later life,
through `ways_back`.

It is made of cores with one concern each (node.py names them: Relay, Liveness, Overlay, StepSync, Election,
the four negotiations' halves, and, on one node at a time, the Scheduler), and of parts that connect what one
core finds out to what another needs to know. Parts say what they handle (routes.py); this class sends each
event, message and effect to whoever handles it. No clock, no socket, no tensor, no thread.

The order of effects is a contract; whoever performs them does so in this order:

1. What the handlers of an event say, in the order in which the parts are named below; of a Tick, as in
   `_on_tick`.
2. What an effect means to other cores follows it at once. The farewell goes before Left and Out: after these
   nothing is sent. Of a joiner Out is not told at all, for it asks again.
3. What this node has sent to itself is handled next, one message after the other, with all that follows from
   each.
4. Then it stands for the scheduler's role, if that is vacant, and answers what was asked of a step that is
   reached by now; 3 and 4 again, until nothing follows.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from ...protocols.asking import Otherwise
from ...protocols.effects import Effect, Left, Misheard, Out
from ...protocols.errors import RemoteProtocolError
from ...protocols.events import Event, Received, Tick
from ...protocols.messages import EVERYONE, Envelope, LinkNews, Routed, View
from .joining import Joining
from .leaving import Leaving
from .missing import Missing
from .neighbors import Neighbors
from .node import CoreSettings, Node, Phase
from .parking import Parking
from .recovery import StepRecovery
from .relayouts import Relayouts
from .reports import Reports
from .role import Role
from .routes import Handler, Part, merged
from .steps import Steps
from .strikes import Strikes
from .views import Views
from .welcome import Welcome

__all__ = ["Agent", "CoreSettings", "Phase"]

# Of one life, that lead back after it: else who comes back again and again knows of ever more.
MAX_SEEDS = 32


class Agent(Node):
    """One node's decisions. `handle(event, now_s)` says what to do; `wake_at_s` when to send a Tick."""

    def __init__(self, me: str, settings: CoreSettings, rng: random.Random) -> None:
        super().__init__(me, settings, rng)
        self.strikes = Strikes()
        self.recovery = StepRecovery(self)
        self.role = Role(self)
        self.reports = Reports(self)
        self.missing = Missing(self, self.recovery)
        self.joining = Joining(self, self.role, self.recovery, self.reports)
        self.neighbors = Neighbors(self, self.role, self.recovery, self.joining, self.missing)
        self.views = Views(self, self.role, self.recovery, self.joining, self.neighbors, self.missing)
        self.steps = Steps(self, self.recovery, self.strikes)
        self.leaving = Leaving(self, self.recovery, self.missing, self.views, self.strikes)
        self.parking = Parking(self, self.missing)
        self.welcome = Welcome(self, self.joining, self.parking)
        self.relayouts = Relayouts(self)
        parts: tuple[Part, ...] = (
            self.steps, self.neighbors, self.views, self.role, self.recovery, self.reports, self.joining,
            self.welcome, self.leaving, self.parking, self.relayouts,
        )  # fmt: skip
        routes = [part.routes() for part in parts]
        self._events = merged(each.events for each in routes)
        self._messages = merged(each.messages for each in routes)
        self._routed = merged(each.routed for each in routes)
        self._effects = merged(each.effects for each in routes)
        self._events |= {Received: self._on_received, Tick: self._on_tick}
        self._messages[Envelope] = self._on_envelope

    # --- start ---

    def found(self, now_s: float, view: View | None = None) -> list[Effect]:
        """Start a cluster: of one, or of all members of a first `view` that each of them is given."""
        return self._finish(self.joining.found(view, now_s), now_s)

    def join(
        self, seeds: tuple[str, ...], neighbors: tuple[str, ...], degree: int, blocking: bool,
        patience_s: float, now_s: float, otherwise: Otherwise = Otherwise.FAIL,
    ) -> list[Effect]:  # fmt: skip
        """Ask to be let into the cluster that one of `seeds` belongs to."""
        asked = self.joining.ask(seeds, neighbors, degree, blocking, patience_s, now_s, otherwise)
        return self._finish(asked, now_s)

    def end(self, reason: str, now_s: float) -> list[Effect]:
        """The process is about to end: say farewell, and act no more."""
        return self._finish([Left(reason)], now_s)

    @property
    def join_phases(self) -> dict[str, float]:
        """Seconds that the last join was in each state of protocols/scale_out.py; empty for a founder."""
        return dict(self.joining.news.took_s) if self.joining.news else {}

    @property
    def ways_back(self) -> tuple[str, ...]:
        """Where to ask for the cluster that goes on without us: our neighbours, its others, first seeds."""
        view, named_at = self.sync.view, self.neighbors.named_at
        near = view.neighbors(self.me) if view else ()
        members = sorted(view.members, key=lambda m: m.id not in near) if view else ()
        ways = [way for member in members if member.id != self.me for way in self.book.ways_to(member)]
        peers = [named_at[peer] for peer in sorted(self.relay.peers) if peer in named_at]
        # One of them has told us that we are out. The seeds of a life that came back are ways of the one before.
        past = self.joining.seeds[:MAX_SEEDS]
        return tuple(dict.fromkeys((*ways, *past, *peers, *self.settings.seeds)))

    # --- events ---

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """One event in, its effects out. A peer's mistake becomes `Misheard`."""
        if self.phase is Phase.OUT:
            return []
        handler = self._events.get(type(event))
        if handler is None:
            raise TypeError(f"nobody handles {event!r}")
        return self._finish(self._taken(handler, event, now_s), now_s)

    def note(self, message: Routed, now_s: float, target: str = EVERYONE) -> list[Effect]:
        """Send a message to all, or to `target`: mostly what happened here, once the loop has added time and cost."""
        return self._finish(self.relay.send(target, message), now_s)

    def why_it_waits(self, now_s: float) -> str | None:
        """See `Parking.why`."""
        return self.parking.why(now_s)

    @property
    def wake_at_s(self) -> float | None:
        """When the next Tick is due."""
        soonest: float | None = None
        for core in (
            self.liveness, self.deaths, self.election, self.follower, self.opener, self.prober, self.lost_links,
            self.leaver, self.joiner, self.scheduler, self.missing, self.reports, self.recovery,
        ):  # fmt: skip
            if (
                core is not None
                and (at_s := core.wake_at_s) is not None
                and (soonest is None or at_s < soonest)
            ):
                soonest = at_s
        return soonest

    def _on_tick(self, event: Tick, now_s: float) -> list[Effect]:
        ticks: tuple[Callable[[float], list[Effect]], ...] = (
            self.neighbors.tick, self.leaving.tick, self.joining.tick, self.role.tick, self.views.tick,
            self.leaving.give_up, self.recovery.tick, self.missing.tick, self.reports.tick,
        )  # fmt: skip
        return [effect for tick in ticks for effect in tick(now_s)]

    def _on_received(self, event: Received, now_s: float) -> list[Effect]:
        """A message of a neighbour. If no part handles its type, it is meant for the transport or for a client."""
        heard = self.neighbors.heard(event, now_s)
        handler = self._messages.get(type(event.message))
        return heard + self._taken(handler, event, now_s) if handler else heard

    def _on_envelope(self, event: Received, now_s: float) -> list[Effect]:
        """Pass it on, and open it if it is for us."""
        peer, envelope = event.peer, event.message
        assert isinstance(envelope, Envelope)
        told: list[Effect] = []
        if envelope.source == peer and isinstance(envelope.body, LinkNews):
            told = self.neighbors.said_where(peer, envelope.body)
        ours, effects = self.relay.receive(peer, envelope)
        return told + effects + (self._open(envelope.source, envelope.body, now_s) if ours else [])

    def _open(self, source: str, body: Routed, now_s: float) -> list[Effect]:
        handler = self._routed.get(type(body))
        return self._taken(handler, Received(source, body), now_s) if handler else []

    def _taken(self, handler: Handler, event: Event, now_s: float) -> list[Effect]:
        """The handler's effects. If it finds a peer's mistake, the event's other effects are still performed."""
        try:
            return handler(event, now_s)
        except RemoteProtocolError as error:
            return [Misheard(str(error))]

    # --- what follows ---

    def _finish(self, effects: list[Effect], now_s: float) -> list[Effect]:
        """Follow up on what this event has changed, until nothing more follows."""
        done: list[Effect] = []
        while True:
            done += self._followed_up(effects, now_s)
            if (body := self.relay.take_local()) is not None:
                effects = self._open(self.me, body, now_s)
            else:
                effects = self.role.elect(now_s) + self.welcome.answer_early()
                if not effects and not self.relay.local:
                    return done

    def _followed_up(self, effects: list[Effect], now_s: float) -> list[Effect]:
        done: list[Effect] = []
        for effect in effects:
            handler = self._effects.get(type(effect))
            if handler is None:
                done.append(effect)
                continue
            following = self._followed_up(handler(effect, now_s), now_s)
            if isinstance(effect, Out) and self.is_joining:
                done += following
            else:
                done += [*following, effect] if isinstance(effect, (Left, Out)) else [effect, *following]
        return done
