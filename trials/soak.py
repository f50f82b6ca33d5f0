"""`chaosnet soak`: real processes that train for a long time while something happens to them every few seconds.

Nodes are processes on a testbed of relayed links (netem/relay.py), so that links can be cut without root; or, if
links are to have a rate, of network namespaces. What may happen is chosen in soak_faults.py; whether the promises
held is computed from what the nodes wrote down (soak_report.py). The next fault waits until the cluster has
recovered from the one before.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from .. import client
from ..netem import TestbedError, commands
from ..netem.netns import Netns, entered
from ..netem.relay import RelayTestbed
from ..netem.topology import Link, LinkSpec, link_name, mesh
from ..node.state.state_window import EVERY
from ..protocols.errors import ChaosnetError, ConfigError, PeerUnreachable
from ..protocols.status import Status
from . import soak_report as report
from .node_processes import (
    NodeProcess,
    end_all,
    lines_of,
    run_command,
    run_folder,
    sigterm_as_ctrl_c,
    wait_until,
)
from .soak_faults import MAX_RUNNING, USUAL, Fault, Kind, Situation, choose
from .soak_picture import draw
from .soak_report import ProcessLife

SCRIPT = Path(__file__).with_name("soak_digits.py")
RESTART_S = 1.0  # Until one that was killed is started again.
ASK_EVERY_S = 0.25
POLL_S = 0.02
RECOVERY_PATIENCE_S = 45.0  # For each fault to be over,
HEALING_STEPS = 2 * EVERY  # but for a state that differs so many steps: all of it is compared every so often,
CALM_PATIENCE_S = 90.0  # and for the cluster to be fit for the next.
HANG_S = 60.0  # A process without a step for so long, while the others step, hangs. Besides, it may take
HANG_STEPS = (
    6  # so many steps over a slow link: a joiner waits for another one's join, and steps until it is in.
)
START_PATIENCE_S = 120.0
EXPELLED = "is out of the cluster"  # How a process that was left behind ends.
HIT = (
    Kind.KILL, Kind.KILL_SCHEDULER, Kind.KILL_JOINER, Kind.FREEZE, Kind.LEAVE, Kind.HANGUP, Kind.RAISE,
)  # fmt: skip
DIFFER = "replicas differ"  # What all nodes say of a divergence.
STEPS_TO_VOTE = 3  # After its first step, a joiner gets its vote in the next view.
SLOWED = 0.1  # Of its rate, that a slow link has.


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for. `mb`: of parameters, 0 for a small net. `rate_mbit`: of each link, 0 for no limit."""

    seed: int = 0
    every_s: float = 5.0
    mb: float = 0.0
    rate_mbit: float = 0.0

    @property
    def hang_s(self) -> float:
        """A process without a step for so long hangs."""
        slow_step_s = 8 * self.mb / (SLOWED * self.rate_mbit) if self.rate_mbit else 0.0
        return HANG_S + HANG_STEPS * slow_step_s


class SoakFailed(ChaosnetError):
    """A promise was broken, or the cluster does not go on."""


class SoakProcess(NodeProcess):
    """One life of a node."""

    def __init__(self, life: ProcessLife, address: str, out: Path, **how: Any) -> None:
        self.life, self.address = life, address
        self.born_s = time.time()
        self.stopped = False
        self.frozen = False  # It was stopped for so long that the others may have gone on without it.
        super().__init__(life.label, out, life.add, **how)

    @property
    def newest_s(self) -> float:
        """When it last did something: a step, or its start."""
        return max(self.born_s, self.life.times_s[-1] if self.life.times_s else 0.0)


@dataclass(slots=True)
class Pending:
    """A fault that the cluster has not recovered from yet."""

    fault: Fault
    at_s: float
    scheduler: str
    members: int
    step: int
    survivors: list[SoakProcess]
    life: str = ""
    joins: SoakProcess | None = None
    told: dict[str, Any] = field(default_factory=dict)


class Soak:
    """The processes and what happens to them; leaving the block ends every process and the testbed."""

    def __init__(self, out: Path, wanted: Wanted, say: Callable[[str], None]) -> None:
        self.out, self.wanted, self.say = out, wanted, say
        self.rng = random.Random(wanted.seed)
        self.testbed = _testbed(wanted.rate_mbit)
        self.slow: set[Link] = set()
        self.names = tuple(self.testbed.topology.nodes)
        self.processes: dict[str, SoakProcess] = {}  # The running one of each node.
        self.lives: list[ProcessLife] = []
        self.faults: list[dict[str, Any]] = []
        self.unasked: list[str] = []  # Left behind, or failed to join, without a fault of ours.
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.pending: Pending | None = None
        self.status: Status | None = None
        self.status_s = self.asked_s = 0.0
        self.started_s = time.time()
        self._turn = itertools.count()
        self._changed_s = 0.0  # When something was done to a process last.

    def __enter__(self) -> Soak:
        self.testbed.up(self.testbed.topology)
        self.records = (self.out / "faults.jsonl").open("w", buffering=1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        end_all(self.processes.values())
        for process in self.processes.values():
            process.close()
        self.testbed.down()
        self.records.close()

    @property
    def enough(self) -> Path:
        return self.out / "enough"

    # --- processes ---

    def start(self, name: str) -> SoakProcess:
        """Start a node; it joins through those that run."""
        at = self.testbed.environment(name)
        ways = dict(each.split("=") for each in at["CHAOSNET_NEIGHBORS_AT"].split(","))
        join = [ways[other] for other, each in self.processes.items() if other != name and not each.stopped]
        if self.lives and not join:
            raise SoakFailed(f"nobody is left for {name} to join")
        options = ["--name", name, "--listen", at["CHAOSNET_LISTEN"]]
        options += ["--join", ",".join(join), "--neighbors", "3"] if join else []
        life = ProcessLife(name, 1 + sum(each.node == name for each in self.lives))
        command = run_command(SCRIPT, *options)
        command += ["--log", str(lines_of(self.out, life.label)), "--until", str(self.enough)]
        command += ["--seed", str(self.wanted.seed), "--workers", str(self.names.index(name) % 2)]
        command += ["--mb", str(self.wanted.mb)]
        process = SoakProcess(
            life, at["CHAOSNET_LISTEN"], self.out, command=command, start=self._starter(name)
        )
        self.lives.append(life)
        self.processes[name] = process
        return process

    def _starter(self, name: str) -> Callable[..., Any]:
        def start(command: list[str], env: dict[str, str], **options: Any) -> Any:
            return self.testbed.start(name, command, env=env, **options)

        return start

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.due, (time.time() + seconds, next(self._turn), action))

    def start_again(self, name: str) -> None:
        if self.pending is not None and self.pending.fault.kind is Kind.DIVERGE:
            self.later(RESTART_S, lambda: self.start_again(name))  # It might get the state that differs.
        elif name not in self.processes:
            self.start(name)

    # --- time passes ---

    def tick(self) -> None:
        """Read what was written, do what is due, see who has ended."""
        for process in list(self.processes.values()):
            process.read()
            if not process.runs:
                self._ended(process)
        while self.due and time.time() >= self.due[0][0]:
            heapq.heappop(self.due)[2]()
        if self.pending is not None:
            self._look_for_recovery(self.pending)
        self._look_for_hangs()
        if time.time() - self.asked_s >= ASK_EVERY_S:
            self._ask()
        time.sleep(POLL_S)

    def _ended(self, process: SoakProcess) -> None:
        process.close()
        life, code = process.life, process.process.returncode
        del self.processes[life.node]
        if life.fate in ("killed", "raised"):
            self.later(RESTART_S, lambda: self.start_again(life.node))
        if life.fate == "raised" and code != 1:
            raise SoakFailed(
                f"{life.label} was to end with an error and ended with {code}: {process.last_words()}"
            )
        if life.fate in ("killed", "raised") or life.final:
            return
        if life.fate == "left":
            if code:
                raise SoakFailed(f"{life.label} was to leave and ended with {code}: {process.last_words()}")
            return
        words = process.last_words()
        if life.joined and EXPELLED not in words:
            raise SoakFailed(f"{life.label} ended with exit code {code}: {words}")
        life.fate = "expelled"
        if not process.frozen:
            self.unasked.append(f"{life.label} after step {life.steps[-1] if life.steps else -1}: {words}")
            self.say(f"   unasked: {self.unasked[-1]}")
        self.later(RESTART_S, lambda: self.start_again(life.node))

    def _look_for_hangs(self) -> None:
        now_s, hang_s = time.time(), self.wanted.hang_s
        newest_s = max((each.newest_s for each in self.processes.values()), default=now_s)
        for process in self.processes.values():
            if not process.stopped and max(newest_s, now_s - hang_s) - process.newest_s > hang_s:
                raise SoakFailed(f"{process.label} has done nothing for {now_s - process.newest_s:.0f} s")

    def _ask(self) -> None:
        """One member, for the cluster's status; while a scheduler is being elected there is none."""
        asked = [each for each in self.processes.values() if each.life.joined and not each.stopped]
        self.asked_s = asked_s = time.time()
        if not asked:
            return
        one = asked[next(self._turn) % len(asked)]
        try:
            with self._near(one.life.node):
                self.status = client.status(one.address, deadline_s=0.6, keys=None)  # Testbeds use none.
        except PeerUnreachable:
            return
        self.status_s = asked_s

    def _near(self, node: str) -> AbstractContextManager[None]:
        """Where the node's address leads to it."""
        if self.testbed.kind == "relay":
            return nullcontext()
        return entered(commands.namespace(self.testbed.name, node))

    def wait(self, until: Callable[[], bool], what: str, patience_s: float) -> None:
        """Let time pass. Raises: SoakFailed if it takes too long."""
        wait_until(until, what, patience_s, self.tick, SoakFailed)

    # --- what happens ---

    def situation(self) -> Situation | None:
        """The cluster as it is now; None while its status is older than the last change."""
        if self.pending is not None or self.status is None or self.status_s <= self._changed_s:
            return None
        rows = {row.node: row for row in self.status.active}
        running = self.processes.items()
        present = {name: each for name, each in running if len(each.life.steps) >= STEPS_TO_VOTE}
        if any(row not in present or present[row].stopped for row in rows):
            return None  # Somebody who has gone is still in the view.
        overlay = {link_name(a, b) for a, row in rows.items() for b in row.neighbors if b in rows}
        starting = frozenset(name for name in self.names if self._starts_soon(name)) - {*self.processes}
        return Situation(
            names=self.names,
            running=starting | {*self.processes},
            starting=starting,
            members={name: present[name].born_s for name in rows},
            overlay=frozenset(overlay),
            cuts=frozenset(self.testbed.cuts),
            scheduler=self.status.scheduler,
            have_rates=bool(self.wanted.rate_mbit),
            slow=frozenset(self.slow),
        )

    def _starts_soon(self, name: str) -> bool:
        last = next((life for life in reversed(self.lives) if life.node == name), None)
        return last is not None and last.fate in report.DEAD

    def perform(self, fault: Fault, now: Situation) -> None:
        """Do it, and begin to look for the recovery from it."""
        process = self.processes.get(fault.node)
        hit = [process] if fault.kind in HIT else []
        survivors = [self.processes[name] for name in sorted(now.members)]
        self.pending = Pending(
            fault, time.time(), now.scheduler, len(now.members), self._newest_step(),
            [each for each in survivors if each not in hit],
            life=process.label if process else "",
        )  # fmt: skip
        self.say(self._text(fault, now))
        if fault.kind is Kind.CUT:
            self.testbed.cut((fault.node, fault.other))
            self.later(fault.seconds, lambda: self.testbed.heal((fault.node, fault.other)))
        elif fault.kind is Kind.SLOW:
            link = (fault.node, fault.other)
            self._set_rate(link, SLOWED)
            self.later(fault.seconds, lambda: self._set_rate(link, 1.0))
        elif fault.kind is Kind.JOIN:
            self.pending.joins = self.start(fault.node)
            self.pending.life = self.pending.joins.label
        else:
            assert process is not None
            self._strike(fault, process)
        self._changed_s = time.time()

    def _set_rate(self, link: Link, share: float) -> None:
        """Of the rate that links have."""
        (self.slow.add if share < 1 else self.slow.discard)(link)
        self.testbed.change({link: LinkSpec(rate_mbit=share * self.wanted.rate_mbit)})

    def _strike(self, fault: Fault, process: SoakProcess) -> None:
        match fault.kind:
            case Kind.KILL | Kind.KILL_SCHEDULER | Kind.KILL_JOINER:
                process.life.fate = "killed"
                process.process.kill()
            case Kind.LEAVE | Kind.HANGUP:
                process.life.fate = "left"
                process.process.send_signal(signal.SIGINT if fault.kind is Kind.LEAVE else signal.SIGHUP)
            case Kind.RAISE:
                process.life.fate = "raised"
                process.process.send_signal(signal.SIGUSR1)
            case Kind.DIVERGE:
                process.process.send_signal(signal.SIGUSR2)
            case Kind.PAUSE | Kind.FREEZE:
                process.process.send_signal(signal.SIGSTOP)
                process.stopped = True
                process.frozen |= fault.kind is Kind.FREEZE
                self.later(fault.seconds, lambda: self._continue(process))

    def _continue(self, process: SoakProcess) -> None:
        process.stopped = False
        process.born_s = time.time()  # So long it has time to come back.
        process.process.send_signal(signal.SIGCONT)
        self._changed_s = time.time()

    def _look_for_recovery(self, pending: Pending) -> None:
        fault = pending.fault
        alive = [each for each in pending.survivors if each.life.node in self.processes]
        lives = [each.life for each in alive if self.processes[each.life.node] is each and not each.life.fate]
        took_s = report.recovery_s(self._recent(), lives, pending.at_s)
        if took_s is None:
            if time.time() > pending.at_s + RECOVERY_PATIENCE_S:
                raise SoakFailed(f"no common step in {RECOVERY_PATIENCE_S:g} s after {fault}")
            return
        if fault.kind is Kind.DIVERGE and not self._is_healed(pending):
            return
        elected = report.elected_after(self._recent(), pending.at_s)
        if elected is None and fault.kind is Kind.KILL_SCHEDULER:
            if time.time() > pending.at_s + RECOVERY_PATIENCE_S:
                raise SoakFailed(f"nobody was elected in {RECOVERY_PATIENCE_S:g} s after {fault}")
            return
        asks = fault.node == pending.scheduler and fault.kind in HIT
        told = {
            **asdict(fault),
            "kind": str(fault.kind),
            "time_s": round(pending.at_s - self.started_s, 3),
            "life": pending.life,
            "step": pending.step,
            "members": pending.members,
            "scheduler": pending.scheduler,
            "elected": elected[1] if elected and asks else "",
            "election_s": round(elected[0], 4) if elected and asks else None,
            "recovery_s": round(took_s, 4),
        }
        self.faults.append(told)
        self.records.write(json.dumps(told) + "\n")
        self.pending = None
        self._changed_s = max(self._changed_s, time.time())

    def _is_healed(self, pending: Pending) -> bool:
        """Raises: SoakFailed if it was not, or nobody has said so."""
        process = self.processes[pending.fault.node]
        diverged = process.life.diverged
        if not diverged or process.life.healed_at(diverged[-1]) is None:
            if self._newest_step() > pending.step + HEALING_STEPS:
                raise SoakFailed(
                    f"{process.label} differs since {diverged} and has not pulled the state anew"
                )
            return False
        silent = [each.label for each in pending.survivors if each.runs and not each.has_said(DIFFER)]
        if silent:
            raise SoakFailed(f"{process.label} differed, and {', '.join(silent)} did not say so")
        return True

    def _recent(self) -> list[ProcessLife]:
        """Lives that can have written something lately."""
        return self.lives[-4 * MAX_RUNNING :] if len(self.lives) > 4 * MAX_RUNNING else self.lives

    def _newest_step(self) -> int:
        return max((each.life.steps[-1] for each in self.processes.values() if each.life.steps), default=-1)

    def _text(self, fault: Fault, now: Situation) -> str:
        what = f"{fault.node} - {fault.other}" if fault.other else fault.node
        lasts = f" for {fault.seconds:.1f} s" if fault.seconds else ""
        since_s = time.time() - self.started_s
        return (
            f"{since_s:7.1f} s  step {self._newest_step():6}  {len(now.members)} of {len(self.processes)} "
            f"are members: {fault.kind} {what}{lasts}"
        )

    # --- the run ---

    def begin(self) -> None:
        """The usual number of processes, all of them members."""
        for name in self.names[:USUAL]:
            self.start(name)
        self.wait(self.all_are_members, f"{USUAL} nodes are members", START_PATIENCE_S)
        self.say(f"{time.time() - self.started_s:7.1f} s  {USUAL} processes train")

    def all_are_members(self) -> bool:
        now = self.situation()
        return now is not None and len(now.members) == len(self.processes) == len(now.running)

    def harm(self, until: Callable[[], bool], only: Kind | None) -> None:
        """One fault after the other, in the rhythm asked for or as fast as the cluster recovers."""
        next_s = calm_s = time.time()
        while not until():
            self.tick()
            if self.pending is not None:
                calm_s = time.time()
                continue
            now = self.situation() if time.time() >= next_s else None
            if now is not None and (fault := choose(self.rng, now, only)) is not None:
                self.perform(fault, now)
                next_s = time.time() + self.wanted.every_s * self.rng.uniform(0.6, 1.4)
            elif time.time() > max(calm_s, next_s) + CALM_PATIENCE_S:
                raise SoakFailed(
                    f"the cluster was not fit for a fault in {CALM_PATIENCE_S:g} s: {self.status}"
                )

    def finish(self) -> None:
        """Undo what lasts, let all become members, and stop them after the same step."""
        while self.due:
            self.tick()
        for link in sorted(self.testbed.cuts):
            self.testbed.heal(link)
        while self.pending is not None:  # What takes too long raises.
            self.tick()
        self.wait(self.all_are_members, "all are members at the end", CALM_PATIENCE_S)
        self.enough.touch()
        self.wait(lambda: not self.processes, "all have ended", START_PATIENCE_S)
        self.enough.unlink()


def _testbed(rate_mbit: float) -> Netns | RelayTestbed:
    """A mesh of all that there may be. Raises: ConfigError if links cannot have a rate here."""
    name = f"soak{os.getpid()}"
    if not rate_mbit:
        return RelayTestbed(name, mesh(MAX_RUNNING), routes=False)
    if os.geteuid() != 0:
        raise ConfigError("--rate: network namespaces need root (without --rate nobody does)")
    made = Netns(name, mesh(MAX_RUNNING, LinkSpec(rate_mbit=rate_mbit)), routes=False)
    try:
        made.check(made.topology)
    except TestbedError as error:
        raise ConfigError(f"--rate: {error}") from None
    return made


def run_soak(minutes: float, wanted: Wanted, out: Path, kills: int | None) -> None:
    """Soak, sum up, draw. `kills`: of schedulers, in a row, and nothing else. Raises: SoakFailed, ConfigError."""
    run_folder(out)
    stopped = ""
    with sigterm_as_ctrl_c(), Soak(out, wanted, click.echo) as soak:
        try:
            try:
                _run(soak, minutes, kills)
            except KeyboardInterrupt:
                stopped = report.INTERRUPTED
                soak.say("\nCtrl+C: no more faults; all finish (again: end at once)")
                soak.finish()
        except SoakFailed as error:
            stopped = str(error)
    summary = {
        "minutes": round((time.time() - soak.started_s) / 60, 2),
        "every_seconds": wanted.every_s,
        "seed": wanted.seed,
        "mb": wanted.mb,
        "rate_mbit": wanted.rate_mbit,
        "stopped": stopped,
        **report.summarize(soak.lives, soak.faults, is_large=bool(wanted.mb)),
        "left_behind_unasked": soak.unasked,
    }
    broken = report.broken_promises(summary)
    if stopped and stopped != report.INTERRUPTED:
        broken = [stopped, *broken]
    summary["broken"] = broken
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    title = f"{summary['processes']} processes, {summary['faults']} faults, {summary['steps']:,} steps"
    draw(out / "soak.png", soak.lives, soak.faults, soak.started_s, f"chaosnet soak: {title}")
    _tell(summary, out)
    if broken:
        raise SoakFailed(f"soak: {'; '.join(broken)} (the nodes' logs are in {out})")


def _run(soak: Soak, minutes: float, kills: int | None) -> None:
    soak.begin()
    if kills is None:
        until_s = time.time() + 60 * minutes
        soak.harm(lambda: time.time() >= until_s, None)
    else:
        soak.harm(lambda: len(soak.faults) >= kills, Kind.KILL_SCHEDULER)
    soak.finish()


def _tell(summary: dict[str, Any], out: Path) -> None:
    memory, elections = summary["memory"], summary["elections"]
    click.echo(
        f"\n{summary['faults']} faults in {summary['minutes']:.1f} min on {summary['processes']} processes"
    )
    for kind, found in summary["recovery_seconds_by_kind"].items():
        click.echo(
            f"  {kind:15} {found['count']:4}   next common step after {found['median']:.2f} s "
            f"(median), {found['p90']:.2f} (90 %), {found['max']:.2f} (longest)"
        )
    if elections["count"]:
        click.echo(
            f"new scheduler: {elections['count']} times, median {elections['median']:.3f} s, "
            f"longest {elections['max']:.3f} s"
        )
    click.echo(
        f"steps: {summary['steps']:,}: {summary['steps_lost']} lost, {summary['steps_applied_twice']} twice, "
        f"{summary['steps_disagreeing']} seen differently ({summary['steps_compared']:,} compared, "
        f"{summary['states_compared']:,} states)"
    )
    if summary["stopped"] in ("", report.INTERRUPTED):
        click.echo(f"states at the end: {'identical' if summary['replicas_identical'] else 'DIFFERENT'}")
    if healed := summary["steps_until_healed"].get("count"):
        found = summary["steps_until_healed"]
        click.echo(
            f"states changed on one node: {summary['divergences']}, {healed} found, named and healed after "
            f"{found['median']:.0f} steps (median), {found['max']:.0f} (most)"
        )
    if memory["processes_judged"]:
        click.echo(
            f"memory of {memory['processes_judged']} processes that lived long enough: grew by "
            f"{memory['median_growth']:.1%} (median), {memory['largest_growth']:.1%} (most)"
        )
    else:
        click.echo("memory: not judged, no process lived long enough")
    if summary["left_behind_unasked"]:
        click.echo(f"left behind unasked: {len(summary['left_behind_unasked'])}")
    click.echo(f"written: {out / 'summary.json'}, {out / 'faults.jsonl'}, {out / 'soak.png'}")
