"""The commands that make links, as text. Pure: what runs them is netns.py, and docker.py for links that are there.

Per overlay link one veth pair between two namespaces, a /30 network of its own, and at each end a token bucket (tbf)
for what leaves there; where the kernel has netem and a link needs it, delay, jitter and loss before the bucket.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Iterator, Mapping

import networkx as nx

from .backend import TestbedError
from .topology import EASY_BURST_BYTES, Link, LinkSpec, Topology, burst_bytes, link_name

PREFIX = "chaos"  # Of every namespace and device that is ours.
NETWORK = ipaddress.IPv4Network("10.211.0.0/16")
# How long a packet may wait for its token before it is dropped, if no round trip takes longer; and tc adds the time
# that the bucket takes to fill.
QUEUE_MS = 20
MAX_QUEUE_MS = 200
# A handle of its own for whatever may stand at the root: `replace` then makes it anew, and keeps nothing of the last.
PLAIN, DELAYED, DELAYED_BUCKET, CUT = "1:", "2:", "3:", "4:"
IN_ORDER = ("rate", "1000gbit")  # With any rate netem keeps the order of packets; this one slows nothing.
# Nodes pass on what is for others. Two ways between far nodes may differ: a host that refuses that (rp_filter, which
# namespaces inherit) must not do so here.
FORWARDING = (
    "net.ipv4.ip_forward=1",
    "net.ipv4.conf.all.rp_filter=0",
    "net.ipv4.conf.default.rp_filter=0",
)
MAX_NEIGHBORS = 64  # That a node may ask for.
OF_OTHERS = (
    "CHAOSNET_JOIN",
    "CHAOSNET_CLUSTER",
    "CHAOSNET_PEERS_AT",
    "CHAOSNET_KEY",
    "CHAOSNET_ALLOWED_KEYS",
)
Command = tuple[str, ...]


def namespace(testbed: str, node: str) -> str:
    """The namespace of a node."""
    return f"{PREFIX}-{testbed}-{node}"


def device(testbed: str, link: Link, end: str) -> str:
    """The device of a link at one of its ends; at most 15 characters, as the kernel wants."""
    which = "a" if end == link[0] else "b"
    digest = hashlib.blake2s(f"{testbed} {link[0]} {link[1]}".encode(), digest_size=4).hexdigest()
    return f"{PREFIX[:2]}{digest}{which}"


def check_size(topology: Topology) -> None:
    """Raises TestbedError for more links than there are addresses for: four each, and one of each node."""
    most = (NETWORK.num_addresses - len(topology.nodes) - 2) // 4
    if len(topology.links) > most:
        raise TestbedError(
            f"{len(topology.links)} links (expected at most {most}: {NETWORK} has no more addresses)"
        )


def addresses(topology: Topology) -> dict[Link, tuple[str, str]]:
    """The addresses of each link's two ends."""
    networks = NETWORK.subnets(new_prefix=30)
    found = {}
    for link, network in zip(topology.links, networks, strict=False):
        first, second = network.hosts()
        found[link] = (str(first), str(second))
    return found


def own_addresses(topology: Topology) -> dict[str, str]:
    """By node, the address by which it is known to all; those of its links only lead there."""
    return {node: str(NETWORK[-2 - index]) for index, node in enumerate(topology.nodes)}


def own_address(topology: Topology, node: str) -> str:
    """As own_addresses, of one."""
    return own_addresses(topology)[node]


def up(testbed: str, topology: Topology, routes: bool, netem: bool) -> list[Command]:
    """Make everything; a list of `ip` and `tc` invocations, in order. Those of one namespace go in one batch."""
    check_size(topology)
    spaces = [namespace(testbed, node) for node in topology.nodes]
    made: list[Command] = [("ip", "netns", "add", space) for space in spaces]
    made += [("ip", "netns", "exec", space, "sysctl", "-qw", *FORWARDING) for space in spaces]
    for link in topology.links:
        ends = [(device(testbed, link, end), "netns", namespace(testbed, end)) for end in link]
        made.append(("ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1]))
    found, own = addresses(topology), own_addresses(topology)
    for node, space in zip(topology.nodes, spaces, strict=True):
        for told in [*_addresses(testbed, node, found, own), *_routes(topology, node, found, own, routes)]:
            made.append(("ip", "-n", space, *told))
    return made + shape(testbed, topology.links, netem)


def _addresses(
    testbed: str, node: str, found: Mapping[Link, tuple[str, str]], own: Mapping[str, str]
) -> Iterator[Command]:
    yield "link", "set", "lo", "up"
    yield "address", "add", f"{own[node]}/32", "dev", "lo"
    for link, ends in found.items():
        if node in link:
            name = device(testbed, link, node)
            yield "address", "add", f"{ends[link.index(node)]}/30", "dev", name
            yield "link", "set", name, "up"


def _routes(
    topology: Topology, node: str, found: Mapping[Link, tuple[str, str]], own: Mapping[str, str], far: bool
) -> Iterator[Command]:
    """To each neighbour over its link; to the others, if `far`, along the path with the fewest links."""
    for target, path in sorted(nx.single_source_shortest_path(topology.graph, node).items()):
        if target != node and (len(path) == 2 or far):
            link = link_name(node, path[1])
            via = found[link][link.index(path[1])]
            yield "route", "add", f"{own[target]}/32", "via", via, "src", own[node]


def shape(testbed: str, links: Mapping[Link, LinkSpec], netem: bool) -> list[Command]:
    """Set what leaves at both ends of links; also under connections that run over them."""
    made = [
        ("tc", "-n", namespace(testbed, end), *told)
        for link, spec in links.items()
        for end in link
        for told in shape_end(device(testbed, link, end), spec, end == link[0], netem)
    ]
    return sorted(made, key=lambda command: command[2])


def shape_end(name: str, spec: LinkSpec, first: bool, netem: bool) -> list[Command]:
    """Set what leaves at the device `name`, a link's first end or its other one: what `tc` is told, without `tc`.

    netem comes first and hands on to the bucket what is due. Under the bucket it would be the bucket's queue, and
    that of a hundred thousand packets (docs/testbed.md).
    """
    rate, target = spec.rate_from(first), ("qdisc", "replace", "dev", name)
    burst, latency = burst_bytes(rate), ("latency", f"{queue_ms(spec):g}ms")
    bucket = ("tbf", "rate", f"{rate:g}mbit", "burst", str(burst), *latency)
    # A packet that waits in a bucket, and is larger than the burst that is set meanwhile, would wait for ever.
    small = f"{burst >> 8:x}:" if burst < EASY_BURST_BYTES else None
    if not netem:
        return [(*target, "root", "handle", small or PLAIN, *bucket)]
    return [
        (*target, "root", "handle", DELAYED, "netem", *netem_options(spec)),
        (*target, "parent", f"{DELAYED}1", "handle", small or DELAYED_BUCKET, *bucket),
    ]


def queue_ms(spec: LinkSpec) -> float:
    """How long a packet may wait for its token: a round trip, for a shorter queue starves a lone Cubic connection."""
    return min(max(QUEUE_MS, 2 * spec.delay_ms), MAX_QUEUE_MS)


def netem_options(spec: LinkSpec) -> list[str]:
    """What netem adds: delay, jitter, loss. Packets keep their order, as they mostly do in queues elsewhere."""
    options = ["limit", "100000", *IN_ORDER]
    if spec.delay_ms or spec.jitter_ms:
        options += ["delay", f"{spec.delay_ms:g}ms"]
    if spec.jitter_ms:
        options += [f"{spec.jitter_ms:g}ms", "distribution", "normal"]
    if spec.loss_pct:
        options += ["loss", f"{spec.loss_pct:g}%"]
    return options


def needs_netem(specs: Iterable[LinkSpec]) -> bool:
    """Does any link need more than a rate?"""
    return any(spec.delay_ms or spec.jitter_ms or spec.loss_pct for spec in specs)


def cut(testbed: str, link: Link) -> list[Command]:
    """Drop all that leaves at both ends."""
    return [("tc", "-n", namespace(testbed, end), *cut_end(device(testbed, link, end))) for end in link]


def cut_end(name: str) -> Command:
    """Drop all that leaves at a device, for it never fits into the bucket: what `tc` is told.

    Devices, addresses and routes stay as they are, so nobody is told: what a pulled cable two switches away looks
    like. (A device that is set down takes its routes along, and connecting fails at once.) What waits is lost.
    """
    bucket = ("tbf", "rate", "8bit", "burst", "1", "latency", "1ms")
    return ("qdisc", "replace", "dev", name, "root", "handle", CUT, *bucket)


def in_process(pid: int, tool: str, *arguments: str) -> Command:
    """Run `ip` or `tc` of this machine in the network of a process, which is that of its container."""
    return ("nsenter", "-t", str(pid), "-n", tool, *arguments)


def batches(commands: Iterable[Command]) -> list[tuple[Command, str]]:
    """The same in few processes: runs of `ip` or `tc` in one network become one with `-batch -`."""
    made: list[tuple[Command, str]] = []
    for command in commands:
        words = _before_batch(command)
        head: Command = (*command[:words], "-batch", "-") if words else command
        text = " ".join(command[words:]) + "\n" if words else ""
        if made and words and made[-1][0] == head:
            made[-1] = (head, made[-1][1] + text)
        else:
            made.append((head, text))
    return made


def _before_batch(command: Command) -> int:
    """How many words say where to run; 0 for a command that takes no batch."""
    if command[0] == "nsenter":
        return len(in_process(0, "tc"))
    if command[1] == "-n":
        return 3
    return 0 if command[1:3] == ("netns", "exec") else 1


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """What a node's programs have of ours: not what says with whom, and by which key, the user's own nodes train."""
    return {name: text for name, text in environment.items() if name not in OF_OTHERS}


def environment(
    topology: Topology, node: str, listen: str, at: Mapping[str, str], routes: bool = True
) -> dict[str, str]:
    """What a program on `node` needs to know, as variables. `at`: where it reaches the others.

    CHAOSNET_JOIN are neighbours on the way to the first node, which has none and founds the cluster: the first of
    those that can be reached, so each part of an overlay in parts has a cluster of its own.
    """
    reached = nx.node_connected_component(topology.graph, node)
    first = next(each for each in topology.nodes if each in reached)
    near = nx.single_source_shortest_path_length(topology.graph, first)
    around = {each: at[each] for each in sorted(topology.graph[node])}
    nearer = [address for each, address in around.items() if near[each] < near[node]]
    found = {
        "CHAOSNET_NAME": node,
        "CHAOSNET_LISTEN": listen,
        "CHAOSNET_INSECURE": "1",  # Keys are not needed here: nobody but the nodes is in networks that we made.
        "CHAOSNET_NODES": ",".join(topology.nodes),
        "CHAOSNET_NEIGHBORS_AT": ",".join(f"{each}={address}" for each, address in around.items()),
    }
    if not routes:
        # Then a cluster's overlay is that of the testbed: all want all links, and get those that are.
        found["CHAOSNET_NEIGHBORS"] = str(min(len(topology.nodes) - 1, MAX_NEIGHBORS))
    return found | ({"CHAOSNET_JOIN": ",".join(nearer)} if nearer else {})
