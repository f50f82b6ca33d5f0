"""`chaosnet.protocols.codec`: what is on the wire, byte for byte, and what foreign bytes can do (nothing).

The bytes of one message of each type are kept in tests/traces/wire/, so a change of format shows in review.
Rewrite them with CHAOSNET_REWRITE_TRACES=1, and commit the difference only if you can explain it.
"""

import os
import subprocess
import sys
import typing
from pathlib import Path

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chaosnet.errors import MalformedMessage, VersionMismatch
from chaosnet.protocols import messages as m
from chaosnet.protocols.codec import MAGIC, MAX_MESSAGE_BYTES, decode, encode

WIRE = Path(__file__).parent.parent / "traces" / "wire"
REWRITE = os.environ.get("CHAOSNET_REWRITE_TRACES") == "1"

A = m.Member(id="a", addresses=("10.0.0.1:5555",), joined_step=0, life=3)
B = m.Member(id="b", joined_step=41, life=4)
J = m.Member(id="j", addresses=("10.0.0.3:5555",), joined_step=57, life=5)
VIEW = m.View(
    term=2,
    seq=9,
    scheduler="a",
    members=(A, B),
    observers=(J,),
    links=(("a", "b"), ("a", "j")),
    trees=(m.Tree(root="a", parent={"b": "a", "j": "a"}, share=1.0),),
    joining=(m.Entering(node="j", sources=("a",)),),
)
CHANGE = m.ViewChange(
    base=(2, 9),
    term=2,
    seq=10,
    scheduler="a",
    members=(J,),
    gone=("b",),
    links=(("a", "c"),),
    links_gone=(("a", "b"),),
    trees=(m.TreeChange(root="a", share=1.0, parent={"c": "a"}, gone=("b",)),),
)
KEY, OTHER_KEY, INVITE = (51 * letter + "a" for letter in "abc")
BOTH = m.Electorate(key=(2, 8), members=("a", "b"))
BROUGHT = m.Contribution(
    weight=16.0,
    ranges=((0, 8), (24, 32)),
    shares={"a": 8},
    metrics={"loss": (1.5, 16.0)},
    present=b"\x07",
    dataset=60000,
    evaluation=10000,
    evaluates={"a": 64},
    evaluated=((128, 192),),
)
COMMIT = m.Commit(key=(2, 9), step=57, switch=(2, 10), total=BROUGHT)

ROUTED = [
    m.ScaleOutRequest(
        node="j", life=5, addresses=("10.0.0.3:5555",), neighbors=("a",), linked=("b",), digest="c0ffee"
    ),
    m.ScaleOutRefused(reason="the model differs", spec=b"spec"),
    m.Outlived(life=7, later=9),
    m.NegotiationPlan(neighbors=(A, B)),
    m.NeighborsReady(
        node="j",
        addresses=("10.0.0.3:5555",),
        links={"a": m.LinkReading(rate_bps=1e8, rate_age_s=0.5, rate_source="probe")},
        failed={"b": "refused"},
    ),
    m.ReplicationPlan(view=VIEW, step=57, flushed=(2, 1), shard_bytes=65536, shards_by_source={"a": 12}),
    m.ScaleOutReady(node="j"),
    m.ScaleInRequest(node="b"),
    m.ConnectLinkRequest(a="a", b="10.0.0.3:5555", asker="client"),
    m.DisconnectLinkRequest(a="a", b="b", asker="client"),
    m.Answer(ok=False, text="no such member"),
    m.LeaveCommand(asker="client"),
    m.GoOnCommand(asker="client"),
    m.RelayoutCommand(asker="client", layout="2+2"),
    m.DeclaredDead(lives=(("a", 3),)),
    m.Prepare(view=CHANGE),
    m.PrepareFailed(key=(2, 10), node="b", link=("a", "b"), reason="connection refused"),
    m.LinkNews(reporter="a", peer="b", version=12, state="silent", key=(2, 9), life=3, peer_life=4),
    m.Farewell(node="b", life=4, key=(2, 9), reason="ValueError: 7", ranges=((8, 16),), error=True),
    m.AbortRequest(node="b", key=(2, 9), step=57, reason="lost the link a - b"),
    m.Flush(term=2, number=1, scheduler="a", key=(2, 9), step=57),
    m.FlushOk(
        term=2,
        number=1,
        node="b",
        key=(2, 9),
        step=58,
        view=VIEW,
        priors=(BOTH,),
        commit=COMMIT,
        deal=(("a", 8),),
    ),
    m.Install(
        term=2, number=1, view=VIEW, priors=(BOTH,), step=58, deal=(("a", 8),), holder="b", commit=COMMIT
    ),
    m.Expelled(node="b", reason="the cluster went on without it", key=(3, 9)),
    m.VoteRequest(term=3, candidate="b", key=(2, 9), trial=True),
    m.VoteReply(term=3, voter="a", granted=True, trial=True),
    m.Report(node="a", step=57, readings={"b": m.LinkReading(rtt_min_s=0.002)}, counters={"dropped": 1}),
    m.Echo(node="a", asked_s=12.5),
    m.EchoReply(node="b", asked_s=12.5),
    m.KeyringNews(
        allowed=(KEY,), revoked=(OTHER_KEY,), used=((INVITE, KEY),), invites=((INVITE, 600.0),), whole=True
    ),
    m.KeyCommand(verb="invite", key=INVITE, asker="client", seconds=600.0),
    m.Introduction(invite=INVITE, key=KEY, asker="invite-cccc"),
    m.Notice(kind="joined", node="j", detail="now 3 members", step=58, time_s=1.75e9, handling_ms=0.25),
    m.StatusRequest(asker="client"),
    m.StatusReply(status=b"{}"),
]
LINK_LOCAL = [
    m.Envelope(source="j", target=m.EVERYONE, serial=7, body=m.ScaleOutReady(node="j")),
    m.Hello(node="a", address="10.0.0.1:5555", incarnation="0011223344556677", cluster="lab"),
    m.Bye(reason="the link was disconnected"),
    m.Lend(descriptor=17),
    m.Mapped(),
    m.Laid(header=b"CN", first=3, size=1 << 20),
    m.Losses(
        news=(m.LinkNews(reporter="a", peer="b", version=12, state="closed", peer_life=4),),
        left=(("c", 3, (2, 9), True),),
    ),
    m.Ping(sent_s=12.5, stall_s=0.25),
    m.Pong(sent_s=12.5),
    m.Up(key=(2, 9), step=57, chunk=3, weight=16.0),
    m.Down(key=(2, 9), step=57, chunk=3, weight=48.0),
    m.Ready(key=(2, 9), step=57, vote=(2, 10), contribution=BROUGHT),
    m.Tensor(
        key=(2, 9),
        step=57,
        target="c",
        way="g",
        micro_batch=3,
        layer=4,
        part=1,
        parts=2,
        rows=(("float32", (4, 64)),),
    ),
    COMMIT,
    m.ManifestRequest(step=57),
    m.NoSnapshot(step=57),
    m.ManifestReply(step=57, digest=b"\x01\x02"),
    m.ShardRequest(step=57, start=0, stop=65536),
    m.Shard(step=57, start=0, stop=65536, digest=b"\x01\x02"),
    m.Have(step=57, pieces=b"\x05"),
    m.ReplicationDone(step=57),
    m.DialBack(addresses=("10.0.0.3:5555", "192.168.1.3:5555")),
    m.DialBackReply(reached="10.0.0.3:5555"),
    m.ProbeRequest(kind="in-band"),
    m.Iperf3Ready(port=5201),
    m.Probe(index=0, count=8),
    m.ProbeResult(rate_bps=1e8),
]
ON_THE_WIRE = LINK_LOCAL + [m.Envelope(source="a", target="b", serial=1, body=body) for body in ROUTED]


def name_of(message):
    return type(message.body if isinstance(message, m.Envelope) else message).__name__


def test_every_type_of_message_is_compared_below():
    link_local = {kind.__name__ for kind in typing.get_args(m.WireMessage)}
    routed = {kind.__name__ for kind in typing.get_args(m.Routed)}
    assert {type(message).__name__ for message in LINK_LOCAL} == link_local
    assert {type(message).__name__ for message in ROUTED} == routed


@pytest.mark.parametrize("message", [*LINK_LOCAL[1:], *ROUTED], ids=lambda each: type(each).__name__)
def test_the_encoding_is_what_it_was(message):
    name = type(message).__name__
    if message in ROUTED:
        message = m.Envelope(source="a", target="b", serial=1, body=message)
    kept = WIRE / f"{name}.hex"
    frame = encode(message)
    if REWRITE:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(f"{frame.hex()}\n")
    assert frame.hex() == kept.read_text().strip(), f"{name} changed on the wire (see the top of this file)"
    assert decode(frame) == message


def test_no_kept_encoding_is_left_over():
    assert {path.stem for path in WIRE.glob("*.hex")} == {name_of(each) for each in ON_THE_WIRE} - {
        "Envelope"
    }


@pytest.mark.parametrize("message", ON_THE_WIRE, ids=name_of)
def test_decoding_gives_back_what_was_encoded(message):
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


def test_another_version_is_told_apart_from_rubbish():
    frame = bytearray(encode(m.Bye()))
    frame[2] = 99
    with pytest.raises(VersionMismatch, match="the peer speaks chaosnet protocol version 99"):
        decode(bytes(frame))


@pytest.mark.parametrize("frame", [b"", b"C", b"CN", b"GET / HTTP/1.1\r\n", b"\x00" * 64])
def test_foreign_frames_are_malformed(frame):
    with pytest.raises(MalformedMessage):
        decode(frame)


def test_a_frame_that_is_too_large_is_not_even_parsed():
    with pytest.raises(MalformedMessage, match="at most"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))


def tampered(message, **fields):
    """The frame of `message` with fields of another type or out of bounds."""
    frame = encode(message)
    return frame[:3] + msgpack.packb(msgpack.unpackb(frame[3:]) | fields)


@pytest.mark.parametrize(
    "frame",
    [
        tampered(m.Up(key=(1, 1), step=1, chunk=1, weight=1.0), step=-1),
        tampered(m.Up(key=(1, 1), step=1, chunk=1, weight=1.0), weight=-1.0),
        tampered(m.Up(key=(1, 1), step=1, chunk=1, weight=1.0), key=[1]),
        tampered(m.Up(key=(1, 1), step=1, chunk=1, weight=1.0), chunk="1"),
        tampered(m.Hello(node="a", address="", incarnation=""), node=""),
        tampered(m.Hello(node="a", address="", incarnation=""), node="x" * 65),
        tampered(m.Probe(index=0, count=8), count=65),
        tampered(m.Bye(), reason="x" * 4001),
        tampered(m.Bye(), type="Nothing"),
        tampered(m.Bye(), type=["Bye"]),
        tampered(m.Envelope(source="a", target="b", serial=1, body=ROUTED[5]), body={"type": "Up"}),
    ],
)
def test_fields_out_of_bounds_are_malformed(frame):
    with pytest.raises(MalformedMessage):
        decode(frame)


def test_unknown_fields_of_a_newer_minor_version_are_ignored():
    assert decode(tampered(m.Bye(reason="x"), color="red")) == m.Bye(reason="x")


@given(st.binary(max_size=300))
@example(b"\x81\xa4type\xa3Bye")
@example(b"\xdd\xff\xff\xff\xff")  # An array of 4 billion.
def test_random_bytes_only_ever_raise_malformed_or_version_mismatch(body):
    for frame in (body, MAGIC + body, MAGIC + b"\x01" + body):
        try:
            message = decode(frame)
        except (MalformedMessage, VersionMismatch):
            continue
        assert decode(encode(message)) == message


@given(st.sampled_from(ON_THE_WIRE), st.data())
def test_damaged_frames_only_ever_raise_malformed_or_version_mismatch(message, data):
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut])):
        try:
            decode(damaged)
        except (MalformedMessage, VersionMismatch):
            continue


FIRST_USE = """
import sys, threading
from chaosnet.protocols import messages as m
from chaosnet.protocols.codec import decode, encode
sys.setswitchinterval(1e-6)
view = m.View(term=1, seq=1, scheduler="a", members=(m.Member(id="a"),), trees=(m.Tree(root="a", parent={}),))
frame = encode(m.Envelope(source="a", target="*", serial=1, body=m.Prepare(view=view)))
together = threading.Barrier(8)
threads = [threading.Thread(target=lambda: (together.wait(), decode(frame))) for _ in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""


def test_threads_that_decode_their_first_message_at_once_do_not_crash():
    """Each process can try it once. Without what the codec does when it is imported, some of six crash."""
    tries = [subprocess.Popen([sys.executable, "-c", FIRST_USE]) for _ in range(6)]
    assert [each.wait() for each in tries] == [0] * 6
