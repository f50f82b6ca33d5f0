"""What a simulated cluster has done so far, and the rules that it must not break.

The history says which step gave what, who was scheduler of which term, and what each view is. Every rule here is
about several nodes; those of one core are its own `check_invariants`. What was told is kept for a person.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any

from ..node.agent.core import Phase
from ..protocols import events as ev
from ..protocols.messages import Down, Up, link
from ..protocols.overlay import lacking
from ..protocols.scale_in import LeaverState
from .network import Network
from .nodes import SimNode, whose

PATIENT_S = 20.0  # Of a joiner with a cluster that is silent.
STORY_LINES = 60


class History(Network[SimNode]):
    """What a whole cluster has done. Its checks raise AssertionError as soon as a rule is broken."""

    def __init__(self, seed: int, record: bool) -> None:
        super().__init__(seed)
        self.seed = seed
        self.going_s = 2.0  # Who has made a step no longer ago goes on.
        self.persons = 0  # How often a person said that nodes are dead.
        self.history: dict[int, tuple[SimNode, Any]] = {}  # Step: who completed it first, and with what.
        self.dealt: dict[tuple[int, str], tuple[tuple[int, int], ...]] = {}  # To whom, in which step.
        # After so many steps: who was there first, and its state.
        self.states: dict[int, tuple[SimNode, int]] = {}
        self.schedulers: dict[int, str] = {}
        self.views: dict[tuple[int, int], Any] = {}
        self.ended: int | None = None  # How many steps were complete for the last who has left as the last.
        self.record = record  # Keep the whole story.
        self.told: deque[tuple[float, str, str | ev.Event]] = deque(maxlen=None if record else STORY_LINES)

    # --- rules, checked as things happen ---

    def _check(self, node: SimNode) -> None:
        if not node.done:
            node.agent.check_invariants()
        scheduler = node.agent.scheduler
        if scheduler is not None:
            first = self.schedulers.setdefault(scheduler.term, node.name)
            assert first == node.name, f"{first} and {node.name} are schedulers of term {scheduler.term}"

    def _check_sent(self, sender: str, event: ev.Received) -> None:
        """Check that no chunk is sent of an attempt that a flush has ended: it would hold up others."""
        message, installed = event.message, self.nodes[sender].installed
        if isinstance(message, (Up, Down)):
            assert message.key >= installed, (
                f"{sender} sends a chunk of view {message.key}, though a flush has installed {installed}"
            )

    def _check_gives_up(self, node: SimNode, reason: str) -> None:
        """Check that a node that gives up was refused, or reaches no member that it knows and that goes on."""
        since_s = max(self.now_s - PATIENT_S, node.was_away_s)
        joiner = node.agent.joiner
        known = {*node.ways, *(joiner.asking.seeds if joiner else ())}
        for other in self.active():
            if other.paused or other.agent.parked or self._left_behind(other):
                continue
            goes_on = other.goes_on_s <= since_s and self.now_s - other.last_progress_s <= self.going_s
            pair = link(node.name, other.name)
            there = f"{other.name}:1" in known and not self._is_cut(*pair)
            there = there and self.healed_s.get(pair, 0.0) <= since_s and other.was_away_s <= since_s
            assert node.refused or not (goes_on and there), (
                f"{node.name} GIVES UP though {other.name} goes on and can be reached: {reason}"
            )

    def _check_view(self, node: SimNode, view: Any) -> None:
        self._say(node.name, f"enters view {view.key}: {','.join(view.member_ids)} + {view.observer_ids}")
        known = self.views.setdefault(view.key, view)
        assert known == view, f"two views are called {view.key}"

    def _check_history(self, node: SimNode, step: int, what: Any) -> None:
        """Check that all nodes that complete a step complete the same. Dead nodes, and those left behind, may differ.

        A node that was stopped or cut off while the others went on may still complete the step that was
        under way (all it needs may be in its queues); it is out of the newest view and will be told so.
        """
        assert self.ended is None or step < self.ended or self.persons, (
            f"{node.name} goes on with step {step}, though somebody has left as the last"
        )
        holder, known = self.history.get(step, (node, what))
        if self._left_behind(node):
            node.strays += step not in self.history or known != what
            assert node.strays <= 1, f"{node.name} goes on by itself: step {step}"
            return
        self._check_samples(node, step, what)
        redone = not holder.alive or holder.done or self._left_behind(holder)
        assert known == what or redone, (
            f"FORK at step {step}: {holder.name} has {known}, {node.name} has {what}"
        )
        if known != what and not holder.alive and not holder.done:
            holder.redone += 1
            assert holder.redone <= 1 or self.persons, (
                f"{node.name} does steps again that {holder.name} had gone on with: it was no crash in one view"
            )
        if known != what or step not in self.history:
            self.history[step] = (node, what)

    def _check_state(self, node: SimNode) -> None:
        """As `_check_history`, for the state: after equally many steps all nodes have applied the same."""
        step, state = len(node.log), node.log[-1].state if node.log else 0
        holder, known = self.states.get(step, (node, state))
        if self._left_behind(node):
            return  # With a step that is nobody else's, perhaps.
        redone = not holder.alive or holder.done or self._left_behind(holder)
        assert known == state or redone, (
            f"STATES DIFFER after {step} steps: {holder.name}'s and {node.name}'s"
        )
        if known != state or step not in self.states:
            self.states[step] = (node, state)

    def _check_departed(self, node: SimNode) -> None:
        """Who has left, and does not live again, is forgotten once all act in a view without it."""
        lives, is_settled = node.agent.overlay.lives, not node.agent.sync.priors
        kept = lives.departed - lives.reborn
        assert not (is_settled and kept), f"{node.name} remembers {sorted(kept)}, which nobody can mean"

    def _check_samples(self, node: SimNode, step: int, what: tuple[frozenset[str], Any]) -> None:
        """Check that a step consumes exactly the samples that its contributors were dealt.

        Also that none of the parts has been taken back since.
        """
        who, ranges = what
        now = {each.part for each in self.nodes.values() if each.alive and each.step == step}
        void = sorted(part for part in who - now if whose([part]) <= whose(now))
        assert not void, f"step {step} of {node.name} has {void}, which were taken back: {sorted(now)}"
        dealt = sorted(each for name in whose(who) for each in self.dealt.get((step, name), ()))
        assert dealt == sorted(ranges), (
            f"step {step} of {node.name}: samples {ranges} are not those of {sorted(who)}: {dealt}"
        )

    def _check_weight(self, node: SimNode, step: int, who: frozenset[str], weight: float) -> None:
        """Check that a sum is divided by the number of its samples.

        A sum of an earlier view than the newest is of a void attempt, whose samples were dealt anew.
        """
        if node.view.key != max(self.views, default=node.view.key):
            return
        dealt = [each for name in whose(who) for each in self.dealt.get((step, name), ())]
        samples = sum(stop - start for start, stop in dealt)
        assert weight == samples, (
            f"{node.name} divides a sum of step {step} by {weight:g}, of {samples} samples"
        )

    def _left_behind(self, node: SimNode) -> bool:
        newest = self.views[max(self.views)]
        return newest.find(node.name) is None and newest.key > node.view.key

    # --- how the cluster stands ---

    def active(self) -> list[SimNode]:
        """Nodes that are members and alive."""
        return [n for n in self.nodes.values() if n.alive and not n.done and n.agent.phase is Phase.MEMBER]

    def unsettled(self, since_s: float) -> list[str]:
        """With all faults over: who is not a member of the one view that goes on, and makes steps since `since_s`?

        Excused is who must wait: parked, where too few live who could go on, and nobody has; or on its way
        back to a cluster of which all that it knows are dead, or parked like that.
        """
        complaints = []
        alive = [n for n in self.nodes.values() if n.alive and n.done != "Left"]
        moving = [n for n in alive if n.last_progress_s >= since_s and n.agent.phase is Phase.MEMBER]
        views = {n.view.key for n in moving}
        if len(views) > 1:
            complaints.append(f"{len(views)} views are active: {sorted(views)}")
        for node in alive:
            if node in moving and node.agent.parked:
                complaints.append(f"{node.name} makes steps and says that it is parked ({node.agent.parked})")
            elif node not in moving and not self._must_park(node) and not self._finds_nobody(node):
                where = node.done or node.agent.phase.value
                complaints.append(f"{node.name} ({where}) made no step since {since_s:g} s")
        return complaints

    def _finds_nobody(self, node: SimNode) -> bool:
        """Is the node joining, or has it tried to, while no node that it knows is in a cluster that goes on?"""
        known = [n for n in self.active() if f"{n.name}:1" in node.ways]
        wants_in = node.agent.phase is Phase.JOINING or node.done == "JoinFailed"
        return wants_in and all(self._must_park(n) for n in known)

    def _must_park(self, node: SimNode) -> bool:
        """Are too few left of the view that the node acts in, and has none of them gone on without it?

        A half without the most senior goes on only if it saw the others die, which it may have missed. Who
        came later is not asked: the node does not know where to find them. If those that it knows in newer
        views must park there, the node must, too: their step is not to be lost, so they vote for none behind.
        """
        if node.agent.phase is not Phase.MEMBER or not node.agent.parked:
            return False
        known = [n for n in self.active() if n.name in node.view.node_ids]
        newer = [n for n in known if n.view.key > node.view.key]
        if newer:
            return all(self._must_park(n) for n in newer)
        return lacking(node.agent.sync.electorates(), {n.name for n in known}, set()) is not None

    def is_quiet(self, since_s: float) -> bool:
        """Have all come to rest: all members in one view, nobody on the way in or out, all making steps?"""
        alive = [n for n in self.nodes.values() if n.alive and not n.done]
        alive = [n for n in alive if not (n.agent.parked and self._must_park(n))]
        views = {n.agent.sync.view.key for n in alive if n.agent.sync.view}
        return (
            len(views) <= 1
            and all(
                n.agent.phase is Phase.MEMBER and n.loaded and n.last_progress_s >= since_s for n in alive
            )
            and all(n.agent.leaver.state is LeaverState.STAYING for n in alive)
            and not any(n.agent.scheduler and n.agent.scheduler.busy for n in alive)
            and not self.unsettled(since_s)
        )

    # --- what is told ---

    def digest(self) -> str:
        """Equal for two runs only if they were the same: of the generator that made every delay, and the story."""
        told = "\n".join(_line(*each) for each in self.told)
        return hashlib.sha256(f"{self.rng.getstate()} {self.count}\n{told}".encode()).hexdigest()

    def story(self) -> str:
        """The last events, for a person."""
        return "\n".join(self.told_lines()[-STORY_LINES:])

    def told_lines(self) -> list[str]:
        """All that is kept of the story; the whole of it with `record`."""
        return [_line(*each) for each in self.told]

    def _say(self, node: str, what: str | ev.Event) -> None:
        """Note it for the story; texts are made of it when somebody asks."""
        self.told.append((self.now_s, node, what))


def _line(now_s: float, node: str, what: str | ev.Event) -> str:
    match what:
        case ev.Received(peer, message):
            what = f"<- from {peer} {message!r}"
        case ev.Event():
            what = f"<- {what!r}"
    return f"{now_s:10.4f} {node:>4} {what[:170]}"
