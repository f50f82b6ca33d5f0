"""`chaosnet.discovery.lan`, the pure part: what is announced, and who of those that are heard of is asked."""

import pytest

from chaosnet.discovery.lan import MAX_APART, MAX_HEARD, Acquaintance, Announced
from chaosnet.node.keys import KeyPair

MINE, THEIRS = (KeyPair.of(bytes([each]) * 32).public for each in (1, 2))


def announced(node, *places, key="", cluster="lab", id=""):
    return Announced(cluster, node, key, places, id)


def heard(announcement, port):
    """As another node finds it."""
    properties = {name.encode(): text.encode() for name, text in announcement.properties().items()}
    return Announced.heard(properties, [place.rpartition(":")[0] for place in announcement.places], port)


def test_an_announcement_says_the_name_the_node_its_public_key_and_where_it_listens():
    mine = Announced.of("lab", "n1", (f"{MINE}@10.0.0.2:81", f"{MINE}@172.17.0.1:81"))
    assert mine == announced("n1", "10.0.0.2:81", "172.17.0.1:81", key=MINE)
    assert mine.properties() == {"version": "1", "cluster": "lab", "node": "n1", "key": MINE}
    assert heard(mine, 81) == mine


def test_who_is_in_a_cluster_says_in_which():
    mine = announced("n1", "10.0.0.2:81", id="5eed")
    assert mine.properties()["id"] == "5eed" and heard(mine, 81) == mine


def test_people_hear_of_another_cluster_of_the_name_once():
    """As where two machines had been started while they did not hear each other: each trained by itself."""
    met = Acquaintance(announced("n1", "10.0.0.2:81", id="5eed"), ())
    assert met.meet(announced("n2", "10.0.0.3:82", id="5eed"))[1] == ""
    assert met.meet(announced("n3", "10.0.0.4:83"))[1] == ""
    told = met.meet(announced("n3", "10.0.0.4:83", id="0dd"))[1]
    assert told.startswith(
        "n3 at 10.0.0.4:83 says that it is in another cluster named 'lab': the two train apart"
    )
    assert met.meet(announced("n4", "10.0.0.5:84", id="0dd")) == (("10.0.0.5:84",), "")


def test_of_how_many_other_clusters_people_hear_is_bounded():
    """Anybody can announce some."""
    met = Acquaintance(announced("n1", "10.0.0.2:81", id="5eed"), ())
    told = [
        met.meet(announced(f"x{number}", "10.0.0.3:82", id=str(number)))[1] for number in range(MAX_APART + 3)
    ]
    assert sum(map(bool, told)) == MAX_APART


def test_a_name_that_takes_more_bytes_than_a_property_has_is_cut():
    told = heard(announced("\U0001f600" * 64, "10.0.0.2:81"), 81)
    assert told is not None and told.node == "\U0001f600" * 62
    assert len(f"node={told.node}".encode()) <= 255


@pytest.mark.parametrize(
    ("properties", "hosts", "port"),
    [
        ({}, ["10.0.0.2"], 81),
        ({b"version": b"1", b"node": b"n1"}, ["10.0.0.2"], 81),
        ({b"version": b"2", b"cluster": b"lab", b"node": b"n1"}, ["10.0.0.2"], 81),
        ({b"version": b"1", b"cluster": b"\xff", b"node": b"n1"}, ["10.0.0.2"], 81),
        ({b"version": b"1", b"cluster": b"lab", b"node": b"n1", b"key": b"none"}, ["10.0.0.2"], 81),
        ({b"version": b"1", b"cluster": b"lab", b"node": b"\x1b[2Jn1"}, ["10.0.0.2"], 81),
        ({b"version": b"1", b"cluster": b"lab", b"node": b"n1\n[chaosnet] n3 leaves"}, ["10.0.0.2"], 81),
        ({b"version": b"1", b"cluster": b"lab", b"node": b"n1"}, [], 81),
        ({b"version": b"1", b"cluster": b"lab", b"node": b"n1"}, ["10.0.0.2"], 0),
    ],
)
def test_what_no_node_of_ours_says_is_not_heard(properties, hosts, port):
    assert Announced.heard(properties, hosts, port) is None


def test_others_of_the_name_are_asked_once():
    met = Acquaintance(announced("n1", "10.0.0.2:81"), ())
    other = announced("n2", "10.0.0.3:82")
    assert met.meet(other) == (("10.0.0.3:82",), "")
    assert met.meet(other) == ((), "")


@pytest.mark.parametrize(
    "other",
    [
        announced("n1", "10.0.0.2:81"),
        announced("n3", "10.0.0.3:82", cluster="labs"),
        announced("n4", "10.0.0.3:82", cluster="labs", key=THEIRS),
    ],
)
def test_neither_itself_nor_those_of_another_name_are_asked(other):
    assert Acquaintance(announced("n1", "10.0.0.2:81"), ()).meet(other) == ((), "")


def test_an_address_that_is_its_own_here_is_not_asked_though_another_has_it_too():
    met = Acquaintance(announced("n1", "10.0.0.2:81", "172.17.0.1:81"), ())
    assert met.meet(announced("n2", "172.17.0.1:81", "10.0.0.3:81")) == (("10.0.0.3:81",), "")


def test_a_name_is_no_permission_only_keys_that_are_known_are_asked():
    met = Acquaintance(announced("n1", "10.0.0.2:81", key=MINE), ())
    assert met.meet(announced("n2", "10.0.0.3:82", key=MINE)) == ((f"{MINE}@10.0.0.3:82",), "")
    addresses, why = met.meet(announced("n3", "10.0.0.4:83", key=THEIRS))
    assert addresses == ()
    assert why.startswith(
        "n3 at 10.0.0.4:83 says that it is in 'lab', too, but its key is none that this node"
    )
    assert THEIRS in why
    met = Acquaintance(announced("n1", "10.0.0.2:81", key=MINE), (THEIRS,))
    assert met.meet(announced("n3", "10.0.0.4:83", key=THEIRS)) == ((f"{THEIRS}@10.0.0.4:83",), "")


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        ("", THEIRS, "but has a key, and this node has none"),
        (MINE, "", "but has no key, and this node has one"),
    ],
)
def test_a_node_with_a_key_and_one_without_do_not_ask_each_other(mine, theirs, why):
    met = Acquaintance(announced("n1", "10.0.0.2:81", key=mine), ())
    addresses, told = met.meet(announced("n2", "10.0.0.3:82", key=theirs))
    assert addresses == () and why in told


def test_what_is_remembered_of_strangers_is_bounded():
    met = Acquaintance(announced("n1", "10.0.0.2:81"), ())
    asked = [met.meet(announced(f"x{number}", "10.0.0.3:82"))[0] for number in range(MAX_HEARD + 9)]
    assert sum(bool(each) for each in asked) == MAX_HEARD
