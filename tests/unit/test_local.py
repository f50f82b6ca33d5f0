"""Whom a node meets at a Unix socket instead of a TCP port (node/transport/local.py)."""

import socket

import pytest

from chaosnet.node.endpoint import Endpoint
from chaosnet.node.transport import local

LISTENS, CONNECTED = "00000002 00000000 00010000 0001 01", "00000003 00000000 00000000 0001 03"


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """Sets what listens on this machine."""
    monkeypatch.setattr(local, "LISTED", tmp_path / "unix")

    def give(*names, flags=LISTENS):
        lines = "".join(f"0000000000000000: {flags} 4711 @chaosnet-{name}\n" for name in names)
        local.LISTED.write_text("Num RefCount Protocol Flags Type St Inode Path\n" + lines)

    give()
    return give


def way(address):
    return local.way_to(Endpoint.parse(address))


def test_a_node_that_listens_at_the_address_dialled_is_met_there(listed):
    listed("127.0.0.1:5555", "10.0.0.7:5555")
    assert way("127.0.0.1:5555") == "ipc://@chaosnet-127.0.0.1:5555"
    assert way("10.0.0.7:5555") == "ipc://@chaosnet-10.0.0.7:5555"
    assert way("127.0.0.1:5556") == "tcp://127.0.0.1:5556"


def test_one_that_listens_everywhere_is_met_by_any_address_of_this_machine_and_no_other(listed):
    listed("*:5555")
    assert way("127.0.0.1:5555") == way("[::1]:5555") == "ipc://@chaosnet-*:5555"
    assert way("192.0.2.1:5555") == "tcp://192.0.2.1:5555"
    assert way("elsewhere.example:5555") == "tcp://elsewhere.example:5555"


def test_who_is_connected_does_not_listen(listed):
    listed("127.0.0.1:5555", flags=CONNECTED)
    assert way("127.0.0.1:5555") == "tcp://127.0.0.1:5555"


def test_a_machine_that_lists_nothing_uses_tcp(listed):
    local.LISTED.unlink()
    assert way("127.0.0.1:5555") == "tcp://127.0.0.1:5555"


def test_the_place_is_named_by_what_the_node_is_bound_to(monkeypatch):
    monkeypatch.setattr(local.sys, "platform", "linux")
    assert (
        local.meeting_place(Endpoint("0.0.0.0", 7))
        == local.meeting_place(Endpoint("::", 7))
        == "ipc://@chaosnet-*:7"
    )
    assert local.meeting_place(Endpoint("10.0.0.7", 7)) == "ipc://@chaosnet-10.0.0.7:7"
    monkeypatch.setattr(local.sys, "platform", "darwin")
    assert local.meeting_place(Endpoint("10.0.0.7", 7)) == ""


def test_only_sockets_of_meetings_are_closed_in_children():
    with (
        socket.socket(socket.AF_UNIX) as ours,
        socket.socket(socket.AF_UNIX) as other,
        socket.socket() as tcp,
    ):
        ours.bind("\0chaosnet-test_local")
        ours.listen()
        other.bind("\0test_local")
        assert [local.is_meeting(each) for each in (ours, other, tcp)] == [True, False, False]
        with socket.socket(socket.AF_UNIX) as dialler:
            dialler.connect("\0chaosnet-test_local")
            assert local.is_meeting(dialler) and local.is_meeting(ours.accept()[0])
