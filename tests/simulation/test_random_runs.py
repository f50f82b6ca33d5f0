"""Many random lives of a cluster, each from one seed: crashes, cuts, pauses, restarts, joins and leaves.

Safety is checked after every event, and that all come to rest once the faults are over. For a longer search:
`chaosnet simulate --schedules 10000`.
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from chaosnet.scheduler.joins import Joins
from chaosnet.simulator import run, run_many
from chaosnet.simulator.coverage import crashed, expected
from chaosnet.simulator.random_run import AIMS, NODES, RandomRun, Violation

SEEDS = 1000

# Found something at the time; other code, other lives. More are told as scripts, in test_bugs_found.py and
# simulator/stories.py.
KEPT = {
    "an earlier life's news was corrected one by one": (521, NODES),
    "a joiner answered the flush of its earlier membership, and was sent away again and again": (
        10579,
        (3, 12),
    ),
    "a joiner fell behind before it had a view": (1021, NODES),
    "two members were linked by one that had left, and it was to install their view": (11719, NODES),
    "a step was completed in a view, and who had not completed it asked for a quorum of the one before": (
        18615,
        NODES,
    ),
    "the only quorum of a view was with one who was parked in the next": (15133, NODES),
    "an observer lost its way, and was made a member for which all waited": (20104, NODES),
    "two members were linked by one that fell behind, and it was to install their view": (17847, NODES),
    "a link was back before it was missed, and the node said for ever that it is parked": (41189, NODES),
    "an observer took its first step for one that it had to catch up with as a member, before": (
        51168,
        NODES,
    ),
    "who waited for one that is parked a step ahead did not say so": (49980, NODES),
    "who was elected before stood again, a view behind, and who could be elected waited for it": (
        104380,
        NODES,
    ),
    "serials of three lives flooded in circles": (15162, NODES),
    "a reset connection passed for a crash": (1278, NODES),
    "two halves of two nodes were scheduler in one term": (1154, NODES),
    "a junior went on alone after a senior that had gone on without it": (1669, NODES),
    "a link that had been voted for was closed as that of an earlier view": (392245, NODES),
    "a neighbour was out when its link opened, and never told that others had gone on": (375513, NODES),
    "who asked to be let in was told again and again that it is out of its view of before": (616585, NODES),
    "a process that was started again was refused, as it had asked at two nodes": (1447, NODES),
    "two schedulers of one term: an observer had told the one left behind that the other is dead": (
        2011052,
        NODES,
    ),
    "what a dead source had sent was asked for again, though it was here, and held up the rest": (
        2169729,
        NODES,
    ),
    "a joiner was told of a later life, which it had had before: nobody heard it say so": (1066384, NODES),
    "a member whose clock was set back passed for dead where one heard of its later life": (2324271, NODES),
    "the flush that was to drop a dead member took longer than a namesake is waited for": (2429032, NODES),
    "two joiners that had lost their ways to the scheduler asked only each other": (2445752, NODES),
    "one that had gone on alone came back, and died before it could say so": (2662424, NODES),
}
# The same of hard lives, which begin with 2 to 5 nodes.
KEPT_HARD = {
    "a joiner was told to dial one that can only dial": 1005521,
    "a joiner waited for a source whose link had closed before it heard the plan": 1012103,
    "a source waited for a joiner whose link had closed before it came to the view": 3000044,
    "an observer had heard of a life that all others had forgotten": 1014056,
    "two schedulers of one term, one by the crash of the other, which had been one by a farewell": 1014395,
    "one that a cut had kept from being dialled while it joined passed for undialable for ever": 1047559,
    "one that had gone on alone was heard, and died: a crash, for the one that it had left behind": 1060847,
    "a joiner of our view was heard in a newer one, and told that the one who had gone on had crashed": 1064818,
    "a joiner heard of a flush that had ended before it came, and froze": 1078987,
    "an observer knew of a life of a joiner that all members had forgotten": 1082987,
    "an observer that had begun at a step was taken for one that had the result before it": 1086670,
    "a member believed what its earlier life had said of its own link": 1086790,
    "a member that had no state was left alone": 1020832,
    "the senior of two left, and was cut off before the vote that let it go came back": 1022615,
    "an observer that had asked again was in the view before it heard the plan": 1022626,
}

# The same of lives in which bytes take time.
KEPT_WITH_RATES = {
    "the state overtook the results of 400 steps, and all waited minutes for these": 20001792,
    "a joiner that asked already was made to ask once more by each word of the view it had left": 9105326,
    "nobody had completed a step yet, so a member without the state was not let go": 324698,
}


@pytest.mark.slow
def test_every_random_life_keeps_all_rules():
    summary = run_many(range(SEEDS), processes=os.cpu_count())
    assert not summary.violations, summary.describe()
    assert summary.total("crashes") > SEEDS / 2
    assert summary.total("steps") > 20 * SEEDS
    assert summary.total("rejoins") > SEEDS / 20
    assert summary.coverage.keys() <= expected(AIMS), "coverage.py does not know of all there is"


@pytest.mark.parametrize(("seed", "nodes"), KEPT.values(), ids=KEPT.keys())
def test_seeds_that_once_failed_keep_all_rules(seed, nodes):
    run(seed, nodes=nodes)


@pytest.mark.parametrize("seed", KEPT_HARD.values(), ids=KEPT_HARD.keys())
def test_hard_seeds_that_once_failed_keep_all_rules(seed):
    run(seed, nodes=(2, 5), hard=True)


@pytest.mark.parametrize("seed", KEPT_WITH_RATES.values(), ids=KEPT_WITH_RATES.keys())
def test_seeds_with_rates_that_once_failed_keep_all_rules(seed):
    run(seed, rates=True)


def test_a_member_with_another_state_is_noticed():
    """As if one step had been applied otherwise; none of its messages differs."""
    for seed in range(20):
        life = RandomRun(seed)
        apply, spoilt = life.sim._apply, []

        def spoil(node, effect, who, apply=apply, spoilt=spoilt):
            apply(node, effect, who)
            if not spoilt and effect.step == 3:
                node.log[-1] = replace(node.log[-1], state=1)
                spoilt.append(node)

        life.sim._apply = spoil
        try:
            life.run()
        except Violation as found:
            assert "STATES DIFFER" in str(found)
            return
    raise AssertionError("nobody noticed")


def test_a_joiner_that_is_never_let_in_is_noticed(monkeypatch):
    original = Joins.on_scale_out

    def ignore(self, request, now_s):
        return [] if request.node.startswith("j") else original(self, request, now_s)

    monkeypatch.setattr(Joins, "on_scale_out", ignore)
    with pytest.raises(Violation, match=r"j0 \(joining\) made no step"):
        for seed in range(20):
            run(seed)


@pytest.mark.slow
def test_crashes_strike_at_both_ends_of_the_rare_messages():
    """Uniform crashes miss them, so nothing would be tested."""
    rare = {"Flush", "FlushOk", "Install", "VoteRequest", "VoteReply", "Prepare"}
    missing = {crashed(end, kind) for kind in rare for end in ("sender", "receiver")}
    for seed in range(400):
        missing -= run(seed).coverage
        if not missing:
            return
    raise AssertionError(f"never struck at {sorted(missing)}")


def digest_in_new_process(seed, hash_seed):
    code = f"from chaosnet.simulator import run; print(run({seed}, record=True).digest)"
    env = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("seed", [3, 11])
def test_one_seed_is_one_life_whatever_the_hash_seed(seed):
    assert digest_in_new_process(seed, 1) == digest_in_new_process(seed, 2) == digest_in_new_process(seed, 77)


def test_another_seed_is_another_life():
    assert run(1).digest != run(2).digest
