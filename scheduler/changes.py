"""Changes that are asked for: they wait in a queue, and become proposals one after the other.

change --PREPARE--> proposed view --the vote in the all-reduce--> active --> next change
                    cannot be prepared, or a flush comes first --> it waits again, or is given up
"""

from __future__ import annotations

from dataclasses import replace

from ..protocols.effects import Effect
from ..protocols.errors import PlanInfeasible
from ..protocols.messages import EVERYONE, Prepare, PrepareFailed, View
from ..protocols.view_change import told_against
from . import views
from .flushes import Flushes
from .notices import Notices
from .repairs import Repairs
from .replanning import Replanning
from .tenure import MAX_QUEUE, REPEAT_EVERY_S, Proposal, Tenure
from .views import AddJoiners, Change, Nothing, Remove, Repair, Replan, Votes

# If no step carries the vote by then (everybody is paused), a flush lets the leaver go. While they train, this step
# or the next one carries it: so the wait is at least so many seconds, and so many usual steps.
LEAVE_PATIENCE_S, LEAVE_PATIENCE_STEPS = 5.0, 3.0


class Changes:
    """The changes that one scheduler has yet to make."""

    def __init__(self, tenure: Tenure, repairs: Repairs, notices: Notices, flushes: Flushes) -> None:
        self.tenure, self.repairs, self.notices, self.flushes = tenure, repairs, notices, flushes
        self.replanning = Replanning()

    def tick(self, now_s: float) -> list[Effect]:
        """Send PREPARE again. If no step has decided for long, as nobody trains, a flush lets a leaver go."""
        proposal = self.tenure.proposal
        if proposal is None or now_s < proposal.repeat_at_s:
            return []
        proposal.repeat_at_s = now_s + REPEAT_EVERY_S
        effects = [*self.tenure.send(EVERYONE, Prepare(view=proposal.told))]
        change, waited_s = proposal.change, now_s - proposal.since_s
        is_late = waited_s > self._vote_patience_s
        leaver = next((each for each in (change, *self.tenure.queue) if isinstance(each, Remove)), None)
        if leaver is not None and is_late:
            effects += self.flushes.leave(leaver.node, "no step ends", now_s)
        elif isinstance(change, Replan) and is_late:
            self.tenure.propose(None)  # Nobody trains, so it helps nobody; others may want to leave.
            effects += self.propose_next(now_s)
        return effects

    @property
    def _vote_patience_s(self) -> float:
        """How long a vote may take if anybody trains."""
        return max(LEAVE_PATIENCE_S, LEAVE_PATIENCE_STEPS * (self.tenure.admission.costs()[1] or 0.0))

    # --- the queue ---

    def is_queued(self, change: Change) -> bool:
        """Is this change queued or proposed already?"""
        queue, proposal = self.tenure.queue, self.tenure.proposal
        if isinstance(change, AddJoiners):
            return any(isinstance(each, AddJoiners) for each in queue)
        return change in queue or (proposal is not None and proposal.change == change)

    def is_asked_for(self, change: Change) -> bool:
        """Has somebody asked for the same, be it another, which is not done yet?"""
        proposal = self.tenure.proposal
        waiting = (*self.tenure.queue, *([proposal.change] if proposal is not None else ()))
        return any(each.asker and replace(each, asker=change.asker) == change for each in waiting)

    def enqueue(self, change: Change, now_s: float) -> list[Effect]:
        """Queue a change; it is proposed in its turn."""
        queue = self.tenure.queue
        if self.is_queued(change) or len(queue) >= MAX_QUEUE:
            return []
        queue.append(change)
        return self.propose_next(now_s)

    def admit(self, now_s: float) -> list[Effect]:
        """Let in together the joiners that can be: all have opened their links, or had the time to."""
        admission = self.tenure.admission
        admission.since_s = None
        return self.enqueue(AddJoiners(), now_s) if admission.admissible(self.tenure.view) else []

    def repair(self, view: View) -> None:
        """Where a loss has left the overlay thin, add links as if somebody had asked."""
        queue = self.tenure.queue
        is_queued = any(isinstance(change, Repair) for change in queue)
        if not is_queued and len(queue) < MAX_QUEUE and self.repairs.missing(view):
            queue.append(Repair())

    def replan_if_worth_it(self, now_s: float) -> list[Effect]:
        """Propose other trees if they are worth it: links may carry more or less than when these were planned."""
        tenure = self.tenure
        result_bytes, step_s = tenure.admission.costs()
        if tenure.busy or tenure.parked or tenure.sync.frozen or not result_bytes or step_s is None:
            return []
        view, policy = tenure.view, tenure.policy
        why = self.replanning.look(view, lambda: tenure.graph(view), policy, result_bytes, step_s, now_s)
        return self.enqueue(Replan(why=why), now_s) if why else []

    # --- proposals ---

    def propose_next(self, now_s: float) -> list[Effect]:
        """Take the next change that still makes sense and send PREPARE for its view."""
        tenure = self.tenure
        effects: list[Effect] = []
        while tenure.queue and tenure.proposal is None and tenure.flush is None and not tenure.sync.frozen:
            if isinstance(tenure.queue[0], Votes):
                tenure.queue.rotate(-1)  # Any other change gives votes, too.
            change, seq = self._filled(tenure.queue.popleft()), tenure.seq
            try:
                view = self._view_with(change)
            except (Nothing, PlanInfeasible) as reason:
                tenure.go_on_from(seq)  # Nobody has heard of a view of the next number.
                effects += self.notices.answer(change, False, str(reason))
                continue
            effects += self.notices.unplanned()
            told = told_against(tenure.view, view)
            new = views.new_voters(tenure.view, view)
            tenure.propose(Proposal(view, told, change, new, now_s, now_s + REPEAT_EVERY_S))
            effects += tenure.send(EVERYONE, Prepare(view=told))
        return effects

    def _filled(self, change: Change) -> Change:
        """The change with its joiners, or its links: which they are is known only when its turn has come."""
        tenure = self.tenure
        if isinstance(change, AddJoiners):
            change = AddJoiners(joiners=tenure.admission.admissible(tenure.view))
            for each in change.joiners:
                wanting = tenure.admission.wanting[each.node]
                for peer, reading in wanting.links.items():
                    tenure.monitor.reading(each.node, peer, reading, wanting.measured_s)
        if isinstance(change, Repair):
            change = Repair(links=self.repairs.untried(change) or self.repairs.missing(tenure.view))
        return change

    def _view_with(self, change: Change) -> View:
        tenure = self.tenure
        key, step, impossible = tenure.next_key(), tenure.sync.step + 1, self.repairs.impossible(tenure.view)
        view = views.apply_change(tenure.view, change, key, step, impossible)
        # Who has asked for the change learns why it cannot be; and a plan without trees is no better one.
        return tenure.planned(view, must_be=not change.asker and not isinstance(change, Replan))

    def on_prepare_failed(self, message: PrepareFailed, now_s: float) -> list[Effect]:
        """A link that the proposal needs cannot be opened."""
        tenure, proposal = self.tenure, self.tenure.proposal
        if proposal is None or message.key != proposal.view.key:
            return []
        change = proposal.change
        tenure.propose(None)
        a, b = message.link
        if isinstance(change, AddJoiners):
            tenure.admission.forget({a, b})  # They ask again.
            return self.admit(now_s) + self.propose_next(now_s)
        another = message.link not in self.repairs.out_of_reach and message.link not in tenure.view.links
        if isinstance(change, Remove | Repair):
            self.repairs.failed(message.link)
        effects = self.notices.unopened(change, message.link, message.reason)
        if isinstance(change, Remove) and another:
            tenure.queue.appendleft(change)  # Another link may take the place of this one.
        elif isinstance(change, Repair) and another and len(tenure.queue) < MAX_QUEUE:
            tenure.queue.append(change)  # The other links are wanted still, but whoever asked comes first.
        elif isinstance(change, Remove):
            effects += self.flushes.leave(change.node, "no link can take its place", now_s)
        return effects + self.propose_next(now_s)

    def switched(self, view: View, now_s: float) -> list[Effect]:
        """A new view is in force: if it is the one proposed, the change is done."""
        proposal = self.tenure.proposal
        self.tenure.propose(None)
        done = proposal if proposal is not None and proposal.view.key == view.key else None
        self.replanning.entered(now_s, done is not None and isinstance(done.change, Replan))
        if done is not None:
            return self.notices.done(done.change, view, done.new)
        if proposal is not None:
            self.tenure.put_off(proposal.change)
        return []
