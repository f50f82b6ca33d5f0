"""Testbeds of docker containers: Compose makes nodes and networks, this makes links with rates of the networks.

A link is a network that its two ends share and nobody else is on. It is shaped from outside: `nsenter` enters the
network of a container, and this machine's `tc` does the rest. So containers need neither tools nor privileges.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple
from uuid import uuid4

from . import commands
from .backend import Kind, TestbedError, check_name
from .commands import Command, in_process
from .netns import check_netem, in_force, run, run_all
from .topology import Link, LinkSpec, Topology

PORT = 5555
LABEL = "com.docker.compose"
ENGINE_PATIENCE_S = 20.0


class NoEngine(TestbedError):
    """There is no docker here, or it does not answer."""


@dataclass(frozen=True, slots=True)
class Container:
    """One node. `pid`: 0 unless it runs; `addresses` by network, "" unless it runs."""

    id: str
    pid: int
    addresses: Mapping[str, str]


class End(NamedTuple):
    """One of the two ends of a link, in a container that runs."""

    link: Link
    node: str
    pid: int
    device: str


class Docker:
    """The containers of the Compose project `name`, as a testbed."""

    kind: ClassVar[Kind] = "docker"
    python: ClassVar[str] = "python"  # The container's.

    def __init__(self, name: str, topology: Topology, routes: bool = False) -> None:
        self.name, self.topology = check_name(name), topology
        self.routes = False  # Docker lets nothing pass from one network to another.
        self.cuts: set[Link] = set()
        self.netem = commands.needs_netem(topology.links.values())
        self.id = uuid4().hex

    def check(self, topology: Topology) -> None:
        """Root, tools, an engine, and containers that run and share networks as `topology` says."""
        _check_tools()
        check_netem(topology.links.values())
        found = containers_of(self.name)
        missing = [node for node in topology.nodes if node not in found or not found[node].pid]
        if missing:
            raise TestbedError(
                f"the compose project {self.name!r} has no running container of {', '.join(missing)} "
                f"(start them with: docker-compose -p {self.name} up -d {' '.join(missing)})"
            )
        for link in topology.links:
            network_of(found, link)

    def up(self, topology: Topology) -> None:
        """Give the links that are there their rates. What an earlier `up` has set elsewhere goes."""
        self.check(topology)
        self.down()
        self.topology, self.netem = topology, commands.needs_netem(topology.links.values())
        self._shape(topology.links)

    def change(self, links: Mapping[Link, LinkSpec]) -> None:
        """One `tc` process a container. A node that has gone meanwhile has no end to change."""
        if not self.netem and commands.needs_netem(links.values()):
            check_netem(links.values())
            self.netem = True
        for link, spec in links.items():
            self.topology.set_spec(link, spec)
        self._shape({link: spec for link, spec in links.items() if link not in self.cuts})

    def cut(self, link: Link) -> None:
        """Silently."""
        self.topology.spec(link)
        run_all([in_process(end.pid, "tc", *commands.cut_end(end.device)) for end in self._ends([link])])
        self.cuts.add(link)

    def heal(self, link: Link) -> None:
        """As it was before the cut."""
        self._shape({link: self.topology.spec(link)})
        self.cuts.discard(link)

    def environment(self, node: str) -> dict[str, str]:
        """As commands.environment. A neighbour has another address on each link; this is the one seen from here."""
        self.topology.check_node(node)
        found = containers_of(self.name)
        at = {
            each: f"{address_of(found, node, each)}:{PORT}" if _runs(found, each) else ""
            for each in self.topology.graph[node]
        }
        return commands.environment(self.topology, node, f"0.0.0.0:{PORT}", at)

    def endpoints(self, sender: str, receiver: str, port: int) -> tuple[str, str]:
        """Where `receiver` is to listen, and where `sender` finds it: HOST:PORT."""
        return f"0.0.0.0:{port}", f"{address_of(containers_of(self.name), sender, receiver)}:{port}"

    def start(self, node: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Run a program in the node's container, beside the one that it was made for."""
        env = {**self.environment(node), **options.pop("env", {})}
        found = containers_of(self.name)
        if not _runs(found, node):
            raise TestbedError(f"the container of {node} does not run")
        variables = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        return subprocess.Popen(["docker", "exec", *variables, found[node].id, *command], **options)

    def in_force(self) -> list[dict[str, Any]]:
        """What `tc` says is set at each end of each link; ends that are gone have no row."""
        rows = []
        for end in self._ends(self.topology.links):
            found = json.loads(run(in_process(end.pid, "tc", "-j", "qdisc", "show", "dev", end.device)))
            rows.append({"link": end.link, "from": end.node, "qdiscs": found} | in_force(found))
        return rows

    def alive(self) -> int:
        """How many of the nodes run?"""
        found = containers_of(self.name)
        return sum(_runs(found, node) for node in self.topology.nodes)

    def down(self) -> int:
        """Take what is set off all devices of the project; containers and networks are Compose's, and stay."""
        try:
            found = containers_of(self.name)
        except NoEngine:
            return 0  # So there are no containers of it either.
        shaped = 0
        for container in found.values():
            devices = shaped_devices(container.pid) if container.pid else []
            run_all(
                [in_process(container.pid, "tc", "qdisc", "del", "dev", each, "root") for each in devices]
            )
            shaped += bool(devices)
        return shaped

    def _shape(self, links: Mapping[Link, LinkSpec]) -> None:
        run_all(
            [
                in_process(end.pid, "tc", *told)
                for end in self._ends(links)
                for told in commands.shape_end(
                    end.device, links[end.link], end.node == end.link[0], self.netem
                )
            ]
        )

    def _ends(self, links: Iterable[Link]) -> list[End]:
        """The ends that are there, those of one container together, for they go in one batch."""
        _check_tools()
        found = containers_of(self.name)
        devices: dict[str, dict[str, str]] = {}
        ends = list(ends_of(found, links))
        for node, container, _, _ in ends:
            if node not in devices:
                devices[node] = device_by_address(
                    json.loads(run(in_process(container.pid, "ip", "-j", "-4", "address", "show")))
                )
        made = [End(link, node, each.pid, devices[node][address]) for node, each, link, address in ends]
        return sorted(made, key=lambda end: (end.node, end.link))


# --- what docker says, pure ---


def containers(inspected: Iterable[Mapping[str, Any]]) -> dict[str, Container]:
    """By service, from `docker inspect`. Raises TestbedError where a service has several."""
    found: dict[str, Container] = {}
    for each in inspected:
        service = each["Config"]["Labels"][f"{LABEL}.service"]
        if service in found:
            raise TestbedError(f"the service {service} has several containers (expected one a node)")
        networks = each["NetworkSettings"]["Networks"].values()
        addresses = {row["NetworkID"]: row["IPAddress"] for row in networks}
        found[service] = Container(each["Id"], each["State"]["Pid"], addresses)
    return found


def network_of(found: Mapping[str, Container], link: Link) -> str:
    """The one network that a link is. Raises TestbedError if its ends share none, or several, or with others."""
    shared = set(found[link[0]].addresses) & set(found[link[1]].addresses)
    own = [each for each in shared if sum(each in container.addresses for container in found.values()) == 2]
    if len(own) != 1:
        what = f"{len(own)} networks" if own else f"no network{' of their own' if shared else ''}"
        raise TestbedError(
            f"{link[0]} and {link[1]} share {what} (expected one that nobody else is on, as in docker-compose.yml)"
        )
    return own[0]


def address_of(found: Mapping[str, Container], seen_from: str, node: str) -> str:
    """The address of `node` on its link with `seen_from`."""
    for each in (seen_from, node):
        if not _runs(found, each):
            raise TestbedError(f"the container of {each} does not run")
    return found[node].addresses[network_of(found, (seen_from, node))]


def ends_of(
    found: Mapping[str, Container], links: Iterable[Link]
) -> Iterator[tuple[str, Container, Link, str]]:
    """Node, container, link and address of each end of each link, as far as they run."""
    for link in links:
        if all(node in found for node in link):
            network = network_of(found, link)
            for node in link:
                if found[node].pid:
                    yield node, found[node], link, found[node].addresses[network]


def device_by_address(told: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The device that has an address, from `ip -j address`. Their order, and so eth0 and eth1, means nothing."""
    return {
        address["local"]: row["ifname"] for row in told for address in row["addr_info"] if "local" in address
    }


def _runs(found: Mapping[str, Container], node: str) -> bool:
    return node in found and found[node].pid > 0


# --- asking ---


def containers_of(project: str) -> dict[str, Container]:
    """All of a Compose project, also those that have ended: they still tell which network was whose."""
    filters = (f"label={LABEL}.project={project}", f"label={LABEL}.oneoff=False")
    listed = _docker("ps", "--all", "--quiet", *(word for each in filters for word in ("--filter", each)))
    ids = listed.split()
    return containers(json.loads(_docker("inspect", *ids))) if ids else {}


def shaped_devices(pid: int) -> list[str]:
    """Devices of a container with a bucket or netem at their root: those are ours, for docker sets none."""
    told = json.loads(run(in_process(pid, "tc", "-j", "qdisc", "show")))
    return [row["dev"] for row in told if row["kind"] in ("tbf", "netem") and row.get("root")]


def _docker(*arguments: str) -> str:
    if shutil.which("docker") is None:
        raise NoEngine("docker is not installed")
    command: Command = ("docker", *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENGINE_PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise NoEngine(f"the docker engine does not answer (waited {ENGINE_PATIENCE_S:g} s)") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        kind = NoEngine if "connect" in said or "permission denied" in said else TestbedError
        raise kind(f"docker {arguments[0]}: {said}")
    return done.stdout


def _check_tools() -> None:
    for tool in ("docker", "nsenter", "ip", "tc"):
        if shutil.which(tool) is None:
            raise TestbedError(f"{tool} is not installed (packages docker.io, util-linux, iproute2)")
    if os.geteuid() != 0:
        raise TestbedError("shaping the networks of containers needs root on the machine whose engine it is")
