"""What a testbed is made of: nodes, and links with a rate, a delay, jitter and loss.

One description serves all back ends. A link is named by its two ends in alphabetical order, (a, b) with a < b.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import networkx as nx
import yaml

from ..protocols.plain_data import converted
from .backend import TestbedError

Link = tuple[str, str]
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,30}\Z")]
MIN_RATE_MBIT = 0.001  # A slower bucket stands for a cut link.
Rate = Annotated[float, msgspec.Meta(ge=MIN_RATE_MBIT, le=100_000)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=60_000)]
Percent = Annotated[float, msgspec.Meta(ge=0, le=100)]

GOODPUT = 0.956  # Of a set rate: what headers leave of a 1500-byte frame (docs/testbed.md).
# A bucket holds 2 ms of line, and more where that costs much less CPU (docs/testbed.md): up to 128 KiB, yet no more
# than 10 ms of line, or a slow link lets through at once what should take it a second. TCP begins with 16 KiB.
BURST_S, SLOW_BURST_S = 0.002, 0.01
EASY_BURST_BYTES, MIN_BURST_BYTES = 128 << 10, 16 << 10
PAPER_RATES_MBIT = (100.0, 1000.0)  # Chaos, Sec. VI-A: each link at random in between.
PAPER_DEGREES = (2, 4)


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One link. `rate_mbit` from a to b, `rate_back_mbit` from b to a (default: the same).

    Delay, jitter and loss hold each way, so a round trip takes twice `delay_ms`.
    """

    rate_mbit: Rate = 1000.0
    rate_back_mbit: Rate | None = None
    delay_ms: Milliseconds = 0.0
    jitter_ms: Milliseconds = 0.0
    loss_pct: Percent = 0.0

    def rate_from(self, first: bool) -> float:
        """Mbit/s from a to b (`first`) or from b to a."""
        return self.rate_mbit if first or self.rate_back_mbit is None else self.rate_back_mbit

    def reversed(self) -> LinkSpec:
        """The same link, seen from b."""
        if self.rate_back_mbit is None:
            return self
        return msgspec.structs.replace(self, rate_mbit=self.rate_back_mbit, rate_back_mbit=self.rate_mbit)

    def with_value(self, field: str, value: float) -> LinkSpec:
        """The same link with one field changed. Raises TestbedError for a field or value that cannot be."""
        if field not in self.__struct_fields__:
            raise TestbedError(
                f"{field!r} is no field of a link (expected {', '.join(self.__struct_fields__)})"
            )
        changed = {**msgspec.to_builtins(self), field: value}
        return converted(changed, LinkSpec, f"{field}={value:g}", TestbedError)


FAST = LinkSpec()
WIDE = LinkSpec(rate_mbit=100.0, delay_ms=20.0)


def link_name(a: str, b: str) -> Link:
    """The link between two nodes, whichever comes first."""
    return (a, b) if a < b else (b, a)


def burst_bytes(rate_mbit: float) -> int:
    """How much may pass at once; below EASY_BURST_BYTES a multiple of 256."""
    bytes_per_s = rate_mbit * 1e6 / 8
    slow = int(bytes_per_s * SLOW_BURST_S) // 256 * 256
    return max(MIN_BURST_BYTES, min(EASY_BURST_BYTES, slow), int(bytes_per_s * BURST_S))


class _LinkRow(LinkSpec, frozen=True, forbid_unknown_fields=True, kw_only=True):
    a: Name
    b: Name


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """What a topology file says."""

    links: Annotated[list[_LinkRow], msgspec.Meta(min_length=1)]
    nodes: list[Name] = []


class Topology:
    """An overlay: `graph` is a networkx graph whose edges carry `spec`, a LinkSpec."""

    def __init__(self, links: Mapping[Link, LinkSpec], nodes: Iterable[str] = ()) -> None:
        self.graph = nx.Graph()
        self.graph.add_nodes_from(nodes)
        for (a, b), spec in links.items():
            if a == b:
                raise TestbedError(f"the link {a} - {b} leads nowhere (expected two nodes)")
            if self.graph.has_edge(a, b):
                raise TestbedError(f"the link {a} - {b} is there twice")
            self.graph.add_edge(a, b, spec=spec if a < b else spec.reversed())

    @property
    def nodes(self) -> list[str]:
        return list(self.graph.nodes)

    @property
    def links(self) -> dict[Link, LinkSpec]:
        """By (a, b) with a < b, in order."""
        pairs = sorted(link_name(*edge) for edge in self.graph.edges)
        return {pair: self.graph.edges[pair]["spec"] for pair in pairs}

    def spec(self, link: Link) -> LinkSpec:
        """Raises TestbedError if there is no such link."""
        if not self.graph.has_edge(*link):
            known = ", ".join(f"{a} - {b}" for a, b in self.links)
            raise TestbedError(f"there is no link {link[0]} - {link[1]} (links: {known})")
        spec: LinkSpec = self.graph.edges[link]["spec"]
        return spec

    def spec_from(self, a: str, b: str) -> LinkSpec:
        """As `spec`, with a as its first end, whichever name comes first."""
        return self.spec((a, b)) if a < b else self.spec((a, b)).reversed()

    def check_node(self, node: str) -> None:
        """Raises TestbedError if there is no such node."""
        if node not in self.graph:
            raise TestbedError(f"there is no node {node!r} (nodes: {', '.join(self.nodes)})")

    def set_spec(self, link: Link, spec: LinkSpec) -> None:
        """Change a link that is there."""
        self.spec(link)
        self.graph.edges[link]["spec"] = spec

    # --- files ---

    @classmethod
    def read(cls, path: Path) -> Topology:
        """Read YAML. Raises TestbedError that names the file, the field and what was expected."""
        return cls.from_text(read_text(path), str(path))

    @classmethod
    def from_text(cls, text: str, where: str = "topology") -> Topology:
        """As `read`, of a text."""
        try:
            plain = yaml.safe_load(text)
        except Exception as error:  # Also what it raises of numbers, dates and tags that cannot be.
            raise TestbedError(f"{where}: not YAML ({' '.join(str(error).split())})") from None
        found = converted(plain, _File, where, TestbedError)
        links: dict[Link, LinkSpec] = {}
        for row in found.links:
            fields = {name: getattr(row, name) for name in LinkSpec.__struct_fields__}
            if (row.a, row.b) in links or (row.b, row.a) in links:
                raise TestbedError(f"{where}: the link {row.a} - {row.b} is there twice")
            links[row.a, row.b] = LinkSpec(**fields)
        return cls(links, found.nodes)

    def to_text(self) -> str:
        """As YAML; `from_text` of it is the same topology."""
        rows = []
        for (a, b), spec in self.links.items():
            plain = msgspec.to_builtins(spec)
            rows.append({"a": a, "b": b} | {k: v for k, v in plain.items() if v not in (None, 0.0)})
        return yaml.safe_dump(
            {"nodes": self.nodes, "links": rows}, sort_keys=False, default_flow_style=None, width=110
        )


# --- generators ---


def names(count: int) -> list[str]:
    """n0, n1, ..., with leading zeros where they help sorting."""
    if count < 2:
        raise TestbedError(f"{count} nodes make no overlay (expected at least 2)")
    width = len(str(count - 1))
    return [f"n{index:0{width}d}" for index in range(count)]


def ring(count: int, spec: LinkSpec = FAST) -> Topology:
    """Each node linked to the next, and the last to the first."""
    nodes = names(count)
    pairs = {link_name(*pair) for pair in zip(nodes, nodes[1:] + nodes[:1], strict=True)}
    return Topology(dict.fromkeys(sorted(pairs), spec), nodes)


def line(count: int, spec: LinkSpec = FAST) -> Topology:
    """A chain."""
    nodes = names(count)
    return Topology(dict.fromkeys(itertools.pairwise(nodes), spec), nodes)


def star(count: int, spec: LinkSpec = FAST) -> Topology:
    """All linked to the first."""
    nodes = names(count)
    return Topology({(nodes[0], node): spec for node in nodes[1:]}, nodes)


def mesh(count: int, spec: LinkSpec = FAST) -> Topology:
    """Everybody linked to everybody."""
    nodes = names(count)
    return Topology(dict.fromkeys(itertools.combinations(nodes, 2), spec), nodes)


def two_sites(
    count: int,
    local: LinkSpec = FAST,
    wide: LinkSpec = WIDE,
) -> Topology:
    """Two meshes of `local` links, joined by two `wide` ones (one if a site has one node)."""
    nodes = names(count)
    left, right = nodes[: count // 2], nodes[count // 2 :]
    links = {pair: local for side in (left, right) for pair in itertools.combinations(side, 2)}
    links |= {(left[0], right[0]): wide, (left[-1], right[-1]): wide}
    return Topology(links, nodes)


def random_overlay(count: int, seed: int, links: int | None = None) -> Topology:
    """The paper's testbed: a connected random overlay, each link 100 to 1000 Mbit/s at random (Chaos, Sec. VI-A).

    Args:
        links: How many; default: so that nodes have 2 to 4 neighbours, 3 on average.
    """
    rng, nodes = random.Random(seed), names(count)
    most = count * (count - 1) // 2
    wanted = min(most, max(count - 1, round(count * sum(PAPER_DEGREES) / 4))) if links is None else links
    if not count - 1 <= wanted <= most:
        raise TestbedError(f"{wanted} links among {count} nodes (expected {count - 1} to {most})")
    order, degree = rng.sample(nodes, count), dict.fromkeys(nodes, 0)
    pairs: set[Link] = set()

    def add(pair: Link) -> None:
        pairs.add(pair)
        for node in pair:
            degree[node] += 1

    for index, node in enumerate(order[1:], 1):  # A tree without hubs.
        open_ = [each for each in order[:index] if degree[each] < PAPER_DEGREES[1]]
        add(link_name(node, rng.choice(open_)))
    while len(pairs) < wanted:  # Where there are fewest first, so that degrees stay even.
        add(rng.choice(_emptiest(degree, pairs)))
    return Topology({pair: LinkSpec(rate_mbit=random_rate(rng)) for pair in sorted(pairs)}, nodes)


def _emptiest(degree: Mapping[str, int], pairs: set[Link]) -> list[Link]:
    """Pairs that may still be linked, and whose fuller end has as few links as there are."""
    found: list[Link] = []
    for most in sorted({*degree.values()}):
        few = [node for node in degree if degree[node] <= most]
        found = [pair for pair in itertools.combinations(few, 2) if pair not in pairs]
        if found:
            break
    return found


def random_rate(rng: random.Random) -> float:
    """One of the paper's rates, Mbit/s."""
    return float(round(rng.uniform(*PAPER_RATES_MBIT)))


def read_text(path: Path) -> str:
    """Raises TestbedError that names the file."""
    try:
        return path.read_text(encoding="utf-8-sig")  # Spreadsheets begin a CSV file with a byte order mark.
    except OSError as error:
        raise TestbedError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TestbedError(f"{path}: no UTF-8 text ({error.reason} at byte {error.start})") from None
