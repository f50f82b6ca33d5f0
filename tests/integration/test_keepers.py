"""Members that keep parts of the training state: losses and weights are those of one process, whoever is lost."""

from __future__ import annotations

import os
import random
import re
import signal
import time

import pipeline_worker
import pytest
from cluster import Cluster, cluster_of

from chaosnet.node.state.checkpoint import scan
from chaosnet.node.state.checkpoint_plan import choose

pytestmark = pytest.mark.realtime

KILLS = int(os.environ.get("CHAOSNET_TEST_KILLS", "4"))
STEPS = max(150, 30 * KILLS)  # More than any of these clusters trains.


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Step: loss, and the state of each group of layers, of a run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    with cluster_of(0, folder, script=pipeline_worker.train, keepers=2) as cluster:
        node = cluster.start(pause_s=0.0)
        cluster.until(lambda: node.step >= STEPS, f"{STEPS} steps of one process", patience_s=STEPS)
        cluster.leave()
        return {step: (record["means"]["loss"], record["held"]) for step, record in cluster.steps().items()}


def check(cluster: Cluster, alone: dict[int, tuple[float, dict[str, str]]]) -> None:
    """No step was lost, each was that of one process, and whoever keeps a layer has what one process has."""
    cluster.check_steps()
    assert len(cluster.steps()) < len(alone), "the run of one process was too short"
    check_numbers(cluster, alone)


def check_numbers(cluster: Cluster, alone: dict[int, tuple[float, dict[str, str]]]) -> None:
    """The same, of the steps that were told."""
    for node in cluster.nodes:
        for record in node.told("step"):
            if record["applied"]:
                loss, groups = alone[record["step"]]
                assert record["means"]["loss"] == loss, f"step {record['step']} of {node.name}"
                assert record["held"].items() <= groups.items(), f"step {record['step']} of {node.name}"


def held(cluster: Cluster, groups: int) -> list[int]:
    """How many of the members of now keep each group, as they last told."""
    lasts = [[r for r in node.told("step") if r["applied"]][-1]["held"] for node in cluster.live()]
    return [sum(str(group) in each for each in lasts) for group in range(groups)]


@pytest.mark.parametrize("layout", ["2+2", "4"])
def test_each_layer_is_kept_by_two_and_trains_as_one_process_does(layout, alone, tmp_path):
    count = sum(map(int, layout.split("+")))
    with cluster_of(0, tmp_path, script=pipeline_worker.train, layout=layout, keepers=2) as cluster:
        cluster.grow(count)
        cluster.until(lambda: held(cluster, len(alone[1][1])) == [2] * len(alone[1][1]), "two of each")
        cluster.nodes[-1].advance(10)
        cluster.leave()
        check(cluster, alone)


def test_members_that_die_join_and_leave_lose_no_step(alone, tmp_path):
    with cluster_of(3, tmp_path, script=pipeline_worker.train, keepers=2) as cluster:
        killed = cluster.nodes[1].kill()
        cluster.without("b", killed)
        cluster.start().last("joined")
        cluster.nodes[0].advance(5)
        cluster.nodes[2].order(leave=True)
        assert cluster.nodes[2].exit_code() == 0
        cluster.nodes[0].advance(5)
        killed = cluster.nodes[0].kill()  # The founder, which has the scheduler.
        cluster.without("a", killed)
        cluster.nodes[3].advance(5)
        cluster.leave()
        check(cluster, alone)


@pytest.mark.slow
def test_kills_at_random_moments_change_no_bit(alone, tmp_path):
    rng = random.Random(8)
    with cluster_of(4, tmp_path, script=pipeline_worker.train, keepers=2) as cluster:
        for number in range(KILLS):
            victim = rng.choice(cluster.live())
            if number % 2:
                victim.order(die_in={"all-reduce": rng.randint(1, 60)})
                died_s = victim.dies()
            else:
                died_s = victim.kill()
            cluster.without(victim.name, died_s)
            cluster.live()[0].advance(3)
            cluster.start().last("joined")
        cluster.live()[0].advance(5)
        cluster.leave()
        check(cluster, alone)


def in_stage(node, number: int) -> list[str]:
    """Who computes that stage of each pipeline, as `node` last told."""
    return [
        each.split(">")[number].strip().split(" ")[0] for each in node.last("layout")["layout"].split("|")
    ]


def test_all_who_compute_a_stage_are_killed_at_once(alone, tmp_path):
    with cluster_of(0, tmp_path, script=pipeline_worker.train, layout="2+2", keepers=2) as cluster:
        nodes = {node.name: node for node in cluster.grow(5)}
        cluster.until(lambda: held(cluster, len(alone[1][1])) == [2] * len(alone[1][1]), "two of each")
        doomed = in_stage(nodes["a"], 1)
        rest = [node for name, node in nodes.items() if name not in doomed]
        for killed in [nodes[name].kill() for name in doomed]:
            at_s = killed
        cluster.until(
            lambda: any(r["at_s"] > at_s and not {*doomed} & {*r["by"]} for r in rest[0].told("step")),
            "steps of those who are left",
        )
        rest[0].advance(5)
        cluster.leave()
        check(cluster, alone)


def kill_both_keepers(cluster: Cluster, group: int) -> list:
    """Returns: those who are left."""
    keepers = [node for node in cluster.live() if str(group) in node.told("step")[-1]["held"]]
    assert len(keepers) == 2
    left = [node for node in cluster.live() if node not in keepers]
    for node in keepers:
        node.kill()
    return left


def test_layers_that_nobody_has_any_more_are_named(alone, tmp_path):
    with cluster_of(0, tmp_path, script=pipeline_worker.train, layout="5", keepers=2) as cluster:
        cluster.grow(5)
        cluster.until(lambda: held(cluster, len(alone[1][1])) == [2] * len(alone[1][1]), "two of each")
        for node in kill_both_keepers(cluster, 3):
            assert node.exit_code() == 1
            log = node.log.read_text()
            assert re.search(
                r"(layer \d+ is lost: all who kept it|layers \d.+ are lost: all who kept them) \(", log
            )
            assert "there is no checkpoint that all members can load" in log


@pytest.mark.slow
def test_lost_layers_are_taken_from_the_newest_checkpoint(alone, tmp_path):
    to_disk = {"directory": str(tmp_path / "saved"), "every": 5, "keepers": 2}
    with cluster_of(0, tmp_path, script=pipeline_worker.train, layout="5", **to_disk) as cluster:
        cluster.grow(5)
        cluster.until(lambda: held(cluster, len(alone[1][1])) == [2] * len(alone[1][1]), "two of each")
        cluster.nodes[0].reach(cluster.nodes[0].step + 12)
        left = kill_both_keepers(cluster, 3)
        for node in left:
            node.last("loaded again")
        again = left[0].last("loaded again")["step"]
        assert again and again % 5 == 0
        cluster.until(lambda: left[0].told("step")[-1]["step"] > again + 20, "steps that follow")
        cluster.leave()
        check_numbers(cluster, alone)
        assert f"all go on from the checkpoint of step {again}" in left[0].log.read_text()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_when_layers_are_lost(alone, tmp_path):
    to_disk = {"directory": str(tmp_path / "saved"), "every": 5, "keepers": 2}
    with cluster_of(0, tmp_path, script=pipeline_worker.train, layout="5", **to_disk) as cluster:
        cluster.grow(5)
        cluster.until(lambda: held(cluster, len(alone[1][1])) == [2] * len(alone[1][1]), "two of each")
        cluster.nodes[0].reach(cluster.nodes[0].step + 12)
        for node in cluster.nodes:
            node.signal(signal.SIGSTOP)
        newest = choose(scan(tmp_path / "saved"))
        shard = max(newest.path.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
        left = kill_both_keepers(cluster, 3)
        for node in left:
            node.signal(signal.SIGCONT)
        again = {node.last("loaded again")["step"] for node in left}
        cluster.until(lambda: left[0].told("step")[-1]["step"] > newest.step + 10, "steps that follow")
        cluster.leave()
        check_numbers(cluster, alone)
        assert len(again) == 1 and 0 < min(again) < newest.step
        assert f"passed over: {newest.path}" in left[0].log.read_text()


def test_the_whole_model_is_gathered_for_whoever_asks(alone, tmp_path):
    with cluster_of(3, tmp_path, script=pipeline_worker.train, keepers=2, gathers_at=20) as cluster:
        for node in cluster.nodes:
            node.reach(25)
        told = [node.last("gathered") for node in cluster.nodes]
        cluster.leave()
        check(cluster, alone)
    for each in told:
        assert each["parameters"] == told[0]["parameters"]


@pytest.mark.slow
def test_a_checkpoint_of_parts_goes_on_with_others(alone, tmp_path):
    to_disk = {"directory": str(tmp_path / "saved"), "every": 5, "keepers": 2}
    with cluster_of(0, tmp_path, script=pipeline_worker.train, layout="2+2", **to_disk) as cluster:
        for node in cluster.grow(4):
            node.reach(22)
        for node in cluster.nodes:
            node.kill()
        for node in cluster.nodes:
            node.process.join()
        cluster.settings["layout"] = "2+1"
        founder = cluster.start(resume=True)
        saved = founder.last("joined")["step"]
        assert saved >= 15 and saved % 5 == 0
        for _ in range(2):
            cluster.start().last("joined")
        founder.advance(10)
        cluster.leave()
        check_numbers(cluster, alone)


@pytest.mark.slow
def test_members_evaluate_the_whole_model(alone, tmp_path):
    with cluster_of(3, tmp_path, script=pipeline_worker.train, keepers=2, evaluates_every=10) as cluster:
        for node in cluster.nodes:
            node.reach(25)
        told = {record["step"]: record["loss"] for node in cluster.nodes for record in node.told("evaluated")}
        again = [record for node in cluster.nodes for record in node.told("evaluated")]
        cluster.leave()
        check_numbers(cluster, alone)
    assert {10, 20} <= told.keys()
    assert all(record["loss"] == told[record["step"]] for record in again)


def built(node) -> set[int]:
    """Layers of which that node has made the first values."""
    return {record["layer"] for record in node.told("built")}


def losses(cluster: Cluster) -> dict[int, float]:
    return {step: record["means"]["loss"] for step, record in cluster.steps().items()}


def check_losses(told: list[dict], alone: dict[int, float]) -> None:
    """Steps that were done again among them."""
    for record in told:
        if record["applied"]:
            assert record["means"]["loss"] == alone[record["step"]], f"step {record['step']}"


@pytest.fixture(scope="module")
def alone_with_functions(tmp_path_factory):
    """Step: loss, of one process that builds the whole model by functions."""
    folder = tmp_path_factory.mktemp("alone")
    with cluster_of(0, folder, script=pipeline_worker.train, functions=True) as cluster:
        node = cluster.start(pause_s=0.0)
        cluster.until(lambda: node.step >= STEPS, f"{STEPS} steps of one process", patience_s=STEPS)
        cluster.leave()
        assert built(node) == {1, 2, 3, 4, 5}
        return losses(cluster)


BY_NO_FUNCTION = [0, 1, 7]  # Of eight groups of parameters: words, places, and the norm of the head.
BUILT = {"functions": True, "layout": "4", "keepers": 2, "first_members": 4}


@pytest.mark.slow
def test_a_member_builds_what_it_needs_and_all_train_as_one_process_does(alone_with_functions, tmp_path):
    with cluster_of(0, tmp_path, script=pipeline_worker.train, **BUILT) as cluster:
        a, *others = cluster.grow(4)
        at_first = [built(node) for node in (a, *others)]
        assert set().union(*at_first) == {1, 2, 3, 4, 5} and all(len(each) < 5 for each in at_first)
        cluster.without("b", others[0].kill())
        cluster.start().last("joined")
        a.advance(10)
        cluster.leave()
        assert [built(node) for node in cluster.nodes] == [*at_first, set()]
        found = losses(cluster)
        assert len(found) > 10 and found.items() <= alone_with_functions.items()
        cluster.check_steps()


@pytest.mark.slow
def test_a_checkpoint_goes_on_of_which_no_member_holds_all(alone_with_functions, tmp_path):
    to_disk = {"directory": str(tmp_path / "saved"), "every": 5}
    with cluster_of(0, tmp_path, script=pipeline_worker.train, **BUILT, **to_disk) as cluster:
        for node in cluster.grow(4):
            node.reach(12)
        for node in cluster.nodes:
            node.kill()
        for node in cluster.nodes:
            node.process.join()
        before = len(cluster.nodes)
        founder = cluster.start(resume=True, gathers_first=True)
        joined = founder.last("joined")
        assert joined["step"] >= 10 and joined["there"] == BY_NO_FUNCTION
        stranger = cluster.start(directory=None)
        assert stranger.exit_code() == 1
        assert "of which each member reads its layers (expected" in stranger.log.read_text()
        rest = [cluster.start() for _ in range(3)]
        for node in (founder, *rest):
            node.reach(joined["step"] + 10)
        again = [node for node in cluster.nodes[before:] if node is not stranger]
        # Before any of them leaves: the last two keep all layers between them.
        assert all(len(record["held"]) < 8 for node in again for record in node.told("step"))
        cluster.leave()
        assert not set().union(*map(built, again))
        check_losses([record for node in again for record in node.told("step")], alone_with_functions)
        assert f"{founder.name} keeps the state of layers 0-6 (" not in founder.log.read_text()


@pytest.mark.slow
def test_who_goes_back_to_a_checkpoint_reads_what_it_needs(alone_with_functions, tmp_path):
    to_disk = {"directory": str(tmp_path / "saved"), "every": 5}
    settings = {**BUILT, "layout": "5", "first_members": 5}
    with cluster_of(0, tmp_path, script=pipeline_worker.train, **settings, **to_disk) as cluster:
        nodes = cluster.grow(5)
        for node in nodes:
            node.reach(12)
        left = kill_both_keepers(cluster, 3)
        for node in left:
            again = node.last("loaded again")
            assert again["step"] % 5 == 0 and again["there"] == BY_NO_FUNCTION
        left[0].reach(again["step"] + 20)
        cluster.leave()
        check_losses([record for node in nodes for record in node.told("step")], alone_with_functions)


@pytest.mark.slow
def test_who_goes_back_before_the_first_step_waits_for_the_others_all_the_same(tmp_path):
    to_disk = {"directory": str(tmp_path / "saved"), "every": 5}
    settings = {**BUILT, "layout": "", "first_members": 1}
    with cluster_of(0, tmp_path, script=pipeline_worker.train, **settings, **to_disk) as cluster:
        cluster.start().reach(12)
        cluster.nodes[0].kill()
        cluster.nodes[0].process.join()
        cluster.settings["first_members"] = 6
        keepers = [cluster.start(resume=True)]
        keepers[0].last("joined")
        for _ in range(4):
            node = cluster.start()
            cluster.until(lambda node=node: len(node.told("step")) > 3, "some steps without an update")
            keepers += [node] if node.told("step")[-1]["held"] else []
        assert len(keepers) == 2, "of what no function builds"
        for node in keepers:
            node.kill()
        left = cluster.live()
        for node in left:
            node.last("loaded again")
        time.sleep(1.0)
        assert not any(record["applied"] for node in left for record in node.told("step"))
        for _ in range(3):
            cluster.start(join=left[0].last("joined")["address"])
        cluster.until(lambda: any(record["applied"] for record in left[0].told("step")), "a step of six")
        cluster.leave()


def test_who_founds_may_die_before_the_first_step(tmp_path):
    settings = {"functions": True, "keepers": 2, "first_members": 3}
    with cluster_of(0, tmp_path, script=pipeline_worker.train, **settings) as cluster:
        a = cluster.start()
        a.last("joined")
        b = cluster.start()
        told = lambda: b.told("step")  # noqa: E731
        cluster.until(lambda: told() and told()[-1]["held"], "the layers that no function builds")
        a.kill()
        new = [cluster.start(join=b.last("joined")["address"]) for _ in range(2)]
        b.advance(5)
        cluster.leave()
        assert not built(a)
        assert set().union(*map(built, (b, *new))) == {1, 2, 3, 4, 5}
