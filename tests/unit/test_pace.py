"""`chaosnet.engines.pace`: what layers cost and how fast members are."""

from types import SimpleNamespace

from torch import nn

from chaosnet.engines.layer_runner import Done
from chaosnet.engines.pace import Pace


def make():
    return Pace([nn.Linear(100, 100), nn.Linear(100, 100)])


def done(forward_s, backward_s, count=4):
    found = Done()
    for layer in range(2):
        found.forward_s[layer], found.backward_s[layer] = forward_s * count, backward_s * count
        found.micro_batches[layer] = count
    return found


def together(pace, **by_member):
    """What all tell, added up."""
    sums: dict = {}
    for name, each in by_member.items():
        for key, (total, weight) in pace.told(name, each, SimpleNamespace()).items():
            old = sums.get(key, (0.0, 0.0))
            sums[key] = old[0] + total, old[1] + weight
    return sums


def test_costs_are_what_was_measured_in_whole_microseconds():
    pace = make()
    pace.heard(together(pace, a=done(0.001, 0.002)), ["a"])
    assert pace.costs_us == ((1000, 2000), (1000, 2000))


def test_noise_changes_nothing():
    pace = make()
    pace.heard(together(pace, a=done(0.001, 0.002)), ["a"])
    pace.heard(together(pace, a=done(0.0011, 0.0019)), ["a"])
    assert pace.costs_us == ((1000, 2000), (1000, 2000))
    pace.heard(together(pace, a=done(0.0011, 0.002), b=done(0.0009, 0.002)), ["a", "b"])
    assert pace.speeds == {}


def test_a_member_that_takes_twice_as_long_has_half_the_speed():
    pace = make()
    pace.heard(
        together(pace, a=done(0.001, 0.002), b=done(0.001, 0.002), c=done(0.002, 0.004)), ["a", "b", "c"]
    )
    assert pace.speeds == {"c": 0.5}
    pace.heard(
        together(pace, a=done(0.001, 0.002), b=done(0.001, 0.002), c=done(0.001, 0.002)), ["a", "b", "c"]
    )
    assert pace.speeds == {}


def test_who_is_gone_has_no_speed():
    pace = make()
    pace.heard(
        together(pace, a=done(0.001, 0.002), b=done(0.001, 0.002), c=done(0.002, 0.004)), ["a", "b", "c"]
    )
    pace.heard({}, ["a", "b"])
    assert pace.speeds == {}


def test_what_all_know_a_joiner_knows_too():
    pace, joiner = make(), make()
    pace.heard(together(pace, a=done(0.001, 0.002), b=done(0.002, 0.004)), ["a", "b"])
    joiner.from_plain(pace.to_plain())
    assert joiner.to_plain() == pace.to_plain()
