"""Notices of a change, to people and to those who have asked for it."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocols.effects import Effect, Happened
from ..protocols.messages import Answer, Link, View, ViewKey
from ..protocols.sentences import counted
from .admission import mode
from .repairs import Repairs
from .tenure import Proposal, Tenure
from .views import AddJoiners, AddLink, Change, Remove, RemoveLink, Repair, Replan


class Notices:
    """What one scheduler tells about its changes."""

    def __init__(self, tenure: Tenure, repairs: Repairs) -> None:
        self.tenure, self.repairs = tenure, repairs
        self.told_unplanned = False
        self.told_leaving: tuple[ViewKey, str] | None = None  # In which view, and who.

    def asks_to_leave(self, node: str) -> list[Effect]:
        """Tell people, once: who is alone asks again and again until its script ends its step."""
        told = (self.tenure.view.key, node)
        if told == self.told_leaving:
            return []
        self.told_leaving = told
        return [Happened("scale-in", node, "asks to leave", self.tenure.sync.step)]

    def answer(self, change: Change, ok: bool, text: str) -> list[Effect]:
        """Answer the client that asked for the change, if one did."""
        return self.tenure.send(change.asker, Answer(ok=ok, text=text)) if change.asker else []

    def unopened(self, change: Change, link: Link, reason: str) -> list[Effect]:
        """Answer the client that asked for the change; tell people only if they have heard that the link comes."""
        a, b = link
        answer = self.answer(change, False, f"the link {a} - {b} cannot be opened ({reason})")
        if isinstance(change, AddLink):
            answer.append(Happened("link-refused", f"{a} - {b}", reason, self.tenure.sync.step))
        return answer

    def done(self, change: Change, view: View, new: Sequence[str] = ()) -> list[Effect]:
        """Tell people, and the client that asked, that the change is in force. `new`: members that it gave a vote."""
        step = self.tenure.sync.step
        members = {*view.member_ids}
        links = sum({*each} <= members for each in view.links)  # Not those of joiners.
        count = f"{counted(len(members), 'member')}, {counted(links, 'link')}"
        joined = [Happened("joined", node, f"now {count}", step) for node in new]
        return [*joined, *self._of(change, count, step)]

    def _of(self, change: Change, count: str, step: int) -> list[Effect]:
        match change:
            case AddJoiners(joiners=joiners):
                return [
                    Happened("replication", each.node, f"starts to pull the state ({mode(each)})", step)
                    for each in joiners
                ]
            case Remove(node=node):
                return [Happened("left", node, f"now {count}", step)]
            case AddLink(link=(a, b)):
                self.repairs.opened((a, b))
                answer = self.answer(change, True, f"the link {a} - {b} is open")
                return [*answer, Happened("link-up", f"{a} - {b}", f"now {count}", step)]
            case Repair(links=opened):
                return [Happened("link-up", f"{a} - {b}", f"now {count}", step) for a, b in opened]
            case RemoveLink(link=(a, b), lost=lost):
                if not lost:
                    self.repairs.removed((a, b))
                answer = self.answer(change, True, f"the link {a} - {b} is closed")
                return [*answer, Happened("link-down", f"{a} - {b}", f"now {count}", step)]
            case Replan(why=why):
                return [Happened("new-plan", self.tenure.me, why, step)]
        return []

    def unplanned(self) -> list[Effect]:
        """If the policy finds no trees, tell people once, until it finds some again."""
        why, is_told = self.tenure.unplanned, self.told_unplanned
        self.told_unplanned = bool(why)
        if not why or is_told:
            return []
        detail = f"one for all sums, as the sync policy finds no others ({why})"
        return [Happened("new-plan", self.tenure.me, detail[:2000], self.tenure.sync.step)]

    def done_meanwhile(self, proposed: Proposal) -> list[Effect]:
        """Tell of a change whose view others have entered with a step that this node lacks: nobody else would."""
        self.tenure.withdraw(proposed.change)
        return self.done(proposed.change, proposed.view, proposed.new)
