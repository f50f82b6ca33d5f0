"""Rules of who joins, or comes back, broken on purpose."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ..node.agent.leaving import Leaving
from ..node.agent.node import Node
from ..node.agent.recovery import StepRecovery
from ..protocols import asking, step_sync
from ..protocols.early import EARLY_STEPS, Early
from ..protocols.effects import Effect, ResetAttempt
from ..protocols.events import Received
from ..protocols.messages import View
from ..protocols.overlay import Overlay
from ..protocols.replication import Replication
from . import cluster
from .mutants import Patch, mutant


@mutant("What a script has computed with a state that is void by now goes into a sum.")
def _void_states_count(patch: Patch) -> None:
    patch(Node, "lacks_state", False)


@mutant("Pieces of state are not compared with their hash.")
def _hashes_are_not_checked(patch: Patch) -> None:
    patch(cluster, "is_whole", lambda content, digest: True)


@mutant("What a source owes when it dies is asked of nobody else.")
def _a_dead_sources_rest_is_lost(patch: Patch) -> None:
    original = Replication._drop

    def drop(self: Any, name: str, reason: str, now_s: float) -> Any:
        if name in self.sources and len(self.sources) > 1:
            self.sources[name].rest.clear()
            self.sources[name].under_way.clear()
        return original(self, name, reason, now_s)

    patch(Replication, "_drop", drop)


@mutant("A joiner whose request was lost does not ask again.")
def _joiners_ask_once(patch: Patch) -> None:
    patch(asking.Asking, "again", lambda self, reason, now_s: [])


@mutant("A joiner drops the results that come while it loads the state.")
def _results_are_not_set_aside(patch: Patch) -> None:
    original = cluster.SimCluster._completed

    def completed(self: Any, node: Any, effect: Any) -> None:
        original(self, node, effect)
        if not node.loaded:
            node.backlog.clear()

    patch(cluster.SimCluster, "_completed", completed)


@mutant("A joiner adds what comes to the parts that it was brought as a member, before it was put out.")
def _listening_begins_with_old_parts(patch: Patch) -> None:
    original = step_sync.StepSync.observe

    def observe(self: Any, view: View, step: int) -> list[Effect]:
        return [each for each in original(self, view, step) if not isinstance(each, ResetAttempt)]

    patch(step_sync.StepSync, "observe", observe)


@mutant("What is stored for one attempt to pull the state counts for the next, whose bytes are not here.")
def _pieces_are_of_any_pull(patch: Patch) -> None:
    original = Replication.__init__

    def begin(self: Any, step: int, shard_bytes: int, shards: Any, attempt: int, *more: Any) -> None:
        original(self, step, shard_bytes, shards, 0, *more)

    patch(Replication, "__init__", begin)


@mutant("No more commits are kept for later than chunks are.")
def _commits_are_kept_as_long_as_chunks(patch: Patch) -> None:
    patch(Early, "most_commits", 2 * EARLY_STEPS)


@mutant("Who had to drop what came too early goes on all the same.")
def _who_fell_behind_goes_on(patch: Patch) -> None:
    patch(StepRecovery, "on_fell_behind", lambda self, effect, now_s: [])


# --- who leaves, or is left behind ---


@mutant("Of two members, who has voted for a view without itself may go on as if it had not.")
def _leavers_go_on_alone(patch: Patch) -> None:
    patch(step_sync.StepSync, "without_us", lambda self: ())


@mutant("Crashes are proofs, too, for whom somebody has gone on without.")
def _nobody_goes_on_without_us(patch: Patch) -> None:
    patch(Overlay, "note_newer_view", lambda self: None)


@mutant("Whose link opens tells of lost links, and not of members that were started again.")
def _rebirths_are_not_repeated(patch: Patch) -> None:
    patch(Overlay, "_rebirths", lambda self: ())


@mutant("Whoever begins to listen in a view believes what it has heard before about who lives in it.")
def _observers_know_better_who_lives(patch: Patch) -> None:
    patch(Overlay, "listens", lambda self, view: None)


@mutant("That the others went on without one counts for its next life, too.")
def _expelled_in_any_life(patch: Patch) -> None:
    original = Leaving.on_expelled

    def on_expelled(self: Any, event: Any, now_s: float) -> Any:
        return original(self, Received(event.peer, replace(event.message, key=(0, 0))), now_s)

    patch(Leaving, "on_expelled", on_expelled)


@mutant("Who has left is remembered for ever.")
def _the_departed_are_remembered(patch: Patch) -> None:
    patch(Overlay, "settled", lambda self: None)
