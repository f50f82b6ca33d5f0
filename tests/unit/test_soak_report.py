"""`chaosnet.trials.soak_report`: it must notice what a soak promises cannot happen."""

import json

import pytest

from chaosnet.trials import soak_report as report
from chaosnet.trials.soak_report import ProcessLife

MB = 1_000_000


def life(node="a", steps=(0, 1, 2, 3), *, shift_s=0.0, fate="", number=1, state="s", loss=1.0, **final):
    """A process that did these steps, one every 0.1 s, with the hash of its state after even ones."""
    made = ProcessLife(node, number, fate=fate)
    for step in steps:
        told = {
            "time_s": 0.1 * step + shift_s,
            "step": step,
            "loss": loss / (step + 1),
            "samples": 8.0 * step,
        }
        if step % 2 == 0:
            told |= {"hash": f"{state}{step}", "rss": 100 * MB}
        made.add(json.dumps(told))
    made.add(json.dumps({"time_s": 0.0, "joined": 0, "seconds": 0.1}))
    if final:
        made.add(json.dumps({"time_s": 9.0, **final}))
    return made


def test_a_good_run_is_good():
    found = report.audit([life("a"), life("b", (1, 2, 3))])
    assert (found.last, found.compared, found.hashes_compared, found.undone) == (3, 3, 1, 0)
    assert not any((found.missing, found.skipped, found.repeated, found.disagreeing))


def test_a_step_that_nobody_saw_is_lost():
    assert report.audit([life(steps=(0, 1)), life("b", (3, 4))]).missing == (2,)


def test_a_step_that_one_process_left_out_is_lost_though_others_have_it():
    found = report.audit([life("a"), life("b", (0, 1, 3))])
    assert found.missing == () and found.skipped == ("b.1: 3",)


def test_a_step_done_twice_or_a_way_back_is_noticed():
    assert report.audit([life(steps=(0, 1, 1, 2))]).repeated == ("a.1: 1",)
    assert report.audit([life(steps=(0, 1, 2, 1, 2))]).repeated == ("a.1: 1",)


def test_another_loss_or_another_state_is_noticed():
    assert len(report.audit([life("a"), life("b", loss=2.0)]).disagreeing) == 4
    found = report.audit([life("a"), life("b", state="t")]).disagreeing
    assert found == ("state after step 0: a.1 and b.1 differ", "state after step 2: a.1 and b.1 differ")


def test_only_the_last_step_of_the_dead_may_have_been_done_again():
    dead = life("b", (0, 1, 2), fate="killed")
    dead.losses[-1] = 9.0
    dead.hashes[2] = "another"
    found = report.audit([life("a"), dead])
    assert found.undone == 1 and not found.disagreeing
    dead.fate = "left"
    assert len(report.audit([life("a"), dead]).disagreeing) == 2
    dead.fate = "killed"
    dead.losses[-2] = 9.0
    assert len(report.audit([life("a"), dead]).disagreeing) == 1


def test_who_was_out_goes_on_from_the_state_that_it_was_sent():
    back = life("b", (0, 1))
    back.add(json.dumps({"time_s": 0.4, "loaded": 3, "hash": "x"}))
    for step in (3, 4):
        back.add(json.dumps({"time_s": 0.5, "step": step, "loss": 1 / (step + 1), "samples": 8.0 * step}))
    others = life("a", (0, 1, 2, 3, 4))
    others.hashes[2] = "x"
    found = report.audit([others, back])
    assert not any((found.missing, found.skipped, found.repeated, found.disagreeing))
    others.hashes[2] = "y"  # It was sent another state.
    assert len(report.audit([others, back]).disagreeing) == 1
    back.loads[0] = (2, 2)  # It had the state before step 2, and never did step 2.
    assert report.audit([others, back]).skipped == ("b.1: 3 after the state before 2",)


def test_a_joiner_whose_first_state_was_overtaken_begins_with_the_next():
    """The scheduler died while it pulled; nothing was applied on top of the first state."""
    joiner = ProcessLife("b")
    for step in (1, 3):
        joiner.add(json.dumps({"time_s": 0.3, "loaded": step, "hash": f"x{step}"}))
    joiner.add(json.dumps({"time_s": 0.4, "step": 3, "loss": 1 / 4, "samples": 24.0}))
    assert report.audit([life("a"), joiner]).skipped == ()


def test_a_state_that_was_changed_on_purpose_may_differ_until_it_is_healed():
    astray = life("b", (0, 1, 2), state="t")
    astray.hashes[0] = "s0"
    astray.add(json.dumps({"time_s": 0.2, "diverged": 1}))
    assert astray.healed_at(1) is None and astray.is_astray(2)
    astray.add(json.dumps({"time_s": 0.4, "loaded": 4, "hash": "s3"}))
    for line in life(steps=(4,)).steps:
        astray.add(json.dumps({"time_s": 0.5, "step": line, "loss": 0.2, "samples": 32.0, "hash": "s4"}))
    others = life("a", (0, 1, 2, 3, 4))
    assert report.audit([others, astray]).disagreeing == ()
    summary = report.summarize([others, astray], [])
    assert (summary["divergences"], summary["divergences_not_healed"]) == (1, 0)
    assert summary["steps_until_healed"]["max"] == 3
    astray.hashes[4] = "t4"
    assert report.audit([others, astray]).disagreeing == ("state after step 4: a.1 and b.1 differ",)


def test_a_state_that_was_never_healed_breaks_a_promise():
    astray = life("b")
    astray.add(json.dumps({"time_s": 0.2, "diverged": 1}))
    summary = report.summarize([life("a"), astray], [])
    assert any("divergences_not_healed is 1" in each for each in report.broken_promises(summary))


def test_half_a_line_tells_nothing():
    made = life()
    made.add('{"time_s": 3.0, "st')
    assert list(made.steps) == [0, 1, 2, 3]


def test_recovery_lasts_until_the_slowest_survivor_has_a_step_nobody_had_before():
    a, b = life("a", (0, 1, 2, 3, 9)), life("b", (0, 1, 2, 9), shift_s=0.02)
    assert report.recovery_s([a, b], [a, b], fault_s=0.35) == pytest.approx(0.92 - 0.35)
    assert report.recovery_s([a, b], [life("c", (0, 1))], fault_s=0.35) is None


def test_the_first_election_after_a_fault_counts():
    a, b = life("a"), life("b")
    for made, node, time_s in ((a, "a", 1.0), (b, "b", 2.5), (a, "b", 2.5), (a, "a", 4.0)):
        made.add(json.dumps({"time_s": time_s + 0.1, "elected": node, "elected_s": time_s}))
    assert report.elected_after([a, b], 2.0) == (0.5, "b")
    assert report.elected_after([a, b], 4.0) is None


def remembered(seconds, megabytes_at):
    made = ProcessLife("a")
    made.rss = [(1000.0 + t, int(megabytes_at(t) * MB)) for t in range(seconds)]
    return report.growths([made])


def test_growth_is_that_of_medians_after_warm_up():
    (flat,) = remembered(200, lambda t: 300 - max(0, 30 - t))  # It grows only while it warms up.
    assert flat.share == 0.0
    (leak,) = remembered(200, lambda t: 300 + t)
    assert leak.share == pytest.approx((300 + 178) / (300 + 51) - 1, abs=0.01)
    (peak,) = remembered(200, lambda t: 900 if t % 50 == 0 else 300)
    assert peak.share == 0.0
    assert remembered(80, lambda t: 300 + t) == []  # Too short a life to tell.


def summary(**changed):
    ended = [life("a", final=3, hash="h"), life("b", final=3, hash="h")]
    return {**report.summarize(ended, []), **changed}


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps_lost": 1},
        {"steps_applied_twice": 2},
        {"steps_disagreeing": 1},
        {"replicas_identical": False},
        {"memory": {"largest_growth": 0.06}},
        {"elections": {"count": 3, "median": 1.2}},
    ],
)
def test_each_broken_promise_is_named(wrong):
    assert summary()["memory"]["largest_growth"] is None, "nobody lived long enough"
    assert report.broken_promises(summary()) == []
    (line,) = report.broken_promises(summary(**wrong))
    assert next(iter(wrong)).removesuffix("s").replace("election", "scheduler") in line


def test_of_a_large_state_a_source_may_hold_a_copy_and_no_more():
    def told(grown_mb):
        memory = {"largest_growth": 0.1, "largest_growth_mb": grown_mb}
        return report.broken_promises(summary(memory=memory) | {"mb": 45.0})

    assert told(130.0) == []
    (line,) = told(140.0)
    assert "135 MB, a copy of the state" in line


def test_states_of_a_run_that_was_stopped_are_not_compared():
    """Its processes were ended wherever they were."""
    assert report.broken_promises(summary(replicas_identical=False, stopped="n2.6 has done nothing")) == []


def test_of_a_large_state_only_long_lives_are_judged():
    found = life("a", final=3, hash="h")
    found.rss = [(1000.0 + 10 * each, 900) for each in range(20)]
    assert report.summarize([found], [])["memory"]["processes_judged"] == 1
    assert report.summarize([found], [], is_large=True)["memory"]["processes_judged"] == 0


@pytest.mark.parametrize("final", [{}, {"final": 4, "hash": "h"}, {"final": 3, "hash": "g"}])
def test_a_process_that_ended_elsewhere_is_no_identical_replica(final):
    assert not report.replicas_identical([life("a", final=3, hash="h"), life("b", **final)])
