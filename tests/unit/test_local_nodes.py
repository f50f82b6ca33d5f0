"""`chaosnet.discovery.local_nodes`: which node a command without an address means."""

import os
import subprocess
import sys

import pytest

from chaosnet.discovery.local_nodes import (
    LocalFile,
    a_local_member,
    local_nodes,
    reached_here,
    the_local_node,
)
from chaosnet.errors import ConfigError
from chaosnet.node.keys import KeyPair

KEY = KeyPair.of(bytes(32)).public


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAOSNET_STATE_DIR", str(tmp_path))
    return tmp_path / "running"


def test_a_node_is_listed_from_the_time_that_it_listens_until_it_ends(home):
    file = LocalFile("n1", "127.0.0.1:0")
    file.write(("127.0.0.1:4711",))
    assert (the_local_node().address, the_local_node().cluster) == ("127.0.0.1:4711", "")
    file.write(("127.0.0.1:4711",), "c1")
    (node,) = local_nodes()
    assert (node.pid, node.name, node.cluster) == (os.getpid(), "n1", "c1")
    file.remove()
    file.remove()
    assert local_nodes() == [] and not list(home.iterdir())


def test_of_several_of_one_cluster_any_will_do_where_the_cluster_is_meant():
    one, other, joiner = (LocalFile(name, "127.0.0.1:0") for name in ("n1", "n2", "n3"))
    one.write(("127.0.0.1:7001",), "c1")
    joiner.write(("127.0.0.1:7003",))
    assert a_local_member().address == "127.0.0.1:7001"
    other.write(("127.0.0.1:7002",), "c1")
    assert a_local_member().cluster == "c1"
    other.write(("127.0.0.1:7002",), "c2")
    with pytest.raises(ConfigError, match="3 nodes of yours run here"):
        a_local_member()
    for file in (one, other, joiner):
        file.remove()
    with pytest.raises(ConfigError, match="no node of yours runs"):
        a_local_member()


def test_of_several_none_is_meant_and_all_are_named():
    files = [LocalFile(f"n{number}", "127.0.0.1:0") for number in (1, 2)]
    for number, file in enumerate(files):
        file.write((f"127.0.0.1:{7000 + number}",))
    with pytest.raises(
        ConfigError, match=r"(?s)2 nodes of yours run here.*127.0.0.1:7000 \(n1, .*7001 \(n2, "
    ):
        the_local_node()
    for file in files:
        file.remove()


def test_one_that_was_killed_counts_for_nothing_and_its_file_goes(home):
    text = (
        "import os, signal\nfrom chaosnet.discovery.local_nodes import LocalFile, a_local_member, local_nodes\n"
        "LocalFile.write(file := LocalFile('n1', '127.0.0.1:0'), ('127.0.0.1:4711',))\n"
        "print(len(local_nodes()), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, check=False)
    assert done.stdout == b"1\n" and len(list(home.iterdir())) == 1
    with pytest.raises(ConfigError, match="no node of yours runs on this machine"):
        the_local_node()
    assert not list(home.iterdir())


def test_the_next_node_removes_what_killed_ones_have_left_though_nobody_asks_for_any(home):
    text = (
        "import os, signal\nfrom chaosnet.discovery.local_nodes import LocalFile\n"
        "files = [LocalFile('n1', '127.0.0.1:0') for _ in range(20)]\n"
        "for file in files:\n    file.write(('127.0.0.1:4711',))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", text], check=False)
    assert len(list(home.iterdir())) == 20
    file = LocalFile("n2", "127.0.0.1:0")
    file.write(("127.0.0.1:4712",))
    assert len(list(home.iterdir())) == 1
    file.remove()


def test_a_full_disk_is_not_filled_further(home, monkeypatch):
    def no_space(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", no_space)
    file = LocalFile("n1", "127.0.0.1:0")
    file.write(("127.0.0.1:4711",))
    file.remove()
    assert not list(home.iterdir())


def test_what_is_no_such_file_counts_for_nothing(home):
    file = LocalFile("n1", "127.0.0.1:0")
    file.write(("127.0.0.1:4711",))
    (path,) = home.iterdir()
    path.with_name(path.name.replace(".json", "x.json")).write_text("[]")
    path.with_name("another-machine.0.json").write_text(path.read_text())
    assert len(local_nodes()) == 1
    path.write_text("{}")  # It is still locked, as by a later version of ours.
    assert local_nodes() == []
    file.remove()


def test_where_nothing_can_be_written_there_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CHAOSNET_STATE_DIR", str(tmp_path / "file"))
    file = LocalFile("n1", "127.0.0.1:0")
    file.write(("127.0.0.1:4711",))
    file.remove()
    assert local_nodes() == []


@pytest.mark.parametrize(
    ("listen", "address", "here"),
    [
        ("127.0.0.1:0", "127.0.0.1:81", "127.0.0.1:81"),
        ("10.0.0.2:81", "10.0.0.2:81", "10.0.0.2:81"),
        ("0.0.0.0:0", f"{KEY}@10.0.0.2:81", f"{KEY}@127.0.0.1:81"),
        ("[::]:81", "10.0.0.2:81", "[::1]:81"),
    ],
)
def test_a_node_at_all_interfaces_is_asked_at_loopback(listen, address, here):
    assert reached_here(listen, address) == here
