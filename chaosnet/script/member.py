"""What any trainer says of its node, and how the node leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ..protocols.errors import describe
from ..protocols.status import Status
from . import endings
from .process import ScriptNode


class ScriptMember:
    """What `Trainer` and `PipelineTrainer` tell of their node; as a context manager, either leaves at the end."""

    @property
    def _is_attached(self) -> bool:
        """Is there a node yet?"""
        raise NotImplementedError

    def _member(self) -> ScriptNode:
        """The node. Raises: ConfigError if there is none yet."""
        raise NotImplementedError

    # --- of the cluster ---

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the cluster's members, in the order in which they joined, as agreed with the last step."""
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        """How many members there are, as agreed with the last step."""
        return len(self.members)

    @property
    def is_main(self) -> bool:
        """Has this node been a member for the longest?

        Of the nodes that ask after the same step, at most one is told yes. If it dies before it has done what it was
        to do, nobody has done it; after the next step, another node is the main one.
        """
        return self.members[:1] == (self._member().name,)

    def status(self, history: bool = False) -> Status:
        """The cluster as this node sees it. `history`: with all events and steps that this node has kept."""
        return self._member().session.status(history)

    # --- of this node ---

    @property
    def updates_here(self) -> int:
        """Steps to which this node has brought samples."""
        return self._member().steps.updates_here

    @property
    def joined_step(self) -> int:
        """The step after which this node became a member, the last time."""
        return self._member().joined_step

    @property
    def join_seconds(self) -> float:
        """Seconds that this node's join took."""
        return self._member().session.join_seconds

    @property
    def join_phases(self) -> Mapping[str, float]:
        """Seconds of the join by phase (docs/life_of_a_join.md); of the last join, if this node came back."""
        return self._member().session.join_phases

    @property
    def join_bytes(self) -> int:
        """Bytes of the state that this node received when it joined."""
        return self._member().session.join_bytes

    @property
    def join_bytes_by_source(self) -> Mapping[str, int]:
        """`join_bytes` by the node that sent them."""
        return self._member().session.join_bytes_by_source

    @property
    def rejoins(self) -> int:
        """How often this node was out of the cluster, and came back."""
        return self._member().session.rejoins

    # --- leaving ---

    def request_node_exit(self) -> None:
        """Leave the cluster: the others go on (Chaos, Sec. V-B). Prints what was done here."""
        if self._is_attached:
            self._member().request_node_exit()

    close = request_node_exit

    def crash(self, reason: str, blames: bool = False) -> None:
        """The script ends with an error: say so to the others, and contribute nothing more.

        Args:
            blames: May the samples that the script had in hand be why?
        """
        if self._is_attached:
            self._member().crash(reason, blames)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.request_node_exit()
        else:
            self.crash(describe(error), endings.blames(error))
