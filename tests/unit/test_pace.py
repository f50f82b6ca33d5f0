"""`chaosnet.engines.pace`: what layers cost and how fast members are."""

from torch import nn

from chaosnet.engines.layer_runner import Done
from chaosnet.engines.pace import TRIED_AGAIN, Pace


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
        for key, (total, weight) in pace.measured(name, each).items():
            old = sums.get(key, (0.0, 0.0))
            sums[key] = old[0] + total, old[1] + weight
    return sums


def test_costs_are_what_was_measured_in_whole_microseconds():
    pace = make()
    pace.agree(together(pace, a=done(0.001, 0.002)), ["a"])
    assert pace.costs_us == ((1000, 2000), (1000, 2000))


def test_noise_changes_nothing():
    pace = make()
    pace.agree(together(pace, a=done(0.001, 0.002)), ["a"])
    pace.agree(together(pace, a=done(0.0011, 0.0019)), ["a"])
    assert pace.costs_us == ((1000, 2000), (1000, 2000))
    pace.agree(together(pace, a=done(0.0011, 0.002), b=done(0.0009, 0.002)), ["a", "b"])
    assert pace.speeds == {}


def of_three(pace, slow_s=0.002):
    """What three members tell, of whom c takes so long."""
    return together(pace, a=done(0.001, 0.002), b=done(0.001, 0.002), c=done(slow_s / 2, slow_s))


def known():
    """Costs are as they are; c is as fast as the others."""
    pace = make()
    pace.agree(of_three(pace), ["a", "b", "c"])
    return pace


def test_a_member_that_takes_longer_twice_in_a_row_has_a_lower_speed():
    pace = known()
    slower = of_three(pace, slow_s=0.003)  # Its third of the costs raises them by less than noise would.
    pace.agree(slower, ["a", "b", "c"])
    assert pace.speeds == {}
    pace.agree(slower, ["a", "b", "c"])
    assert pace.speeds == {"c": 0.6875}
    for _ in range(2):
        pace.agree(of_three(pace), ["a", "b", "c"])
    assert pace.speeds == {}


def test_paces_by_costs_that_are_found_to_be_wrong_say_nothing_of_speeds():
    pace = make()
    for _ in range(3):  # b has the second layer, which is dear, and nobody knew.
        cheap, dear = Done(), Done()
        cheap.forward_s[0], cheap.backward_s[0], cheap.micro_batches[0] = 0.001, 0.002, 1
        dear.forward_s[1], dear.backward_s[1], dear.micro_batches[1] = 0.01, 0.02, 1
        pace.agree(together(pace, a=cheap, b=dear), ["a", "b"])
    assert pace.costs_us == ((1000, 2000), (10000, 20000))
    assert pace.speeds == {}


def test_who_is_gone_has_no_speed():
    pace = known()
    for _ in range(2):
        pace.agree(of_three(pace, slow_s=0.003), ["a", "b", "c"])
    pace.agree({}, ["a", "b"])
    assert pace.speeds == {}


def test_what_all_know_a_joiner_knows_too():
    pace, joiner = known(), make()
    pace.agree(of_three(pace, slow_s=0.003), ["a", "b", "c"])
    joiner.from_plain(pace.to_plain())
    assert joiner.to_plain() == pace.to_plain()


def test_a_slow_member_that_got_nothing_to_do_is_tried_again():
    pace = known()
    for _ in range(2):
        pace.agree(of_three(pace, slow_s=0.003), ["a", "b", "c"])
    for _ in range(TRIED_AGAIN):
        assert "c" in pace.speeds
        pace.agree(together(pace, a=done(0.001, 0.002), b=done(0.001, 0.002)), ["a", "b", "c"])
    assert pace.speeds == {}
