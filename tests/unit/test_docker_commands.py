"""Shaping containers: what docker says is understood, and what tc is told; no engine is needed."""

import json

import pytest

from chaosnet.netem import LinkSpec, TestbedError, Topology, commands, docker, netns
from chaosnet.netem.docker import Docker, address_of, containers, device_by_address, ends_of, network_of
from chaosnet.netem.topology import ring


def inspected(service, pid=7, **addresses):
    """One row of `docker inspect`, as far as it is read."""
    return {
        "Id": f"id-{service}",
        "State": {"Pid": pid},
        "Config": {"Labels": {"com.docker.compose.service": service}},
        "NetworkSettings": {
            "Networks": {name: {"NetworkID": name, "IPAddress": at} for name, at in addresses.items()}
        },
    }


THREE = containers(
    [
        inspected("x", 11, ab="10.0.1.2", ac="10.0.2.2", all="10.0.9.2"),
        inspected("y", 12, ab="10.0.1.3", all="10.0.9.3"),
        inspected("z", 0, ac="", all=""),  # It has ended.
    ]
)


def test_a_link_is_the_network_that_nobody_else_is_on():
    assert network_of(THREE, ("x", "y")) == "ab"
    assert address_of(THREE, "x", "y") == "10.0.1.3"
    assert address_of(THREE, "y", "x") == "10.0.1.2"


def test_a_node_that_has_ended_still_tells_which_network_was_its_own():
    assert network_of(THREE, ("x", "z")) == "ac"
    ends = list(ends_of(THREE, [("x", "y"), ("x", "z"), ("x", "gone")]))
    assert [(node, link, address) for node, _, link, address in ends] == [
        ("x", ("x", "y"), "10.0.1.2"),
        ("y", ("x", "y"), "10.0.1.3"),
        ("x", ("x", "z"), "10.0.2.2"),
    ]
    with pytest.raises(TestbedError, match="the container of z does not run"):
        address_of(THREE, "x", "z")


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([inspected("a"), inspected("b", n="")], "a and b share no network "),
        (
            [inspected("a", n=""), inspected("b", n=""), inspected("c", n="")],
            "share no network of their own ",
        ),
        ([inspected("a", m="", n=""), inspected("b", m="", n="")], "share 2 networks "),
    ],
)
def test_nodes_that_no_network_links_are_named(rows, complaint):
    with pytest.raises(TestbedError) as refused:
        network_of(containers(rows), ("a", "b"))
    assert complaint in str(refused.value)


def test_a_service_of_several_containers_is_no_node():
    with pytest.raises(TestbedError, match="the service a has several containers"):
        containers([inspected("a"), inspected("a")])


def test_devices_are_found_by_address_whatever_their_order():
    told = [
        {"ifname": "lo", "addr_info": [{"local": "127.0.0.1"}]},
        {"ifname": "eth1", "addr_info": [{"local": "10.0.1.2"}]},
        {"ifname": "eth0", "addr_info": [{"local": "10.0.2.2"}, {}]},
        {"ifname": "eth2", "addr_info": []},
    ]
    assert device_by_address(told) == {"127.0.0.1": "lo", "10.0.1.2": "eth1", "10.0.2.2": "eth0"}


def test_the_commands_for_a_container_go_in_one_batch():
    spec = LinkSpec(rate_mbit=200.0, rate_back_mbit=150.0)
    made = [
        commands.in_process(pid, "tc", *told)
        for pid, first in ((11, True), (11, False), (12, False))
        for told in commands.shape_end("eth0", spec, first, netem=False)
    ]
    line = "qdisc replace dev eth0 root handle 1: tbf rate {}mbit burst 131072 latency 20ms\n"
    assert commands.batches(made) == [
        (("nsenter", "-t", "11", "-n", "tc", "-batch", "-"), line.format(200) + line.format(150)),
        (("nsenter", "-t", "12", "-n", "tc", "-batch", "-"), line.format(150)),
    ]


def test_an_end_is_cut_and_delayed_as_in_a_namespace():
    link, spec = ("a", "b"), LinkSpec(rate_mbit=50.0, delay_ms=5.0)
    device = commands.device("t", link, "a")
    assert commands.shape("t", {link: spec}, netem=True)[:2] == [
        ("tc", "-n", "chaos-t-a", *told) for told in commands.shape_end(device, spec, True, netem=True)
    ]
    assert commands.cut("t", link)[0] == ("tc", "-n", "chaos-t-a", *commands.cut_end(device))
    assert " ".join(commands.cut_end("eth3")) == (
        "qdisc replace dev eth3 root handle 4: tbf rate 8bit burst 1 latency 1ms"
    )


def test_a_node_that_has_gone_keeps_no_link_from_getting_a_delay(monkeypatch):
    made = Docker("p", Topology({("x", "y"): LinkSpec(), ("x", "z"): LinkSpec()}))
    at_x = [{"ifname": "eth0", "addr_info": [{"local": "10.0.2.2"}]}]
    wanted = []
    monkeypatch.setattr(docker, "containers_of", lambda project: THREE)
    monkeypatch.setattr(docker, "_check_tools", lambda: None)
    monkeypatch.setattr(docker, "run", lambda command: json.dumps(at_x))
    monkeypatch.setattr(docker, "run_all", wanted.extend)
    monkeypatch.setattr(netns, "has_netem", lambda: True)
    made.change({("x", "z"): LinkSpec(delay_ms=20.0)})
    assert [command[2:7] for command in wanted] == [("11", "-n", "tc", "qdisc", "replace")] * 2


# --- what is missing ---


def engine(folder, monkeypatch, script):
    """A `docker` that says what it is told to; and the tools that are there."""
    for tool in ("nsenter", "ip", "tc"):
        (folder / tool).symlink_to("/bin/true")
    (folder / "docker").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("os.geteuid", lambda: 0)


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("echo 'Cannot connect to the Docker daemon' >&2; exit 1", "docker ps: Cannot connect to the Docker daemon"),
        ("exit 0", "no running container of n0, n1, n2 (start them with: docker-compose -p p up -d n0 n1 n2)"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_sentence(tmp_path, monkeypatch, script, complaint):
    engine(tmp_path, monkeypatch, script)
    with pytest.raises(TestbedError) as refused:
        Docker("p", ring(3)).up(ring(3))
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_root_or_docker_nothing_is_tried(tmp_path, monkeypatch):
    engine(tmp_path, monkeypatch, "exit 9")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(TestbedError, match="needs root"):
        Docker("p", ring(3)).up(ring(3))
    (tmp_path / "docker").unlink()
    with pytest.raises(TestbedError, match="docker is not installed"):
        Docker("p", ring(3)).up(ring(3))
    assert Docker("p", ring(3)).down() == 0
