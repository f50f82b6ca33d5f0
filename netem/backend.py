"""What a back end does, whichever way it makes links."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .topology import Link, LinkSpec, Topology


class TestbedError(Exception):
    """A testbed cannot be what was asked for; the text names what, why, and the alternative."""

    __test__ = False  # No test, whatever pytest makes of the name.


class Backend(Protocol):
    """Makes an overlay on this machine. Methods raise TestbedError before they change anything they cannot."""

    def check(self, topology: Topology) -> None:
        """Can it be done here? Changes nothing."""

    def up(self, topology: Topology) -> None:
        """Make it; what an earlier `up` of the same name has left is replaced."""

    def change(self, links: Mapping[Link, LinkSpec]) -> None:
        """Give links other properties, under the connections that run over them."""

    def cut(self, link: Link) -> None:
        """Nothing passes any more, and nobody is told."""

    def heal(self, link: Link) -> None: ...

    def environment(self, node: str) -> dict[str, str]:
        """What a program on `node` needs to know: its addresses, and those of its neighbours."""

    def start(self, node: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Run a program on a node."""

    def in_force(self) -> list[dict[str, Any]]:
        """What is set now, read back: one row a link and direction."""

    def down(self) -> None:
        """Remove all of it, and nothing else."""
