"""Routed: from one view to the next, by proposal or by flush; and the election of who plans it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .fields import Count, Id, Link, Message, Text, ViewKey
from .steps import Commit
from .views import Deal, Electorate, View, ViewChange


class Prepare(Message, frozen=True, kw_only=True):
    """Scheduler to all: open what `view` needs and vote for it in the steps to come."""

    view: View | ViewChange


class PrepareFailed(Message, frozen=True, kw_only=True):
    """Node to scheduler: I cannot have this link; propose something else."""

    key: ViewKey
    node: Id
    link: Link
    reason: Text


class AbortRequest(Message, frozen=True, kw_only=True):
    """Member to scheduler: the attempt of this step must be started again.

    `without_me`: I am a member, but no source is left that would send me the state.
    """

    node: Id
    key: ViewKey
    step: Count
    reason: Text
    without_me: bool = False


class Flush(Message, frozen=True, kw_only=True):
    """Scheduler to all: stop the attempt under way and tell me where you are.

    I am at `key` and have all that came before `step`: what is news to me comes with the answer.
    """

    term: Count
    number: Count
    scheduler: Id
    key: ViewKey
    step: Count


class FlushOk(Message, frozen=True, kw_only=True):
    """Node to scheduler: I stopped at `step` in view `key`; the rest is given where it is news to you.

    `began_here`: it was told to begin with `step`, and has no result of the one before. `kept`: of so many steps
    before `step` it has the results.
    """

    term: Count
    number: Count
    node: Id
    key: ViewKey
    step: Count
    began_here: bool = False
    view: View | None = None
    priors: tuple[Electorate, ...] = ()
    commit: Commit | None = None
    deal: Deal = ()
    kept: Count = 1


class Install(Message, frozen=True, kw_only=True):
    """Scheduler to all: go on in `view` with `step`. Who lacks the step before adopts it from `holder`.

    `commit`: of that step; `earlier`: of those before it that somebody lacks as well, which `holder` has, too.
    """

    term: Count
    number: Count
    view: View | ViewChange
    priors: tuple[Electorate, ...]
    step: Count
    deal: Deal
    holder: Annotated[str, Meta(max_length=64)] = ""
    commit: Commit | None = None
    earlier: Annotated[tuple[Commit, ...], Meta(max_length=8)] = ()


class VoteRequest(Message, frozen=True, kw_only=True):
    """Candidate to voter: may I be the scheduler of `term`? `trial`: would you say yes (pre-vote)?"""

    term: Count
    candidate: Id
    key: ViewKey
    trial: bool


class VoteReply(Message, frozen=True, kw_only=True):
    """Voter to candidate. A refusal carries the voter's own, perhaps higher, term."""

    term: Count
    voter: Id
    granted: bool
    trial: bool
