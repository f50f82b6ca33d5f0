"""The cluster monitor (Chaos Sec. IV-A): nodes, their states, and what is known of every link."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import networkx as nx

from ..protocols.keyring import Keyring
from ..protocols.messages import REFUSED, Link, LinkReading, Message, Notice, RateSource, Report, View, link
from ..protocols.status import CheckpointRow, EventRow, LinkRow, MemberRow, TreeRow
from .shard_plan import Source
from .trees import DEFAULT_RATE_BPS, DEFAULT_RTT_S

EVENTS_KEPT = 200
GONE_KEPT = 100  # Nodes that are out, of which people are still told.
FAILURES = ("node-failure", "expelled")  # Kinds of events after which a node is out against its will.

# Counters of a Report of who writes checkpoints: of the newest of which it has its part, and 1 while it writes one.
CHECKPOINT_STEP, CHECKPOINT_AT_S = "checkpoint_step", "checkpoint_at_s"
CHECKPOINT_WRITING = "checkpoint_under_way"


@dataclass(slots=True)
class NodeRecord:
    """One row of the table that Sec. IV-A describes."""

    id: str
    state: str  # "standby" (joining), "active", "failed" or "left".
    addresses: tuple[str, ...] = ()
    joined_step: int = 0
    report: Report | None = None
    reported_s: float = 0.0  # When that came.


@dataclass(frozen=True, slots=True)
class Rate:
    """Of one direction of a link: when it was measured, and how ("probe", "iperf3", "replication", "traffic")."""

    bps: float
    at_s: float
    source: RateSource


@dataclass(slots=True)
class LinkRecord:
    """The newest readings of a link. Rates by the end that receives."""

    rtt_min_s: float = 0.0
    rtt_median_s: float = 0.0
    rates: dict[str, Rate] = field(default_factory=dict)

    @property
    def rate_bps(self) -> float:
        """The rate of the slower direction, as far as it is known: an all-reduce needs both. 0: not measured."""
        return min((rate.bps for rate in self.rates.values()), default=0.0)

    def measured(self, receiver: str, rate: Rate) -> None:
        """One end tells a rate; an older one than the known rate is ignored."""
        known = self.rates.get(receiver)
        if known is None or known.at_s <= rate.at_s:
            self.rates[receiver] = rate

    def to(self, receiver: str) -> float:
        """bit/s of what `receiver` gets; if that is not known, of the other direction."""
        return self.rates[receiver].bps if receiver in self.rates else self.rate_bps


@dataclass(slots=True)
class ClusterMonitor:
    """Fed with views, reports and notices; answers planners and people."""

    view: View | None = None
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    links: dict[Link, LinkRecord] = field(default_factory=dict)
    events: deque[Notice] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    keyring: Keyring | None = None  # Of this node; read only.
    # Of the view: the life, and what it said.
    endings: dict[str, tuple[int, str]] = field(default_factory=dict)

    def entered(self, view: View) -> None:
        """A new view is active; who is no longer in it has left, unless a notice says otherwise."""
        before, self.view = self.view, view
        known = before.standings if before else frozenset()
        for node, *_ in sorted(known - view.standings):
            # Who left last comes last, and is forgotten last.
            record = self.nodes[node] = self.nodes.pop(node)
            record.state = "left" if record.state in ("active", "standby") else record.state
        for node, _, joined_step, state in sorted(view.standings - known):
            member = view.find(node)
            assert member is not None
            record = self.nodes.setdefault(node, NodeRecord(node, state))
            record.state, record.addresses, record.joined_step = state, member.addresses, joined_step
        if len(self.nodes) > len(view.node_set) + GONE_KEPT:
            gone = [node for node in self.nodes if node not in view.node_set]
            for node in gone[:-GONE_KEPT]:
                del self.nodes[node]
        for each in [each for each in self.links if each not in view.link_set]:
            del self.links[each]
        for node in self.endings.keys() - view.node_set:
            del self.endings[node]

    def ended(self, node: str, life: int, reason: str) -> None:
        """The script of a node has ended with an error. `reason`: "" if others only repeat that."""
        known = self.endings.get(node, (0, ""))[0] == life and not reason
        if self.view is not None and self.view.find(node) is not None and not known:
            self.endings[node] = life, reason

    def ending(self, node: str) -> str | None:
        """The error with which the script of this node has ended, if it said so."""
        member = self.view.find(node) if self.view else None
        if member is None or node not in self.endings:
            return None
        life, reason = self.endings[node]
        return reason if life == member.life else None

    def is_shut_out(self, node: str) -> bool:
        """Was the key revoked that is in this node's address?"""
        member = self.view.find(node) if self.view else None
        keys = {each.rpartition("@")[0] for each in member.addresses} if member else set()
        return bool(self.keyring and keys & self.keyring.revoked)

    def notice(self, notice: Notice) -> None:
        """Keep a notice. All nodes do, so that the next scheduler knows who failed before its time."""
        self.events.append(notice)
        record = self.nodes.get(notice.node)
        if record and notice.kind in FAILURES and record.joined_step <= notice.step:
            record.state = "failed"

    def report(self, report: Report, now_s: float) -> None:
        """A node says how it is and what its links are like."""
        record = self.nodes.get(report.node)
        if record is None:
            return
        record.report, record.reported_s = report, now_s
        for peer, reading in report.readings.items():
            if peer in self.nodes:
                self.reading(report.node, peer, reading, now_s)

    def reading(self, node: str, peer: str, reading: LinkReading, now_s: float) -> None:
        """What `node` knows of its link to `peer`; what it has not measured stays as it was."""
        record = self.links.setdefault(link(node, peer), LinkRecord())
        record.rtt_min_s = reading.rtt_min_s or record.rtt_min_s
        record.rtt_median_s = reading.rtt_median_s or record.rtt_median_s
        if reading.rate_bps:
            record.measured(node, Rate(reading.rate_bps, now_s - reading.rate_age_s, reading.rate_source))
        if reading.sent_bps:
            record.measured(peer, Rate(reading.sent_bps, now_s - reading.sent_age_s, "traffic"))

    def graph(self, nodes: Iterable[str], links: Iterable[Link]) -> nx.Graph:
        """The overlay as the sync planner wants it: edges with what is known of `rate_bps` and `rtt_s`."""
        graph = nx.Graph()
        graph.add_nodes_from(nodes)
        for a, b in links:
            if a in graph and b in graph:
                record = self.links.get((a, b), LinkRecord())
                known = {"rate_bps": record.rate_bps, "rtt_s": record.rtt_min_s}
                graph.add_edge(a, b, **{name: value for name, value in known.items() if value > 0})
        return graph

    def rates_bps(self) -> dict[tuple[str, str], float]:
        """The measured rates by (from, to), as `elastic.cluster.Cluster` wants them."""
        return {
            (sender, receiver): record.to(receiver)
            for (a, b), record in sorted(self.links.items())
            for sender, receiver in ((a, b), (b, a))
            if record.rates
        }

    def sources(self, joiner: str, neighbors: Iterable[str]) -> dict[str, Source]:
        """What Algorithms 1 and 2 need of each neighbour: t_prop + tau_sync, and t_trans (Eq. 19)."""
        sources = {}
        for neighbor in neighbors:
            record = self.links.get(link(joiner, neighbor), LinkRecord())
            report = self.nodes[neighbor].report if neighbor in self.nodes else None
            sync_s = report.sync_delay_s if report else 0.0
            propagation_s = (record.rtt_min_s or DEFAULT_RTT_S) / 2
            rate_bps = record.to(joiner) or DEFAULT_RATE_BPS
            sources[neighbor] = Source(propagation_s + sync_s, 8 / rate_bps)
        return sources

    def state_sizes(self) -> tuple[int, int, int]:
        """Bytes of the training state, and of its smallest and largest tensor; (0, 0, 0) before a report."""
        reports = [record.report for record in self.nodes.values() if record.report]
        best = max(reports, key=lambda report: report.state_bytes, default=None)
        return (best.state_bytes, *best.layer_bytes) if best else (0, 0, 0)

    def member_rows(self, now_s: float) -> tuple[MemberRow, ...]:
        """For the status: all nodes of the view, and the last that are out."""
        return tuple(
            _member_row(record, self.view.neighbors(record.id) if self.view else (), now_s)
            for record in self.nodes.values()
        )

    def link_rows(self, now_s: float) -> tuple[LinkRow, ...]:
        """For the status: all links of the view, measured or not."""
        used = self.view.trees_by_link if self.view else {}
        unknown = LinkRecord()
        return tuple(
            _link_row(each, self.links.get(each, unknown), used.get(each, ()), now_s)
            for each in sorted(self.links.keys() | used.keys())
        )

    def tree_rows(self) -> tuple[TreeRow, ...]:
        """For the status."""
        return (
            tuple(TreeRow(root=tree.root, share=tree.share) for tree in self.view.trees) if self.view else ()
        )

    def event_rows(self) -> tuple[EventRow, ...]:
        """For the status: all that is kept, the newest last."""
        return tuple(EventRow(**_fields(notice, EventRow)) for notice in self.events)

    def checkpoint_row(self) -> CheckpointRow | None:
        """For the status: the newest of which all members that write any have their parts. None: nobody does."""
        told = {
            node: record.report.counters
            for node, record in self.nodes.items()
            if record.state == "active" and record.report and CHECKPOINT_WRITING in record.report.counters
        }
        if not told:
            return None
        written = [each for each in told.values() if each.get(CHECKPOINT_STEP)]
        step = min((each[CHECKPOINT_STEP] for each in written), default=0)
        at_s = [each.get(CHECKPOINT_AT_S, 0) for each in written if each[CHECKPOINT_STEP] == step]
        writing = tuple(sorted(node for node, each in told.items() if each[CHECKPOINT_WRITING]))
        return CheckpointRow(step=step, time_s=float(max(at_s, default=0)), writing=writing)

    def refused(self) -> dict[str, int]:
        """Connections of strangers that all nodes together have refused, by reason, the most frequent first."""
        found: Counter[str] = Counter()
        for record in self.nodes.values():
            for name, count in record.report.counters.items() if record.report else ():
                if name.startswith(REFUSED):
                    found[name.removeprefix(REFUSED)] += count
        return dict(found.most_common())


def _link_row(each: Link, record: LinkRecord, trees: tuple[int, ...], now_s: float) -> LinkRow:
    a, b = each
    rate, back = record.rates.get(b), record.rates.get(a)
    return LinkRow(
        a=a,
        b=b,
        rate_mbit=_mbit(rate),
        rate_age_s=_age_s(rate, now_s),
        rate_source=rate.source if rate else "",
        rate_back_mbit=_mbit(back),
        rate_back_age_s=_age_s(back, now_s),
        rate_back_source=back.source if back else "",
        rtt_min_ms=round(record.rtt_min_s * 1e3, 3),
        rtt_median_ms=round(record.rtt_median_s * 1e3, 3),
        trees=trees,
    )


def _mbit(rate: Rate | None) -> float:
    return round(rate.bps / 1e6, 1) if rate else 0.0


def _age_s(rate: Rate | None, now_s: float) -> float | None:
    return round(now_s - rate.at_s, 1) if rate else None


def _member_row(record: NodeRecord, neighbors: tuple[str, ...], now_s: float) -> MemberRow:
    report = record.report
    told = (
        {**_fields(report, MemberRow), "report_age_s": round(now_s - record.reported_s, 1)} if report else {}
    )
    return MemberRow(
        **{
            **told,
            "node": record.id,
            "id": record.id,
            "state": record.state,
            "addresses": record.addresses,
            "joined_step": record.joined_step,
            "neighbors": neighbors,
        }
    )


def _fields(message: Message, row: type[msgspec.Struct]) -> dict[str, Any]:
    """Of a message, those that the row has, too."""
    return {
        name: getattr(message, name) for name in message.__struct_fields__ if name in row.__struct_fields__
    }
