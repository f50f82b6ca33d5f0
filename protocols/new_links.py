"""The links of a joiner to the neighbours that it was given: are they open, how fast, and who could have opened them?

Pure: protocols/scale_out.py hears of them, and acts.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from .messages import DialBackReply, LinkReading


class NewLinks:
    """A joiner's links of one plan. `ways`: each neighbour's addresses; `peers`: to whom a link is open already."""

    def __init__(self, ways: Mapping[str, tuple[str, ...]], peers: Set[str]) -> None:
        # Why each failed; "": not yet.
        self.ways = {peer: dict.fromkeys(each, "") for peer, each in ways.items()}
        self.open = {peer: peer in peers for peer in ways}
        self.measured: dict[str, LinkReading] = {}
        self.dialled_back: dict[str, DialBackReply] = {}

    def opened(self, peer: str) -> None:
        """The link to `peer` is open."""
        self.open[peer] = True

    def closed(self, peer: str) -> list[str]:
        """The link to `peer` has closed. Returns: where to dial it again."""
        self.open[peer] = False
        self.measured.pop(peer, None)
        self.dialled_back.pop(peer, None)
        self.ways[peer] = dict.fromkeys(self.ways[peer], "")
        return [*self.ways[peer]]

    def dial_failed(self, address: str, reason: str) -> None:
        """Nobody answers at `address`."""
        for tries in self.ways.values():
            if address in tries:
                tries[address] = reason

    def measure(self, peer: str, reading: LinkReading) -> None:
        """The rate of the link to `peer` is known."""
        self.measured[peer] = reading

    def reply(self, peer: str, reply: DialBackReply) -> None:
        """`peer` has tried to dial us."""
        self.dialled_back[peer] = reply

    def failed(self, peer: str) -> str:
        """Why there will be no link to `peer`; "" if there is one, or may yet be."""
        tries = self.ways[peer]
        return "; ".join(f"{way}: {why}" for way, why in tries.items())[:2000] if all(tries.values()) else ""

    @property
    def are_settled(self) -> bool:
        """Is everything known of the links that can be?"""
        return all(self._is_settled(peer) for peer in self.open)

    def _is_settled(self, peer: str) -> bool:
        if not self.open[peer]:
            return bool(self.failed(peer)) or not self.ways[peer]
        return peer in self.measured and (peer in self.dialled_back or self._reached)

    @property
    def _reached(self) -> bool:
        return any(reply.reached for reply in self.dialled_back.values())

    @property
    def are_one_sided(self) -> bool:
        """Has every neighbour that we link to tried in vain to dial us?"""
        asked = {peer for peer, is_open in self.open.items() if is_open}
        return asked <= set(self.dialled_back) and not self._reached

    @property
    def readings(self) -> dict[str, LinkReading]:
        """What is known of the open links."""
        return {
            peer: self.measured.get(peer, LinkReading()) for peer, is_open in self.open.items() if is_open
        }

    @property
    def failures(self) -> dict[str, str]:
        """Why the others are not open."""
        return {peer: self.failed(peer) or "no answer" for peer, is_open in self.open.items() if not is_open}
