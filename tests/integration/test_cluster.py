"""Clusters of real processes over loopback: what happens to nodes, and what it must not do to training.

Every test ends with `cluster.finish()`: the states of all nodes were equal after every step, no step was lost
or applied twice, each sample of an epoch was used once, and the losses are those of one process that trains
on the same global batches.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
from cluster import busy_machine, cluster_of, longest_gap_s

pytestmark = pytest.mark.realtime

BALLAST_BYTES = 24 << 20  # Of extra state: a dozen pieces, enough to die in the middle of them.
LITTLE_CHUNKS = 256  # Bytes; so that the all-reduce of the small model has several.


# --- joining ---


@pytest.mark.parametrize("blocking", [False, True], ids=["streaming", "blocking"])
def test_nodes_that_join_while_others_train_train_on_with_them(tmp_path, blocking):
    with cluster_of(1, tmp_path, blocking=blocking, ballast_bytes=BALLAST_BYTES, hash_every=10) as cluster:
        cluster.grow(2)
        before_s = time.monotonic()
        joiner = cluster.start()
        joined = joiner.last("joined")
        joiner.advance(30)
        gap_s = longest_gap_s(cluster.nodes[0], before_s)
        print(f"join: {joined['seconds']:.3f} s, longest gap of the others {gap_s:.3f} s")
        assert sum(joined["bytes_by_source"].values()) >= BALLAST_BYTES
        assert len(joined["bytes_by_source"]) == 2, "both neighbours share the work"
        cluster.finish()


def test_three_nodes_may_join_at_once(tmp_path):
    with cluster_of(1, tmp_path) as cluster:
        joiners = [cluster.start() for _ in range(3)]
        for joiner in joiners:
            joiner.last("joined")
        joiners[-1].advance()
        assert [node.told("step")[-1]["is_main"] for node in cluster.nodes] == [True, False, False, False]
        latest = cluster.nodes[0].step  # Before the steps are looked at: there may be another meanwhile.
        assert len(cluster.steps()[latest]["by"]) == 4
        cluster.finish()


def test_a_node_joins_while_another_leaves(tmp_path):
    with cluster_of(3, tmp_path) as cluster:
        leaver, joiner = cluster.nodes[1], cluster.start()
        leaver.order(leave=True)
        assert leaver.ended()["how"] == "returned"
        joiner.last("joined")
        joiner.advance()
        assert joiner.told("step")[-1]["by"] == ["a", "c", "d"]
        cluster.finish()


# --- leaving ---


def test_a_node_leaves_and_the_others_do_not_wait(tmp_path):
    with cluster_of(3, tmp_path) as cluster:
        leaver = cluster.nodes[2]
        asked_s = time.monotonic()
        leaver.order(leave=True)
        assert leaver.exit_code() == 0
        assert "left after step" in leaver.log.read_text()
        cluster.nodes[0].advance()
        gap_s = longest_gap_s(cluster.nodes[0], asked_s)
        print(f"leaving: longest gap of the others {gap_s:.3f} s")
        assert gap_s < 0.5
        assert not cluster.notices("node-failure")
        cluster.finish()


def test_the_scheduler_leaves_and_another_node_takes_the_role(tmp_path):
    with cluster_of(3, tmp_path) as cluster:
        cluster.nodes[0].order(leave=True)
        assert cluster.nodes[0].exit_code() == 0
        cluster.grow(1)  # Needs a scheduler.
        cluster.finish()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_a_node_finish_its_step_and_leave(tmp_path, number):
    with cluster_of(3, tmp_path) as cluster:
        leaver = cluster.nodes[1]
        leaver.signal(number)
        assert leaver.exit_code() == 0
        assert "b left after step" in leaver.log.read_text()
        cluster.nodes[0].advance()
        cluster.finish()


def test_a_second_ctrl_c_leaves_at_once(tmp_path):
    with cluster_of(2, tmp_path) as cluster:
        leaver = cluster.nodes[1]
        leaver.order(rest_s=60)  # It is busy with something else than training.
        leaver.last("rests")
        leaver.signal(signal.SIGINT)
        time.sleep(0.2)
        assert leaver.alive
        leaver.signal(signal.SIGINT)
        assert leaver.exit_code() == 130
        cluster.nodes[0].advance()
        cluster.finish()


def test_all_nodes_get_ctrl_c_at_once(tmp_path):
    with cluster_of(3, tmp_path) as cluster:
        for node in cluster.nodes:
            node.signal(signal.SIGINT)
        assert [node.exit_code() for node in cluster.nodes] == [0, 0, 0]
        cluster.check()


SCRIPTS = """
import os, sys, time, torch, torch._dynamo, worker
from chaosnet import Cluster, Trainer
pids = {}
for ending in ("raises", "exits", "ends", "goes on"):  # Four scripts, one import of torch.
    pids[ending] = os.fork()
    if not pids[ending]:
        break
else:
    print(pids["goes on"], flush=True)
    print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids.values()])
    os._exit(0)

worker.die_with_parent()
os.dup2(os.open(ending + ".log", os.O_WRONLY | os.O_CREAT), 2)
model = worker.make_model()
trainer = Trainer(model, worker.make_optimizer(model), cluster=Cluster(join=sys.argv[1]))
for batch in trainer.batches(worker.Numbered(), batch_size=4, epochs=10**6):
    worker.loss_of(model, batch.x, batch.y).backward()
    trainer.update()
    if ending == "raises":
        raise ValueError("a mistake of the user's")
    if ending == "exits":
        sys.exit()
    if ending == "ends":
        break
"""


@contextmanager
def ended(scripts):
    """Whatever happens: else a failed test would wait for them for ever."""
    try:
        yield
    finally:
        scripts.kill()


@pytest.mark.slow
def test_scripts_that_know_nothing_of_leaving_leave_anyway(tmp_path):
    """At their end, at sys.exit(), at Ctrl+C. One that fails says goodbye. The others go on."""
    with cluster_of(2, tmp_path) as cluster:
        address = cluster.nodes[0].last("joined")["address"]
        command = [sys.executable, "-c", SCRIPTS, address]
        path = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=path)
        with process as scripts, ended(scripts):
            assert scripts.stdout is not None
            goes_on = int(scripts.stdout.readline())
            cluster.until(lambda: len(cluster.notices("joined")) >= 5, "all have joined", patience_s=30)
            cluster.until(lambda: len(cluster.notices("left", "node-failure")) >= 3, "three are gone")
            cluster.until(lambda: len(cluster.nodes[0].told("step")[-1]["by"]) == 3, "the fourth trains")
            os.kill(goes_on, signal.SIGINT)
            exit_codes, _ = scripts.communicate(timeout=20)
        errors = {
            ending: (tmp_path / f"{ending}.log").read_text()
            for ending in ("raises", "exits", "ends", "goes on")
        }
        assert exit_codes == "[1, 0, 0, 0]\n", errors
        goodbye, _, traceback = errors["raises"].partition("its script ended with ValueError: a mistake")
        assert "left after step" in goodbye and "ValueError: a mistake" in traceback
        assert all("left after step" in errors[ending] for ending in ("exits", "ends", "goes on"))
        assert not cluster.notices("node-failure")
        cluster.nodes[0].advance()
        assert cluster.nodes[0].told("step")[-1]["by"] == ["a", "b"]
        cluster.check_steps()


# --- crashing ---


@pytest.mark.slow
def test_recovery_from_kill_9_takes_less_than_half_a_second(tmp_path):
    with cluster_of(4, tmp_path) as cluster:
        seconds = []
        for _ in range(5):
            victim = next(node for node in reversed(cluster.live()) if node is not cluster.scheduler())
            seconds.append(cluster.without(victim.name, victim.kill()))
            cluster.grow(1)
        print("recovery from kill -9:", ", ".join(f"{each:.3f}" for each in seconds), "s")
        assert statistics.median(seconds) <= 0.5
        cluster.finish()


def test_the_death_of_the_scheduler_costs_training_nothing_but_that_node(tmp_path):
    with cluster_of(4, tmp_path) as cluster:
        seconds = []
        for _ in range(3):
            victim = cluster.scheduler()
            seconds.append(cluster.without(victim.name, victim.kill()))
            cluster.grow(1)  # The new scheduler does its work.
            assert [node.told("step")[-1]["is_main"] for node in cluster.live()].count(True) == 1
        print("recovery from the scheduler's death:", ", ".join(f"{each:.3f}" for each in seconds), "s")
        assert statistics.median(seconds) <= 0.5
        cluster.finish()


@pytest.mark.parametrize("who", ["scheduler", "other"])
def test_crashes_at_any_point_of_an_all_reduce_lose_nothing(tmp_path, who):
    with cluster_of(3, tmp_path, chunk_bytes=LITTLE_CHUNKS) as cluster:
        seconds = []
        for effect in (1, 2, 3, 5, 8, 13):  # Of the dozen that make a step.
            scheduler = cluster.scheduler()
            others = [node for node in cluster.live() if node is not scheduler]
            victim = scheduler if who == "scheduler" else others[effect % 2]
            victim.order(die_in={"all-reduce": effect})
            seconds.append(cluster.without(victim.name, victim.dies()))
            cluster.grow(1)
        print("recovery:", ", ".join(f"{each:.3f}" for each in seconds), "s")
        cluster.finish()


@pytest.mark.parametrize("victim", [0, 1], ids=["scheduler", "other"])
def test_of_two_nodes_either_may_die(tmp_path, victim):
    with cluster_of(2, tmp_path) as cluster:
        dead = cluster.nodes[victim]
        print(f"recovery: {cluster.without(dead.name, dead.kill()):.3f} s")
        cluster.grow(1)
        cluster.finish()


@pytest.mark.slow
def test_what_loaders_have_fetched_ahead_is_used_once_whoever_comes_and_goes(tmp_path):
    with cluster_of(2, tmp_path, loader_workers=1) as cluster:
        cluster.grow(1)
        for victim in (2, 0):
            cluster.nodes[1].advance(30)
            cluster.without(cluster.nodes[victim].name, cluster.nodes[victim].kill())
            cluster.grow(1)
        cluster.nodes[1].advance(30)
        cluster.finish()


def test_two_of_four_may_die_at_once(tmp_path):
    with cluster_of(4, tmp_path) as cluster:
        cluster.nodes[1].kill()
        died_s = cluster.nodes[3].kill()
        cluster.without("b", died_s)
        cluster.without("d", died_s)
        cluster.nodes[0].advance()
        cluster.finish()


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [False, True], ids=["streaming", "blocking"])
@pytest.mark.parametrize("source", [0, 1], ids=["scheduler", "other"])
def test_a_source_may_die_while_it_sends_the_state(tmp_path, source, blocking):
    with cluster_of(3, tmp_path, ballast_bytes=BALLAST_BYTES, hash_every=10, blocking=blocking) as cluster:
        victim = cluster.nodes[source]
        victim.order(die_in={"serve": 3})
        joiner = cluster.start(neighbors=3)
        died_s = victim.dies()
        joined_s = joiner.last("joined")["at_s"]
        joiner.advance()
        print(f"joined {joined_s - died_s:.3f} s after a source died")
        cluster.finish()


def test_the_only_source_may_die_while_it_sends_the_state(tmp_path):
    with cluster_of(3, tmp_path, ballast_bytes=BALLAST_BYTES, hash_every=10) as cluster:
        victim = cluster.nodes[0]  # The first of those with the fewest links.
        victim.order(die_in={"serve": 3})
        joiner = cluster.start(neighbors=1)
        died_s = victim.dies()
        joined_s = joiner.last("joined")["at_s"]
        joiner.advance()
        print(f"joined {joined_s - died_s:.3f} s after its only source died")
        cluster.finish()


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [False, True], ids=["streaming", "blocking"])
def test_a_joiner_may_die_while_the_state_comes(tmp_path, blocking):
    with cluster_of(3, tmp_path, ballast_bytes=BALLAST_BYTES, hash_every=10, blocking=blocking) as cluster:
        joiner = cluster.start(die_in={"store": 3})
        died_s = joiner.dies()
        cluster.nodes[0].advance()
        gap_s = longest_gap_s(cluster.nodes[0], died_s - 1)
        print(f"longest gap of the others: {gap_s:.3f} s")
        assert gap_s < 0.5
        cluster.grow(1)
        cluster.finish()


@pytest.mark.slow
def test_the_scheduler_may_die_while_a_node_joins(tmp_path):
    with cluster_of(3, tmp_path, ballast_bytes=BALLAST_BYTES, hash_every=10) as cluster:
        joiner = cluster.start(links=["b", "c"])
        cluster.until(lambda: any(r["node"] == joiner.name for r in cluster.notices("replication")), "a plan")
        died_s = cluster.nodes[0].kill()
        joined_s = joiner.last("joined")["at_s"]
        joiner.advance()
        print(f"joined {joined_s - died_s:.3f} s after the scheduler died")
        cluster.finish()


# --- standing still ---


@pytest.mark.parametrize("who", [0, 2], ids=["scheduler", "other"])
def test_a_stopped_node_holds_the_others_for_two_seconds_and_is_told_and_back_when_it_wakes(tmp_path, who):
    with cluster_of(4, tmp_path) as cluster:
        stopped = cluster.nodes[who]
        stopped_s = stopped.signal(signal.SIGSTOP)
        seconds = cluster.without(stopped.name, stopped_s)
        print(f"recovery from SIGSTOP: {seconds:.3f} s")
        assert seconds <= 2
        cluster.nodes[1].advance()
        stopped.signal(signal.SIGCONT)
        cluster.until(lambda: f"{stopped.name} is in again at step" in stopped.log.read_text(), "it is back")
        cluster.nodes[1].advance()
        cluster.finish()


@pytest.mark.slow
def test_a_busy_machine_makes_nobody_suspect_anybody(tmp_path):
    with cluster_of(4, tmp_path) as cluster:
        before = cluster.nodes[0].step
        with busy_machine(2 * (psutil.cpu_count() or 1), seconds=8):
            pass
        print(f"{cluster.nodes[0].step - before} steps while the machine was busy")
        assert len(cluster.live()) == 4
        assert not cluster.notices("node-failure", "link-failure", "scheduler")
        cluster.finish()


@pytest.mark.slow
def test_a_node_may_pause_to_evaluate(tmp_path):
    with cluster_of(3, tmp_path) as cluster:
        cluster.nodes[1].order(rest_s=3)
        cluster.nodes[1].last("rests")
        rests_at = cluster.nodes[1].step
        time.sleep(2.5)
        assert cluster.nodes[0].step <= rests_at + 1, "training is synchronous"
        cluster.nodes[1].advance()
        assert len(cluster.live()) == 3 and not cluster.notices("node-failure", "link-failure", "scheduler")
        cluster.finish()
