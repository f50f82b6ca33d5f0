"""The members with which a node last ran at its address: a small file of the user's, for each fixed port.

So a founder that is started again by the same command, which names nobody to join, asks those first, and does not
begin a second cluster beside the living one. The file is a help and no more: what cannot be read counts as none, and
what cannot be written is told once, and tried again with the next view: a disk may be full for a while. It goes when
the last member has left.
"""

from __future__ import annotations

import json
import os
import platform
import re
import threading
from collections.abc import Callable
from pathlib import Path

from ..node.endpoint import Endpoint
from ..protocols.asking import MAX_KNOCKS
from ..protocols.errors import ConfigError
from ..protocols.messages import View

MAX_BYTES = 64 << 10


def folder() -> Path:
    """CHAOSNET_STATE_DIR, else where the user's programs keep what they want to find again."""
    named = os.environ.get("CHAOSNET_STATE_DIR")
    if named:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "chaosnet"


def file_of(listen: str) -> Path | None:
    """That of the node at `listen` on this machine; None for a port of chance, at which nobody comes back."""
    try:
        at = Endpoint.parse(listen)
        # Homes may be shared by several machines, all of which listen at 0.0.0.0:5555.
        name = "_".join((platform.node(), at.host, str(at.port)))
        return folder() / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}.json" if at.port else None
    except (ConfigError, RuntimeError):  # There may be no home.
        return None


def recall(listen: str) -> tuple[str, ...]:
    """Addresses of those who were in the cluster of the node at `listen`; () if nobody is remembered."""
    file = file_of(listen)
    try:
        if file is None or file.stat().st_size > MAX_BYTES:
            return ()
        found = json.loads(file.read_text())["members"]
        return tuple(str(Endpoint.parse(each)) for each in found[:MAX_KNOCKS])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError):
        return ()


class Remembered:
    """Keeps the file of the node `name` at `listen` as its cluster changes. Methods: from any thread, and quick.

    Args:
        say: Is told, once, if nothing can be written.
    """

    def __init__(self, name: str, listen: str, say: Callable[[str], None]) -> None:
        self._name, self._file, self._say = name, file_of(listen), say
        self._lock = threading.Lock()
        self._kept: tuple[str, ...] = ()  # What the file has, or is about to have.
        self._failed = False

    def entered(self, view: View) -> None:
        """A new view is in force. A disk may hang, and the caller must not: it is written down in a thread."""
        others = sorted(
            (member for member in view.members if member.id != self._name),
            key=lambda member: member.id not in view.neighbors(self._name),
        )
        ways = tuple(dict.fromkeys(way for member in others for way in member.addresses))[:MAX_KNOCKS]
        # Who goes on alone may have lost the others over a cut, and they may be there still when it comes back.
        if self._file is None or not ways or ways == self._kept:
            return
        self._kept = ways
        try:
            threading.Thread(target=self._write, args=(ways,), name="chaosnet-members", daemon=True).start()
        except RuntimeError as error:  # There are as many as may be.
            self._kept = ()
            self._tell(str(error))

    def forget(self) -> None:
        """The cluster has ended."""
        if self._file is None:
            return
        with self._lock:
            self._kept = ()
            try:
                self._file.unlink(missing_ok=True)
            except OSError as error:
                self._tell(error.strerror)

    def _write(self, ways: tuple[str, ...]) -> None:
        assert self._file is not None
        with self._lock:
            if ways != self._kept:
                return  # There is newer.
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                temporary = self._file.with_suffix(".new")
                temporary.write_text(json.dumps({"members": ways}))
                os.replace(temporary, self._file)
                self._failed = False
            except OSError as error:
                self._kept = ()
                self._tell(error.strerror)

    def _tell(self, why: str | None) -> None:
        if not self._failed:
            self._failed = True
            self._say(f"cannot remember the members in {self._file}: {why}")
