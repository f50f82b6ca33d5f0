"""The commands that make links, as text. Pure: what runs them is netns.py, and docker.py for links that are there.

Per overlay link one veth pair between two namespaces, a /30 network of its own, and at each end a token bucket (tbf)
for what leaves there; where the kernel has netem and a link needs it, delay, jitter and loss before the bucket.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Mapping, Sequence

import networkx as nx

from .backend import TestbedError
from .topology import Link, LinkSpec, Topology, burst_bytes, link_name

PREFIX = "chaos"  # Of every namespace and device that is ours.
NETWORK = ipaddress.IPv4Network("10.211.0.0/16")
QUEUE_MS = 20  # How long a packet may wait for its token before it is dropped, if no round trip takes longer.
MAX_QUEUE_MS = 200
# A handle of its own for whatever may stand at the root: `replace` then makes it anew, and keeps nothing of the last.
PLAIN, DELAYED, DELAYED_BUCKET, CUT = "1:", "2:", "3:", "4:"
IN_ORDER = ("rate", "1000gbit")  # With any rate netem keeps the order of packets; this one slows nothing.
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


def own_address(topology: Topology, node: str) -> str:
    """The address by which a node is known to all; those of its links only lead there."""
    return str(NETWORK[-2 - topology.nodes.index(node)])


def up(testbed: str, topology: Topology, routes: bool, netem: bool) -> list[Command]:
    """Make everything; a list of `ip` and `tc` invocations, in order."""
    check_size(topology)
    made: list[Command] = []
    for node in topology.nodes:
        made += [("ip", "netns", "add", namespace(testbed, node)), *_loopback(testbed, topology, node)]
    found = addresses(topology)
    for link, spec in topology.links.items():
        made += _link(testbed, link, found[link])
        made += shape(testbed, link, spec, netem)
    for node in topology.nodes:
        made += _routes(testbed, topology, node, routes)
    return made


def _loopback(testbed: str, topology: Topology, node: str) -> list[Command]:
    inside = ("ip", "-n", namespace(testbed, node))
    own = own_address(topology, node)
    return [
        (*inside, "link", "set", "lo", "up"),
        (*inside, "address", "add", f"{own}/32", "dev", "lo"),
        ("ip", "netns", "exec", namespace(testbed, node), "sysctl", "-qw", "net.ipv4.ip_forward=1"),
    ]


def _link(testbed: str, link: Link, ends: tuple[str, str]) -> list[Command]:
    (a, b), spaces = link, [namespace(testbed, node) for node in link]
    devices = [device(testbed, link, a), device(testbed, link, b)]
    made: list[Command] = [
        ("ip", "link", "add", devices[0], "netns", spaces[0], "type", "veth",
         "peer", "name", devices[1], "netns", spaces[1]),
    ]  # fmt: skip
    for space, name, address in zip(spaces, devices, ends, strict=True):
        made.append(("ip", "-n", space, "address", "add", f"{address}/30", "dev", name))
        made.append(("ip", "-n", space, "link", "set", name, "up"))
    return made


def _routes(testbed: str, topology: Topology, node: str, far: bool) -> list[Command]:
    """To each neighbour over its link; to the others, if `far`, along the path with the fewest links."""
    found, made = addresses(topology), list[Command]()
    for target, path in sorted(nx.single_source_shortest_path(topology.graph, node).items()):
        if target == node or (len(path) > 2 and not far):
            continue
        link = link_name(node, path[1])
        via = found[link][link.index(path[1])]
        route = ("route", "add", f"{own_address(topology, target)}/32", "via", via)
        made.append(("ip", "-n", namespace(testbed, node), *route, "src", own_address(topology, node)))
    return made


def shape(testbed: str, link: Link, spec: LinkSpec, netem: bool) -> list[Command]:
    """Set what leaves at both ends; also under connections that run over the link."""
    return [
        ("tc", "-n", namespace(testbed, end), *told)
        for end in link
        for told in shape_end(device(testbed, link, end), spec, end == link[0], netem)
    ]


def shape_end(name: str, spec: LinkSpec, first: bool, netem: bool) -> list[Command]:
    """Set what leaves at the device `name`, a link's first end or its other one: what `tc` is told, without `tc`.

    netem comes first and hands on to the bucket what is due. Under the bucket it would be the bucket's queue, and
    that of a hundred thousand packets (docs/testbed.md).
    """
    rate, target = spec.rate_from(first), ("qdisc", "replace", "dev", name)
    latency = ("latency", f"{queue_ms(spec):g}ms")
    bucket = ("tbf", "rate", f"{rate:g}mbit", "burst", str(burst_bytes(rate)), *latency)
    if not netem:
        return [(*target, "root", "handle", PLAIN, *bucket)]
    return [
        (*target, "root", "handle", DELAYED, "netem", *netem_options(spec)),
        (*target, "parent", f"{DELAYED}1", "handle", DELAYED_BUCKET, *bucket),
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


def down(spaces: Sequence[str]) -> list[Command]:
    """Remove namespaces; their devices go with them."""
    return [("ip", "netns", "delete", space) for space in spaces]


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
    return 3 if command[0] in ("ip", "tc") and command[1] == "-n" else 0


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """What a node's programs have of ours: not what says with whom, and by which key, the user's own nodes train."""
    return {name: text for name, text in environment.items() if name not in OF_OTHERS}


def environment(
    topology: Topology, node: str, listen: str, at: Mapping[str, str], routes: bool = True
) -> dict[str, str]:
    """What a program on `node` needs to know, as variables. `at`: where it reaches the others.

    CHAOSNET_JOIN are neighbours on the way to the first node, which has none and founds the cluster.
    """
    first = topology.nodes[0]
    near = nx.single_source_shortest_path_length(topology.graph, first)
    around = {each: at[each] for each in sorted(topology.graph[node])}
    nearer = [address for each, address in around.items() if near.get(each, 0) < near.get(node, 0)]
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
