"""Flush and install: stop everybody, find out where they are, and go on with those that can.

    FLUSH --FlushOk of everybody in reach--> quorum? --INSTALL--> active
                                               no --> parked until more can be reached

Source: Chaos, Sec. V-A2.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import xxhash
from msgspec.structs import replace

from ..protocols.effects import Effect, Happened, Out, Parked
from ..protocols.election import LEAP_BIT, LEAPS
from ..protocols.messages import EVERYONE, Electorate, Expelled, Flush, FlushOk, Install, View
from ..protocols.overlay import lacking
from ..protocols.view_change import told_against
from . import views
from .notices import Notices
from .tenure import MAX_QUEUE, REPEAT_EVERY_S, FlushState, Tenure


class Flushes:
    """The flushes of one scheduler, one after the other."""

    def __init__(self, tenure: Tenure, notices: Notices) -> None:
        self.tenure, self.notices = tenure, notices
        self.last_flush = 0
        self.last_install: Install | None = None
        self.leaving_at_flush = ""  # A node that wants to leave, and that no vote will let go soon.
        self.stateless = ""  # A member that has no state to go on with.
        self.cut_off: Set[str] = frozenset()  # Members in reach, but only through some who cannot go on.

    def start(self, reason: str, now_s: float) -> list[Effect]:
        """Stop the attempt everywhere and find out where everybody is."""
        tenure, proposal = self.tenure, self.tenure.proposal
        proposed = tenure.flush.proposed if tenure.flush else proposal
        if proposal is not None:
            tenure.put_off(proposal.change)
            tenure.propose(None)
        self.last_flush += 1
        self.last_install = None
        repeat_at_s = now_s + REPEAT_EVERY_S
        tenure.flush_by(
            FlushState(self.last_flush, repeat_at_s=repeat_at_s, reason=reason, proposed=proposed)
        )
        return tenure.send(EVERYONE, self._message())

    def tick(self, now_s: float) -> list[Effect]:
        """Send FLUSH again, as some may not have heard it."""
        flush = self.tenure.flush
        if flush is None or now_s < flush.repeat_at_s:
            return []
        flush.repeat_at_s, flush.repeated = now_s + REPEAT_EVERY_S, True
        flush.awaited = ""  # It may be a joiner, which need not answer any more.
        return [*self.tenure.send(EVERYONE, self._message()), *self.install_if_complete()]

    def leave(self, node: str, reason: str, now_s: float) -> list[Effect]:
        """Let a node leave by a flush, as no vote will let it go soon.

        The only node with a vote stays: others still need its state. So does a member that keeps a part of the state:
        handing that on takes a step.
        """
        view = self.tenure.view
        keeps_a_part = self.tenure.sync.sums.parts and node in view.member_set
        if keeps_a_part or not {*view.voter_ids} - {node}:
            return []
        self.leaving_at_flush = node
        return self.start(f"{node} leaves and {reason}", now_s)

    def goes_without_state(self, node: str) -> None:
        """The next flush is to drop this member: it has no state to go on with."""
        self.stateless = node

    @property
    def ended(self) -> int:
        """The number of the last flush that is over."""
        return self.last_flush - (self.tenure.flush is not None)

    def _message(self) -> Flush:
        tenure = self.tenure
        assert tenure.flush is not None
        # A node that began with this step may have to pass on the commit before it.
        return Flush(
            term=tenure.term,
            number=tenure.flush.number,
            scheduler=tenure.me,
            key=tenure.view.key,
            step=0 if tenure.sync.began_here else tenure.sync.step,
        )

    def on_ok(self, answer: FlushOk) -> list[Effect]:
        """A node has stopped, and says at which step of which view."""
        tenure, flush = self.tenure, self.tenure.flush
        if answer.key < tenure.view.key and tenure.view.find(answer.node) is None:
            return self.expel(answer.node)
        if answer.term != tenure.term:
            return []
        if flush is None or answer.number != flush.number:
            late = self.last_install is not None and answer.number == self.last_install.number
            return self._again(answer.node) if late else []
        answers = flush.answers
        if answer.node not in answers and len(answers) >= MAX_QUEUE + 2 * len(tenure.view.node_ids):
            return []  # So many nodes there are not.
        answers[answer.node] = answer
        if answer.view is not None:
            flush.awaited = ""  # Others may have to answer in that view.
        return self.install_if_complete()

    @property
    def last_view(self) -> View | None:
        """The view of the last INSTALL; the message is kept with the whole view in it."""
        view = self.last_install.view if self.last_install else None
        return view if isinstance(view, View) else None

    def _again(self, node: str) -> list[Effect]:
        """Send the last INSTALL again: it may have been lost on its way to this node."""
        assert self.last_install is not None and self.last_view is not None
        if self.last_view.find(node) is None:
            return self.expel(node)
        return self.tenure.send(node, self.last_install)

    def expel(self, node: str) -> list[Effect]:
        """Tell a node that the cluster goes on without it."""
        key = max(self.tenure.view.key, self.last_view.key if self.last_view else (0, 0))
        return self.tenure.send(node, Expelled(node=node, reason="the cluster went on without it", key=key))

    def install_if_complete(self) -> list[Effect]:
        """Once all that can answer have done so, go on with those that are a quorum, or wait for more."""
        tenure, flush = self.tenure, self.tenure.flush
        assert flush is not None
        answers, reachable = flush.answers, tenure.overlay.reachable
        if flush.awaited in reachable and flush.awaited not in answers:
            return []
        answers = {node: answer for node, answer in answers.items() if node in reachable}
        if tenure.me not in answers:
            return []
        known = [tenure.view, *(answer.view for answer in answers.values() if answer.view)]
        base = max(known, key=lambda view: view.key)
        # A blocking joiner that has not heard of the view it entered with cannot answer. An observer that answers too
        # late would have to pull the state anew.
        due = {*base.voter_ids} if flush.repeated else base.node_set
        flush.awaited = next(iter((due & reachable) - answers.keys()), "")
        if flush.awaited:
            return []
        priors = self._priors(base, answers)
        # What linked them may have been a node that `base` has dropped, this one even, or that cannot go on.
        able = self._able(answers)
        parts = views.parts(base.member_set & able, tenure.overlay.live_links()) or [set()]
        # Who cannot go on consents by its answer, but to one part only: whoever is cut off may ask it, too.
        consent = base.member_set & (answers.keys() - able) if len(parts) == 1 else set()
        others = priors if base.key > tenure.view.key else (*priors, *tenure.sync.without_us())
        missing = [self._without_quorum(base, others, part | consent) for part in parts]
        if "" not in missing:
            ours = next((part for part in parts if tenure.me in part), set())
            self.cut_off = base.member_set & able - ours - {tenure.me}
            return self._park(missing[0])
        cut_off = base.member_set - parts[missing.index("")]
        rest = answers.keys() - cut_off
        late = self._late(base, priors, answers, rest)
        if self.stateless == tenure.me and rest & base.member_set == {tenure.me}:
            return [Out("nobody who has the state is left")]
        return self._install(base, priors, {node: answers[node] for node in sorted(rest | late)}, late)

    def _able(self, answers: dict[str, FlushOk]) -> set[str]:
        """The nodes that have answered, and can go on once they have been told one step's result at most."""
        top = self._top(answers)
        able = {node for node, answer in answers.items() if top - 1 <= answer.step <= top}
        holders = {node for node in able if answers[node].step == top and not answers[node].began_here}
        if not holders:  # Nobody has completed a step yet, so those at the top are as good as holders.
            able = holders = {node for node in able if answers[node].step == top}
        return able - {self.stateless} if holders - {self.stateless} else able

    def _late(
        self, base: View, priors: tuple[Electorate, ...], answers: dict[str, FlushOk], rest: Set[str]
    ) -> set[str]:
        """The joiners that are further behind, but can be told all the results that they lack by one of the `rest`.

        Their commits come from this node, so this node's history must have led to `base`.
        """
        sync = self.tenure.sync
        top = self._furthest([answers[node] for node in self._able({node: answers[node] for node in rest})])
        history = {base.key} | {each.key for each in priors}
        if sync.step < top.step - 1 or self.tenure.view.key not in history:
            return set()
        lacking = range(max(top.step - top.kept, sync.step - len(sync.kept)), top.step - 1)
        members = rest & base.member_set
        near = {end for pair in self.tenure.overlay.live_links() if members & {*pair} for end in pair}
        return {node for node in near & base.node_set & answers.keys() if answers[node].step in lacking}

    def _top(self, answers: dict[str, FlushOk]) -> int:
        """The step to go on with: the one after the last whose result somebody has.

        A node that was told to begin at a later step knows of one that only dead nodes have completed; it does not
        count. If nobody has a result, all were told at which step to begin, and the latest of these counts.
        """
        steps = [answer.step for answer in answers.values() if not answer.began_here]
        return max(steps or (answer.step for answer in answers.values()))

    def _priors(self, base: View, answers: dict[str, FlushOk]) -> tuple[Electorate, ...]:
        """Older views in which somebody may still act: none, if anybody has completed a step in `base`."""
        if any(answer.commit is not None and answer.commit.key == base.key for answer in answers.values()):
            return ()
        if base.key == self.tenure.view.key:
            return self.tenure.sync.priors
        return next(answer.priors for answer in answers.values() if answer.view == base)

    def _without_quorum(self, base: View, others: tuple[Electorate, ...], alive: set[str]) -> str:
        overlay = self.tenure.overlay
        voters = lacking([overlay.electorate(base), *others], alive, overlay.crashed, overlay.has_word)
        if voters is None:
            return ""
        present = sum(node in alive for node in voters.members)
        return f"only {present} of {len(voters.members)} members can be reached"

    def _park(self, reason: str) -> list[Effect]:
        if self.cut_off:
            cut_off = ", ".join(sorted(self.cut_off))
            reason += f" without nodes that cannot go on (there is no other way to {cut_off})"
        if self.tenure.parked == reason:
            return []
        self.tenure.park(reason)
        return [Parked(reason)]

    def _install(
        self, base: View, priors: tuple[Electorate, ...], answers: dict[str, FlushOk], late: set[str]
    ) -> list[Effect]:
        """All go on in what is left of `base`."""
        tenure, flush, leaver = self.tenure, self.tenure.flush, self.leaving_at_flush
        assert flush is not None
        able = self._able(answers) | late
        top = self._furthest([answers[node] for node in able])
        alive = self._without_leaver(able, base, top.node)
        lacked = top.step - min((answers[node].step for node in alive if base.find(node)), default=top.step)
        scheduler = tenure.me if tenure.me in alive and tenure.me in base.member_ids else ""
        tenure.go_on_from(max(tenure.seq, base.seq) + self._leap())
        links = tenure.overlay.live_links()
        view = tenure.planned(views.survivors(base, alive, links, tenure.next_key(), scheduler))
        install = Install(
            term=tenure.term,
            number=flush.number,
            view=view,
            priors=(base.electorate, *priors),
            step=top.step,
            deal=top.deal or tenure.sync.deal,
            holder=top.node if lacked else "",
            commit=(top.commit or tenure.sync.last_commit) if lacked else None,
            earlier=tuple(each for each in tenure.sync.kept if -lacked <= each.step - top.step < -1),
        )
        tenure.flush_by(None)
        self.last_install = install
        effects = self._unpark() + self.notices.unplanned()
        proposed = flush.proposed
        if proposed is not None and proposed.view.key == base.key != tenure.view.key:
            effects += self.notices.done_meanwhile(proposed)
        for node in sorted({*base.node_ids, *answers} - {*view.node_ids}):
            effects += [self._gone(node, flush.reason, top.step, node == leaver), *self.expel(node)]
        for a, b in sorted(set(base.links) - set(view.links)):
            if view.find(a) and view.find(b):
                effects.append(Happened("link-failure", f"{a} - {b}", flush.reason, top.step))
        effects += tenure.send(EVERYONE, replace(install, view=told_against(base, view)))
        elsewhere = sorted(node for node in alive & view.node_set if answers[node].key != base.key)
        return effects + [effect for node in elsewhere for effect in tenure.send(node, install)]

    def _leap(self) -> int:
        """How far to leap in numbering views: after a person's word, a majority may live on with its own numbers."""
        if not self.tenure.overlay.has_word:
            return 0
        chance = xxhash.xxh32_intdigest(f"{self.tenure.me} {self.tenure.view.key}".encode())
        return (LEAPS[0] + chance % (LEAPS[1] - LEAPS[0])) << LEAP_BIT

    def _furthest(self, answers: Sequence[FlushOk]) -> FlushOk:
        """The answer of the node that gives the others what they lack: it has most, and if possible is this node."""
        return max(
            answers,
            key=lambda answer: (
                answer.step,
                not answer.began_here,
                answer.node != self.leaving_at_flush,
                answer.kept,
                answer.node == self.tenure.me,
                answer.node,
            ),
        )

    def _gone(self, node: str, reason: str, step: int, asked_to: bool) -> Happened:
        """Tell people why a node is not in the view any more."""
        error = self.tenure.monitor.ending(node)
        if error is not None:
            return Happened("left", node, f"its script ended with {error}", step)
        if self.tenure.monitor.is_shut_out(node):
            return Happened("expelled", node, "its key was revoked", step)
        if node not in self.tenure.overlay.reachable:
            return Happened("node-failure", node, reason, step)
        if asked_to:
            return Happened("left", node, reason.removeprefix(f"{node} leaves and "), step)
        return Happened("expelled", node, reason, step)

    def _without_leaver(self, alive: set[str], base: View, holder: str) -> set[str]:
        """Let the leaver go with this flush, unless the rest needs it: for its links, its result, or its vote."""
        leaver, self.leaving_at_flush, self.stateless = self.leaving_at_flush, "", ""
        rest = alive - {leaver}
        members = rest & set(base.member_ids)
        links = [each for each in self.tenure.overlay.live_links() if members.issuperset(each)]
        goes = rest & {*base.voter_ids} and leaver != holder and views.is_connected(members, links)
        return rest if goes else alive

    def _unpark(self) -> list[Effect]:
        was, self.cut_off = self.tenure.parked, frozenset()
        self.tenure.park("")
        return [Parked(None)] if was else []
