"""A connection broke: has the process at its other end died, or only the way to it?

An exact half of the members may go on without the others only if these have died (overlay.py), so a broken tunnel, or
a router that forgot the connection, must not pass for a death. The machine of a dead process refuses connections
where the process had listened. So it is looked there at once, and only a refusal, at an address where that peer has
answered us before, is a proof; and only if it listens there itself (an end of a tunnel on our machine refuses when
the tunnel ends), and only as long as the peer cannot have gone on without us before it died. It may have done so
before this connection opened. So the first message of every node says in which view it acts; if a peer dies before
that has come, its death proves nothing.

How long that is certain depends on what makes a peer go on without us: our farewell, which we know of; silence; or
the break of the connection, as its end sees it.

- With other members around, their doubts shorten a peer's patience, and a break may end it. A refusal proves
  something if it comes within `PROOF_S`, over a connection by which the peer spoke a moment ago
  (`Liveness.spoke_lately`).
- Of two members, neither goes on without the other, neither for silence nor because the connection broke, earlier
  than `PAIR_PATIENCE_S` after it last heard of it. It heard us after we had sent the last Ping that it has answered.
  So a refusal is a proof until `PAIR_PROOF_S` after that, whatever happened between: the peer may have been silent,
  stopped, or cut off, and the connection may have broken earlier than it died (`Liveness.proof_until_s`). A peer that
  was stopped and goes on gives us its whole patience anew. What is less than a whole patience pays for clocks that
  drift.

Who of two sees a break and gets no refusal therefore waits for the rest of its patience (`hold_until_s`), and looks
again and again: the other may have died a moment later, or be there and open another connection.
"""

from __future__ import annotations

from dataclasses import dataclass

from .addresses import AddressBook
from .effects import CheckReach, Dial, Effect
from .events import NotReached, Reached

PROOF_S = 0.1  # Who has not refused by then may live. Of two members, it is looked so often.


@dataclass(slots=True)
class _Look:
    """For a peer whose connection broke."""

    address: str  # "": there is none where it has answered, so there can be no proof.
    life: int
    proof_until_s: float  # A refusal is a proof.
    until_s: float  # Then it may live, and its link is lost.
    holds: bool  # Whatever is found there, it is looked again until then.
    again_at_s: float


class Deaths:
    """Peers whose connections broke a moment ago."""

    def __init__(self, book: AddressBook) -> None:
        self.book = book
        self.looking: dict[str, _Look] = {}
        # Peers that have said, over the open connection, in which view they act, and in which life they live.
        self.placed: dict[str, int] = {}

    @property
    def wake_at_s(self) -> float | None:
        return min((min(look.until_s, look.again_at_s) for look in self.looking.values()), default=None)

    def closed(
        self,
        peer: str,
        broke: bool,
        now_s: float,
        proof_until_s: float | None = None,
        hold_until_s: float = 0.0,
        is_its_own: bool = True,
    ) -> list[Effect]:
        """A connection is gone. If it broke, look for the peer where it had answered (it is in `looking` then).

        Otherwise the link is lost. `is_its_own`: the peer listens at that address itself.
        """
        address, life = self.book.answered.get(peer, ""), self.placed.pop(peer, None)
        proof_until_s = now_s + PROOF_S if proof_until_s is None else proof_until_s
        if not is_its_own:
            proof_until_s = float("-inf")
        may_prove = bool(address) and life is not None and now_s < proof_until_s
        holds = now_s < hold_until_s
        if not broke or not (may_prove or holds):
            return []
        until_s = max(proof_until_s if may_prove else now_s, hold_until_s)
        look = _Look(
            address if life is not None else "", life or 0, proof_until_s, until_s, holds, now_s + PROOF_S
        )
        self.looking[peer] = look
        return [CheckReach(look.address)] if look.address else []

    def opened(self, peer: str) -> None:
        """A connection to the peer is open again."""
        self.looking.pop(peer, None)

    def said_where(self, peer: str, life: int) -> None:
        """The peer itself has told us of a link, and so of the view that it acts in."""
        self.placed[peer] = life

    def handle(self, event: Reached | NotReached, now_s: float) -> dict[str, int | None]:
        """An address was tried.

        Returns: by peer that this decides about, the life that has died; None: it may live.
        """
        found: dict[str, int | None] = {}
        for peer, look in self.looking.items():
            if look.address != event.address:
                continue
            refused = isinstance(event, NotReached) and event.refused
            if refused and now_s <= look.proof_until_s:
                found[peer] = look.life
            elif not look.holds:
                found[peer] = None
        for peer in found:
            del self.looking[peer]
        return found

    def look_again(self, now_s: float) -> list[Effect]:
        """Try addresses again: peers there may have died since, or be ready for another connection."""
        effects: list[Effect] = []
        for look in self.looking.values():
            if now_s >= look.again_at_s:
                look.again_at_s = now_s + PROOF_S if look.holds else look.until_s
                effects += (
                    [CheckReach(look.address), Dial(look.address)] if look.holds and look.address else []
                )
        return effects

    def overdue(self, now_s: float) -> list[str]:
        """Peers about which nothing was found out in time: they may live."""
        found = [peer for peer, look in self.looking.items() if now_s >= look.until_s]
        for peer in found:
            del self.looking[peer]
        return found
