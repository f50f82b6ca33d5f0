"""Workers that become slow: noticed in time, and nobody else."""

import numpy as np
import pytest

from chaosnet.errors import PlanInfeasible
from chaosnet.scheduler.elastic.fail_slow import FailSlow, Recovered, Settings, Slow


def run(watch: FailSlow, seconds: np.ndarray, first_step: int = 0) -> list[Slow | Recovered]:
    """seconds[step, worker] of workers w0, w1, ..."""
    events = []
    for step, times in enumerate(seconds, start=first_step):
        for worker, each in enumerate(times):
            events += watch.observe(f"w{worker}", step, float(each))
    return events


def noisy(rng: np.random.Generator, steps: int, workers: int, sigma: float = 0.05) -> np.ndarray:
    """Every worker has its own usual time, and a log-normal noise around it."""
    return rng.uniform(0.5, 2.0, workers) * np.exp(sigma * rng.standard_normal((steps, workers)))


@pytest.mark.parametrize("sigma", [0.01, 0.05, 0.1])
def test_noise_raises_no_alarm(sigma):
    for seed in range(3):
        assert run(FailSlow(), noisy(np.random.default_rng(seed), 1500, 6, sigma)) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_slowdown_of_a_third_is_noticed_within_the_stated_steps(seed):
    rng = np.random.default_rng(seed)
    seconds, start = noisy(rng, 200, 6), int(rng.integers(60, 80))
    seconds[start:, 2] *= 1.3
    watch = FailSlow()
    events = run(watch, seconds)
    assert [type(event) for event in events] == [Slow]
    (event,) = events
    assert event.worker == "w2"
    assert start < event.step <= start + watch.settings.steps_to_detect == start + 15
    assert event.factor == pytest.approx(1.3, rel=0.1)
    assert watch.factors() == {"w2": event.factor}


def test_single_spikes_are_ignored():
    rng = np.random.default_rng(1)
    seconds = noisy(rng, 600, 6, 0.02)
    seconds[::5, 1] *= 20
    assert run(FailSlow(), seconds) == []


def test_what_slows_everybody_is_nobodys_fault():
    seconds = noisy(np.random.default_rng(2), 300, 6, 0.02)
    seconds[100:] *= 2
    assert run(FailSlow(), seconds) == []
    seconds[200:, 3] *= 1.5  # But on top of that it is.
    assert [event.worker for event in run(FailSlow(), seconds)] == ["w3"]


def test_a_worker_recovers_after_good_windows_in_a_row_only():
    seconds = np.ones((200, 5))
    seconds[60:100, 0] = 1.5
    seconds[105:110, 0] = 1.5  # A relapse after one good window: the count starts again.
    events = run(FailSlow(), seconds)
    assert [type(event) for event in events] == [Slow, Recovered]
    assert events[1].step == 109 + 3 * 5


def test_a_slow_worker_that_gets_worse_is_reported_again():
    seconds = np.ones((200, 5))
    seconds[60:, 0] = 1.5
    seconds[100:, 0] = 2.0
    events = run(FailSlow(), seconds)
    assert [event.factor for event in events] == [1.5, 2.0]


def test_with_a_profile_a_worker_that_starts_slow_is_noticed():
    watch = FailSlow()
    for worker in range(5):
        watch.expect(f"w{worker}", 2.0)
    seconds = np.full((20, 5), 2.0)
    seconds[:, 4] = 3.0
    assert run(watch, seconds) == [Slow("w4", 9, 1.5)]


def test_another_plan_starts_a_workers_history_anew():
    watch = FailSlow()
    run(watch, np.ones((60, 4)))
    watch.expect("w1", 3.0)  # It has got three times the layers.
    after = np.ones((60, 4))
    after[:, 1] = 3.0
    assert run(watch, after, first_step=60) == []


def test_who_has_left_is_not_waited_for():
    watch = FailSlow()
    run(watch, np.ones((60, 4)))
    watch.forget("w3")
    after = np.ones((30, 3))
    after[:, 0] = 1.5
    assert [event.worker for event in run(watch, after, first_step=60)] == ["w0"]


def test_late_and_double_reports_are_ignored():
    watch = FailSlow()
    run(watch, np.ones((60, 3)))
    assert watch.observe("w0", 12, 99.0) == []
    watch.observe("w0", 60, 1.0)
    assert watch.observe("w0", 60, 99.0) == []
    assert watch.factors() == {}


def test_times_that_are_none_are_refused():
    with pytest.raises(PlanInfeasible, match="worker w: nan s in step 3"):
        FailSlow().observe("w", 3, float("nan"))
    with pytest.raises(PlanInfeasible, match="worker w: -1 s expected"):
        FailSlow().expect("w", -1.0)
    with pytest.raises(PlanInfeasible, match="fail-slow"):
        Settings(window=0)
