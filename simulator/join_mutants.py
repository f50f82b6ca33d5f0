"""Rules of who joins, or comes back, broken on purpose."""

from __future__ import annotations

from typing import Any

from ..node.agent.node import Node
from ..protocols import asking, step_sync
from ..protocols.effects import Effect, ResetAttempt
from ..protocols.messages import View
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
