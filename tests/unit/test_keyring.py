"""`chaosnet.protocols.keyring`: whose key may connect, and that all members agree on it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosnet.protocols.effects import Effect, KeysChanged, Out, Transmit
from chaosnet.protocols.keyring import MAX_INVITES, KeyKeeper, Keyring, KeyVerdict
from chaosnet.protocols.messages import Answer, Envelope, Introduction, KeyCommand, KeyringNews
from chaosnet.protocols.relay import Relay

OWN, B, C, D, INVITE, OTHER = (51 * letter + "a" for letter in "abcdef")
MINUTES_10 = 600.0


def with_invite(until_s: float = MINUTES_10) -> Keyring:
    ring = Keyring(OWN)
    ring.merge(KeyringNews(invites=((INVITE, until_s),)), now_s=0.0)
    return ring


# --- who may connect ---


def test_a_key_is_unknown_until_it_is_allowed_and_never_again_once_it_is_revoked():
    ring = Keyring(OWN, given=[B])
    assert [ring.verdict(key, 0.0) for key in (OWN, B, C)] == [
        KeyVerdict.MEMBER,
        KeyVerdict.MEMBER,
        KeyVerdict.UNKNOWN,
    ]
    ring.merge(KeyringNews(allowed=(C,)), 0.0)
    assert ring.verdict(C, 0.0) is KeyVerdict.MEMBER
    ring.merge(KeyringNews(revoked=(C,)), 0.0)
    ring.merge(KeyringNews(allowed=(C,)), 0.0)
    assert ring.verdict(C, 0.0) is KeyVerdict.REVOKED


def test_what_is_no_key_is_unknown():
    assert Keyring(OWN).verdict("", 0.0) is KeyVerdict.UNKNOWN


def test_the_keys_of_the_addresses_to_join_are_trusted_here_and_told_to_nobody():
    ring = Keyring(OWN, named=[B])
    assert ring.verdict(B, 0.0) is KeyVerdict.MEMBER
    assert ring.all_known(0.0).allowed == (OWN,)
    ring.merge(KeyringNews(revoked=(B,)), 0.0)
    assert ring.verdict(B, 0.0) is KeyVerdict.REVOKED


# --- invites ---


def test_an_invite_expires():
    ring = with_invite(until_s=60.0)
    assert ring.verdict(INVITE, 59.9) is KeyVerdict.INVITED
    assert ring.verdict(INVITE, 60.0) is KeyVerdict.EXPIRED
    assert "has expired" in ring.admit(INVITE, B, 60.0)
    assert ring.verdict(B, 60.0) is KeyVerdict.UNKNOWN


def test_an_invite_that_is_heard_of_again_lives_no_longer():
    ring = with_invite(until_s=60.0)
    ring.merge(KeyringNews(invites=((INVITE, 60.0),)), now_s=50.0)
    assert ring.verdict(INVITE, 60.0) is KeyVerdict.EXPIRED
    other = Keyring(B)
    other.merge(ring.all_known(60.0), now_s=60.0)
    assert other.verdict(INVITE, 60.1) is KeyVerdict.EXPIRED, "who is told of it any more has no use for it"


def test_an_invite_lets_one_key_in_and_the_second_hears_why_not():
    ring = with_invite()
    assert ring.admit(INVITE, B, 1.0) == ""
    assert ring.admit(INVITE, B, 2.0) == "", "asked again"
    assert "was used already" in ring.admit(INVITE, C, 3.0)
    assert ring.verdict(B, 3.0) is KeyVerdict.MEMBER
    assert [ring.verdict(key, 3.0) for key in (C, INVITE)] == [KeyVerdict.UNKNOWN, KeyVerdict.USED]


def test_an_invite_that_nobody_made_or_that_was_revoked_lets_nobody_in():
    ring = with_invite()
    assert "does not know this invite" in ring.admit(OTHER, B, 0.0)
    ring.merge(KeyringNews(revoked=(INVITE,)), 0.0)
    assert "does not know this invite" in ring.admit(INVITE, B, 0.0)
    assert ring.verdict(B, 0.0) is KeyVerdict.UNKNOWN


def test_an_invite_does_not_bring_a_revoked_key_back():
    ring = with_invite()
    ring.merge(KeyringNews(revoked=(B,)), 0.0)
    assert "was revoked" in ring.admit(INVITE, B, 0.0)
    assert ring.verdict(INVITE, 0.0) is KeyVerdict.INVITED, "and it is not used up"


def test_an_invite_used_on_both_sides_of_a_partition_lets_the_same_one_in_on_both():
    here, there = with_invite(), with_invite()
    assert here.admit(INVITE, C, 1.0) == "" == there.admit(INVITE, B, 1.0)
    told_here, told_there = here.all_known(2.0), there.all_known(2.0)
    assert here.merge(told_there, 2.0) is not None
    there.merge(told_here, 2.0)
    for ring in (here, there):
        assert [ring.verdict(key, 2.0) for key in (B, C)] == [KeyVerdict.MEMBER, KeyVerdict.UNKNOWN]


def test_an_expired_invite_is_over_also_for_who_heard_of_it_from_one_that_had_slept():
    member, slept, late = Keyring(OWN), Keyring(OWN), Keyring(B)
    news = KeyringNews(invites=((INVITE, 50.0),))
    member.merge(news, 0.0)
    slept.merge(news, 3600.0)  # What it was told before it slept, read afterwards.
    late.merge(slept.all_known(3601.0), 3601.0)
    assert late.verdict(INVITE, 3602.0) is KeyVerdict.INVITED
    late.merge(member.all_known(3602.0), 3602.0)
    assert late.verdict(INVITE, 3603.0) is KeyVerdict.EXPIRED


def test_invites_are_bounded_in_number_and_those_that_expire_first_go_first():
    ring = Keyring(OWN)
    keys = [f"{index:04d}".translate(str.maketrans("0123456789", "abcdefghij")) + 47 * "q" + "a" for index in
            range(MAX_INVITES + 10)]  # fmt: skip
    for index, key in enumerate(keys):
        ring.merge(KeyringNews(invites=((key, 10.0 + index),)), 0.0)
    assert len(ring.invites) == MAX_INVITES
    assert (
        ring.verdict(keys[0], 0.0) is KeyVerdict.UNKNOWN and ring.verdict(keys[-1], 0.0) is KeyVerdict.INVITED
    )


# --- agreement ---

keys = st.sampled_from([B, C, D])
invites = st.sampled_from([INVITE, OTHER])
news = st.builds(
    KeyringNews,
    allowed=st.lists(keys, max_size=2).map(tuple),
    revoked=st.lists(keys, max_size=1).map(tuple),
    used=st.lists(st.tuples(invites, keys), max_size=2).map(tuple),
    invites=st.lists(st.tuples(invites, st.sampled_from([5.0, 9.0])), max_size=2).map(tuple),
)


@given(st.lists(news, max_size=5), st.randoms())
def test_all_who_have_heard_the_same_think_the_same_in_whatever_order_and_however_often(told, rng):
    one, other = Keyring(OWN), Keyring(OWN)
    shuffled = told + [rng.choice(told) for _ in told]
    rng.shuffle(shuffled)
    for each in told:
        one.merge(each, 0.0)
    for each in shuffled:
        other.merge(each, 0.0)
    assert one.all_known(0.0) == other.all_known(0.0)
    for key in (OWN, B, C, D, INVITE, OTHER):
        assert one.verdict(key, 1.0) is other.verdict(key, 1.0)
    assert one.merge(other.all_known(0.0), 0.0) is None, "nothing is left to tell"


class Members:
    """Keepers on a full mesh; `cut` nodes hear nothing until they meet somebody again."""

    def __init__(self, *names: str) -> None:
        self.rings = {name: Keyring(51 * name + "a") for name in names}
        relays = {name: Relay(name, 0) for name in names}
        self.keepers = {name: KeyKeeper(name, self.rings[name], relays[name]) for name in names}
        self.cut: set[str] = set()
        self.asides: list[tuple[str, Effect]] = []  # What is not a message between members.
        self.scheduler = names[0]
        self.sent = 0
        for a, b in itertools.permutations(names, 2):
            relays[a].opened(b, client=False)
        for a, b in itertools.permutations(names, 2):
            self.meet(a, b)

    def meet(self, a: str, b: str) -> None:
        self.perform(a, self.keepers[a].opened(b, 0.0))

    def do(self, name: str, message: KeyCommand | Introduction) -> None:
        self.perform(name, self.keepers[name].handle(message, 0.0, name == self.scheduler))

    def perform(self, name: str, effects: list[Effect]) -> None:
        for effect in effects:
            if not isinstance(effect, Transmit):
                self.asides.append((name, effect))
            elif effect.peer in self.rings and not self.cut & {name, effect.peer}:
                assert isinstance(effect.message, Envelope)
                self.deliver(effect.peer, name, effect.message)

    def deliver(self, name: str, peer: str, envelope: Envelope) -> None:
        self.sent += 1
        ours, passed_on = self.keepers[name].relay.receive(peer, envelope)
        self.perform(name, passed_on)
        if ours:
            body = envelope.body
            if isinstance(body, KeyringNews | KeyCommand | Introduction):
                self.perform(name, self.keepers[name].handle(body, 0.0, name == self.scheduler))

    def agree(self) -> bool:
        return len({ring.all_known(0.0) for ring in self.rings.values()}) == 1


def test_members_that_meet_tell_each_other_of_all_keys():
    assert Members("a", "b", "c").agree()


def test_what_is_told_to_one_is_known_to_all_and_to_who_was_away_when_he_meets_anybody():
    members = Members("a", "b", "c", "d")
    members.cut = {"d"}
    members.do("b", KeyCommand(verb="allow", key=OTHER, asker="cli"))
    assert [members.rings[name].verdict(OTHER, 0.0) for name in "abcd"] == 3 * [KeyVerdict.MEMBER] + [
        KeyVerdict.UNKNOWN
    ]
    members.cut = set()
    members.meet("c", "d")
    assert members.agree() and members.rings["d"].verdict(OTHER, 0.0) is KeyVerdict.MEMBER


def test_only_the_scheduler_decides_on_an_introduction_and_all_hear_of_it():
    members = Members("a", "b", "c")
    members.do("b", KeyCommand(verb="invite", key=INVITE, asker="cli", seconds=60.0))
    members.do("c", Introduction(invite=INVITE, key=OTHER, asker="guest"))
    assert members.rings["c"].verdict(OTHER, 0.0) is KeyVerdict.UNKNOWN
    members.do("a", Introduction(invite=INVITE, key=OTHER, asker="guest"))
    assert members.agree() and members.rings["c"].verdict(OTHER, 0.0) is KeyVerdict.MEMBER


def test_a_new_scheduler_knows_which_invites_are_used():
    members = Members("a", "b")
    members.do("a", KeyCommand(verb="invite", key=INVITE, asker="cli", seconds=60.0))
    members.do("a", Introduction(invite=INVITE, key=OTHER, asker="guest"))
    members.scheduler = "b"
    assert "was used already" in members.rings["b"].admit(INVITE, D, 1.0)


def test_who_is_revoked_is_told_and_goes_and_the_others_close_its_connections():
    members = Members("a", "b", "c")
    members.do("a", KeyCommand(verb="revoke", key=members.rings["c"].own, asker="cli"))
    assert ("c", Out("its key was revoked", final=True)) in members.asides
    assert [name for name, effect in members.asides if effect == KeysChanged()] == ["b", "a"]


def test_news_crosses_each_link_a_few_times_and_not_for_ever():
    members = Members("a", "b", "c", "d")
    members.keepers["a"].relay.opened("cli", client=True)
    members.sent = 0
    members.do("a", KeyCommand(verb="allow", key=OTHER, asker="cli"))
    assert members.sent <= 3 + 3 * 2, "one flood of a mesh of four"


@pytest.mark.parametrize("verb", ["allow", "revoke", "invite"])
def test_a_cluster_without_keys_says_so(verb):
    keeper = KeyKeeper("a", None, relay := Relay("a", 0))
    relay.opened("cli", client=True)
    [sent] = keeper.handle(KeyCommand(verb=verb, key=B, asker="cli"), 0.0, scheduling=True)
    assert isinstance(sent, Transmit) and isinstance(sent.message, Envelope)
    assert isinstance(sent.message.body, Answer) and "uses no keys" in sent.message.body.text


def test_a_revoked_key_cannot_be_allowed_again_and_the_asker_hears_it():
    ring = Keyring(OWN)
    keeper = KeyKeeper("a", ring, relay := Relay("a", 0))
    relay.opened("cli", client=True)
    keeper.handle(KeyCommand(verb="revoke", key=B, asker="cli"), 0.0, scheduling=True)
    [sent] = keeper.handle(KeyCommand(verb="allow", key=B, asker="cli"), 0.0, scheduling=True)
    assert "was revoked" in sent.message.body.text and not sent.message.body.ok
    assert ring.verdict(B, 0.0) is KeyVerdict.REVOKED
