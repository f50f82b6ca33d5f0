"""What a back end does, whichever way it makes links."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from .topology import Link, LinkSpec, Topology


class TestbedError(Exception):
    """A testbed cannot be what was asked for; the text names what, why, and the alternative."""

    __test__ = False  # No test, whatever pytest makes of the name.


END_PATIENCE_S = 2.0  # Between SIGTERM and SIGKILL, for what still runs on a node.


Kind = Literal["netns", "relay", "docker"]


class Backend(Protocol):
    """Makes an overlay on this machine. Methods raise TestbedError before they change anything they cannot.

    `topology` is that of `up`, or what a later process has read from the file it left.
    """

    kind: ClassVar[Kind]
    python: ClassVar[str]  # The interpreter that nodes have chaosnet in.
    name: str
    topology: Topology
    routes: bool  # Are nodes that are no neighbours reached through others?
    cuts: set[Link]
    id: str  # Another one than that of an earlier or later testbed of the same name.

    def check(self, topology: Topology) -> None:
        """Can it be done here? Changes nothing."""

    def up(self, topology: Topology) -> None:
        """Make it; what an earlier `up` of the same name has left is replaced."""

    def change(self, links: Mapping[Link, LinkSpec]) -> None:
        """Give links other properties, under the connections that run over them; a cut one gets them healed."""

    def cut(self, link: Link) -> None:
        """Nothing passes any more, and nobody is told."""

    def heal(self, link: Link) -> None: ...

    def environment(self, node: str) -> dict[str, str]:
        """What a program on `node` needs to know: its addresses, and those of its neighbours."""

    def endpoints(self, sender: str, receiver: str, port: int) -> tuple[str, str]:
        """For a connection over a link: where `receiver` is to listen, and where `sender` finds it."""

    def start(self, node: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Run a program on a node."""

    def in_force(self) -> list[dict[str, Any]]:
        """What is set now, read back: one row a link and direction."""

    def alive(self) -> int:
        """How many of the nodes are there?"""

    def down(self) -> int:
        """Remove all of it, and nothing else. Returns: how many nodes there were."""


def check_name(name: str) -> str:
    """Raises TestbedError for a name that a namespace cannot have; else returns it."""
    if not re.fullmatch(r"[a-z0-9]{1,20}", name):
        raise TestbedError(f"{name!r} is no name of a testbed (expected a-z and 0-9, at most 20)")
    return name


def end_processes(running: Callable[[], Sequence[int]]) -> None:
    """End the processes that `running` names: SIGTERM, and for those that stay SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline_s = time.monotonic() + END_PATIENCE_S
        while running() and time.monotonic() < deadline_s:
            time.sleep(0.02)
