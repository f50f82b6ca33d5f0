"""Which keys may connect, and how all members come to know.

Public keys are strings (`messages.Key`). What a node knows of them only ever grows: keys that are allowed, keys
that are revoked (which outweighs all else, for ever), invites, and the key that each used invite has let in. So
two nodes' knowledge can be merged in any order and any number of times, with one result: news is flooded, and who
opens a link to another member tells it everything. No scheduler is needed for that, and none can lose it.

Only who is let in by an invite must be decided once: the scheduler does. If a partition or a lost flood lets two
schedulers decide differently, the lower of the two keys stays in `used`, on every node that has heard of both. If the
other's holder has linked to a member by then, its key is among those allowed, and stays, too.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from .effects import Effect, KeysChanged, Out
from .messages import EVERYONE, MAX_KEYS, Answer, Introduction, KeyCommand, KeyringNews
from .relay import Relay

MAX_INVITES = 1024  # Remembered, whether open or expired; those that expire first are forgotten first.
OVER_S = 1e-3  # The rest of its time that is sent for an expired invite: almost none.
MAX_INVITE_S = 7 * 24 * 3600.0
ASK_FOR_ANOTHER = "ask a member for another (chaosnet invite)"


class KeyVerdict(enum.Enum):
    """On a key that somebody has proved to hold."""

    MEMBER = "allowed"
    INVITED = "open invite"
    USED = "used invite"
    EXPIRED = "expired invite"
    REVOKED = "revoked key"
    UNKNOWN = "unknown key"


class Keyring:
    """What one node knows of keys.

    Args:
        own: This node's key.
        given: Keys that its user allows; all members learn them, as they learn `own`.
        named: Keys in the addresses that its user wants to join. Nobody is told of them; but their holders, to whom a
            link is opened, tell of their own.
    """

    def __init__(self, own: str, given: Iterable[str] = (), named: Iterable[str] = ()) -> None:
        self.own = own
        self.named = frozenset(named)
        self.allowed = {own, *given}
        self.revoked: set[str] = set()
        self.used: dict[str, str] = {}  # Invite: the key that it has let in.
        self.invites: dict[str, float] = {}  # Until when they are good.
        self.admitted: set[str] = set()  # Values of `used`.

    def verdict(self, key: str, now_s: float) -> KeyVerdict:
        """Whether its holder may connect, and as what."""
        if key in self.revoked:
            return KeyVerdict.REVOKED
        if key in self.allowed or key in self.admitted or key in self.named:
            return KeyVerdict.MEMBER
        if key in self.used:
            return KeyVerdict.USED
        if key in self.invites:
            return KeyVerdict.INVITED if now_s < self.invites[key] else KeyVerdict.EXPIRED
        return KeyVerdict.UNKNOWN

    def all_known(self, now_s: float) -> KeyringNews:
        """Everything, for a member that may know nothing of it."""
        return KeyringNews(
            allowed=tuple(sorted(self.allowed)),
            revoked=tuple(sorted(self.revoked)),
            used=tuple(sorted(self.used.items())),
            # Also those that are over: whoever was told of them late, by a node that had slept, takes them for open.
            invites=tuple((key, max(at_s - now_s, OVER_S)) for key, at_s in sorted(self.invites.items())),
            whole=True,
        )

    def merge(self, news: KeyringNews, now_s: float) -> KeyringNews | None:
        """Take over what is new in `news`. Returns: just that, to be passed on; None if nothing was."""
        allowed, revoked = _add(self.allowed, news.allowed), _add(self.revoked, news.revoked)
        used = [(invite, key) for invite, key in news.used if self._use(invite, key)]
        invites = [
            (invite, left_s) for invite, left_s in news.invites if self._invite(invite, now_s + left_s)
        ]
        if not (allowed or revoked or used or invites):
            return None
        return KeyringNews(
            allowed=tuple(allowed), revoked=tuple(revoked), used=tuple(used), invites=tuple(invites)
        )

    def admit(self, invite: str, key: str, now_s: float) -> str:
        """The scheduler's decision to let `key` in for `invite`: "" for yes, else why not."""
        if self.used.get(invite) == key and key not in self.revoked:
            return ""  # Asked again.
        match self.verdict(invite, now_s):
            case KeyVerdict.INVITED if key in self.revoked:
                return "the key that it introduces was revoked; make a new one (chaosnet keygen)"
            case KeyVerdict.INVITED:
                self._use(invite, key)
                return (
                    "" if invite in self.used else f"{MAX_KEYS} invites have been used, and no more are kept"
                )
            case KeyVerdict.USED:
                return f"this invite was used already; {ASK_FOR_ANOTHER}"
            case KeyVerdict.EXPIRED:
                return f"this invite has expired; {ASK_FOR_ANOTHER}"
        return f"the cluster does not know this invite; {ASK_FOR_ANOTHER}"

    def _use(self, invite: str, key: str) -> bool:
        before = self.used.get(invite)
        if before is None and len(self.used) >= MAX_KEYS:
            return False
        self.used[invite] = key if before is None else min(before, key)
        self.admitted = set(self.used.values()) if before else {*self.admitted, key}
        return self.used[invite] != before

    def _invite(self, invite: str, until_s: float) -> bool:
        """Returns: is it new? One that is known may end earlier than was said, never later."""
        known = self.invites.get(invite)
        self.invites[invite] = until_s if known is None else min(known, until_s)
        if len(self.invites) > MAX_INVITES:
            del self.invites[min(self.invites, key=self.invites.__getitem__)]
        return known is None and invite in self.invites


def _add(known: set[str], told: Iterable[str]) -> list[str]:
    """Add what is new to `known`, as far as there is room. Returns: just that."""
    fresh = [key for key in told if key not in known][: max(0, MAX_KEYS - len(known))]
    known.update(fresh)
    return fresh


class KeyKeeper:
    """Keeps node `me`'s keyring and those of the others alike. `keyring` None: this cluster uses no keys."""

    def __init__(self, me: str, keyring: Keyring | None, relay: Relay) -> None:
        self.me, self.keyring, self.relay = me, keyring, relay

    def opened(self, peer: str, now_s: float) -> list[Effect]:
        """A link to another node can be used."""
        return self.relay.send(peer, self.keyring.all_known(now_s)) if self.keyring else []

    def handle(
        self, message: KeyringNews | KeyCommand | Introduction, now_s: float, scheduling: bool
    ) -> list[Effect]:
        """One message. `scheduling`: this node is the scheduler, who alone decides on introductions."""
        match message:
            case KeyringNews():
                return self._merge(message, now_s, tell=message.whole)
            case KeyCommand():
                return self._obey(message, now_s)
            case Introduction() if scheduling:
                return self._introduced(message, now_s)
        return []

    def _merge(self, news: KeyringNews, now_s: float, tell: bool = True) -> list[Effect]:
        """News is told before connections close for it, so whom it concerns hears it, too."""
        fresh = self.keyring.merge(news, now_s) if self.keyring else None
        if self.keyring is None or fresh is None:
            return []
        told = self.relay.send(EVERYONE, fresh) if tell else []
        if self.keyring.own in fresh.revoked:
            return [*told, Out("its key was revoked", final=True)]
        return [*told, KeysChanged()] if fresh.revoked or fresh.used else told

    def _obey(self, command: KeyCommand, now_s: float) -> list[Effect]:
        if self.keyring is None:
            return self._answer(command.asker, False, "this cluster uses no keys (see docs/security.md)")
        match command.verb:
            case "allow" if command.key in self.keyring.revoked:
                text = "this key was revoked, which is for ever; make a new one (chaosnet keygen)"
                return self._answer(command.asker, False, text)
            case "allow":
                news, text = KeyringNews(allowed=(command.key,)), "this key may connect to every member"
            case "revoke":
                news, text = KeyringNews(revoked=(command.key,)), "this key is shut out for good"
            case "invite":
                seconds = min(max(command.seconds, 1.0), MAX_INVITE_S)
                news = KeyringNews(invites=((command.key, seconds),))
                text = f"good for one node, for {seconds / 60:g} minutes"
        # Whoever asks to revoke its own key is told before it is shut out.
        return self._answer(command.asker, True, text) + self._merge(news, now_s)

    def _introduced(self, message: Introduction, now_s: float) -> list[Effect]:
        if self.keyring is None:
            return self._answer(message.asker, False, "this cluster uses no keys: join without an invite")
        reason = self.keyring.admit(message.invite, message.key, now_s)
        if reason:
            return self._answer(message.asker, False, reason)
        # To all first: on the way to the asker, every node hears it before it passes the answer on.
        told = self.relay.send(EVERYONE, KeyringNews(used=((message.invite, message.key),)))
        return [*told, *self._answer(message.asker, True, "welcome")]

    def _answer(self, asker: str, ok: bool, text: str) -> list[Effect]:
        return self.relay.send(asker, Answer(ok=ok, text=text))
