"""`chaosnet.engines.step_costs`: what a step takes beyond computing."""

from types import SimpleNamespace

from torch import nn

from chaosnet.engines.step_costs import StepCosts
from chaosnet.node.sums.layer_sums import LayerSums
from chaosnet.protocols.messages import LinkReading, Member, Tree, View

RUNNING = SimpleNamespace(
    predicted_us=900_000.0, computing_us=700_000.0, parameters_us=50_000.0, moving_us=0.0, laid="one"
)
OTHER = SimpleNamespace(
    predicted_us=900_000.0, computing_us=700_000.0, parameters_us=50_000.0, moving_us=0.0, laid="other"
)

TREES = (((("b", "a"),), 1.0),)


def hear(costs, *said, members=("a", "b")):
    sums: dict = {}
    for each in said:
        for name, (total, weight) in each.items():
            old = sums.get(name, (0.0, 0.0))
            sums[name] = old[0] + total, old[1] + weight
    costs.agree(sums, members)


def reading(**more):
    return {"b": LinkReading(**more)}


def test_what_a_step_took_beyond_its_parts_is_the_rest():
    costs = StepCosts(2)
    costs.ended(4, RUNNING, 10.0, 0.1)
    costs.ended(5, RUNNING, 11.25, 0.1)
    hear(costs, costs.measured({}, "a", (), {}))
    assert (costs.step_us, costs.rest_us) == (100_000, 250_000)
    assert costs.begin(RUNNING).total_us == 1_250_000
    assert (
        str(costs.begin(RUNNING))
        == "predicted 1250.0 ms a step (700.0 computing, 50.0 parameters, 150.0 sums, 100.0 optimizer, 250.0 rest)"
    )


def test_a_step_in_which_something_changed_says_nothing():
    for round, running, torn in ((5, OTHER, False), (6, RUNNING, False), (5, RUNNING, True)):
        costs = StepCosts(2)
        costs.ended(4, RUNNING, 10.0, 0.1)
        costs.ended(round, running, 99.0, 0.1, torn)
        assert costs.measured({}, "a", (), {}) == {"step": (1e5, 1.0)}  # But that it was adopted.


def test_one_step_that_takes_long_is_not_expected_again():
    costs = StepCosts(2)
    for rest in (10.0, 5e6, 20.0):
        hear(costs, {"rest": (rest, 1.0)})
    assert costs.rest_us == 20


def test_a_step_never_takes_less_than_its_computing():
    costs = StepCosts(2)
    hear(costs, {"rest": (-5e6, 1.0)})
    assert costs.begin(RUNNING).total_us == RUNNING.computing_us
    assert (
        str(costs.begin(RUNNING))
        == "predicted 700.0 ms a step (700.0 computing, 50.0 parameters, 150.0 sums, -200.0 rest)"
    )


def test_rates_that_differ_by_noise_stay_and_others_are_taken_when_two_in_a_row_agree():
    costs = StepCosts(2)
    for mbit, known in (
        (1000, 1000),
        (900, 1000),
        (500, 1000),
        (1000, 1000),
        (500, 1000),
        (500, 500),
        (550, 500),
    ):
        hear(costs, costs.measured({}, "a", ("b", "a"), reading(sent_bps=mbit * 1e6)))
        assert costs.rates_mbit == {("a", "b"): known}


def test_a_probe_counts_until_traffic_tells_more():
    costs = StepCosts(2)
    hear(costs, costs.measured({}, "a", "ab", reading(rate_bps=5e8)))
    assert costs.rates_mbit == {("b", "a"): 500}
    for _ in range(2):
        at_b = costs.measured({}, "b", "ab", {"a": LinkReading(sent_bps=1e8)})
        hear(costs, at_b, costs.measured({}, "a", "ab", reading(rate_bps=5e8)))
        assert costs.rates_mbit == {("b", "a"): 100}, "at once: a probe is made beside a start"


def test_a_later_probe_counts_where_no_traffic_has_told_more():
    """What a start has measured may be wrong by far, and nothing is sent over a link that seems slow."""
    costs = StepCosts(2)
    for mbit, known in ((9, 9), (1000, 9), (1000, 1000)):
        hear(costs, costs.measured({}, "a", "ab", reading(rate_bps=mbit * 1e6)))
        assert costs.rates_mbit == {("b", "a"): known}


def test_links_of_who_is_gone_are_forgotten():
    costs = StepCosts(2)
    hear(costs, costs.measured({}, "a", "ab", reading(sent_bps=1e8, rtt_min_s=0.01)))
    assert costs.delays_us == {("a", "b"): 5000}
    hear(costs, members=("a", "c"))
    assert costs.rates_mbit == costs.delays_us == {}


def test_who_joins_knows_what_the_others_know():
    costs, joiner = StepCosts(2), StepCosts(2)
    hear(
        costs, costs.measured({0: 40}, "a", "ab", reading(sent_bps=1e8, rtt_min_s=0.01)), {"rest": (7.0, 1.0)}
    )
    joiner.from_plain(costs.to_plain())
    assert joiner.to_plain() == costs.to_plain()


def test_nonsense_is_passed_over():
    costs = StepCosts(2)
    hear(
        costs,
        {
            "rest": (float("nan"), 1.0),
            "sent 0 1": (float("inf"), 1.0),
            "0 bytes": (0.0, 0.0),
            "sent 0 9": (1.0, 1.0),
        },
    )
    assert costs.to_plain() == StepCosts(2).to_plain()


def test_plans_are_made_of_what_the_view_says_and_of_what_was_measured():
    layers = [nn.Linear(10, 10), nn.Linear(10, 10)]
    view = View(
        term=1, seq=1, scheduler="a", members=(Member(id="a"), Member(id="b")), links=(("a", "b"),),
        trees=(Tree(root="a", parent={"b": "a", "listener": "b"}, share=1.0),),
    )  # fmt: skip
    costs = StepCosts(2)
    assert costs.traffic(view, LayerSums(layers, 4)).out_bytes == ()
    hear(costs, {"0 bytes": (80.0, 2.0)})
    traffic = costs.traffic(view, LayerSums(layers, 4))
    assert traffic.out_bytes == (40, 0)
    assert traffic.trees == (((("b", "a"),), 1.0),)
    assert sorted(traffic.sums) == [((0,), 880), ((1,), 880)]


def test_what_was_beyond_another_link_is_forgotten():
    costs = StepCosts(2)
    hear(costs, costs.measured({}, "a", "ab", reading(sent_bps=1e9)), {"rest": (7.0, 1.0)})
    hear(costs, {"rest": (7.0, 1.0)})
    costs.ended(4, RUNNING, 10.0, 0.1)
    hear(costs, costs.measured({}, "a", "ab", reading(sent_bps=8e8)))
    assert costs.rest_us == 7
    for _ in range(2):
        hear(costs, costs.measured({}, "a", "ab", reading(sent_bps=1e8)))
    costs.ended(5, RUNNING, 99.0, 0.1)
    hear(costs, costs.measured({}, "a", "ab", {}))
    assert costs.rest_us == 0


def test_what_is_known_of_a_link_is_not_told_again():
    costs = StepCosts(2)
    links = reading(sent_bps=1e9, rate_bps=1e9, rtt_min_s=0.01)
    hear(costs, first := costs.measured({}, "a", "ab", links))
    assert sorted(first) == ["came 1 0", "delay 0 1", "sent 0 1"]
    assert costs.measured({}, "a", "ab", links) == {}


def test_state_that_moves_is_in_what_the_first_step_is_to_take_and_not_in_its_rest():
    costs, first = StepCosts(2), SimpleNamespace(**{**vars(RUNNING), "moving_us": 300_000.0})
    costs.ended(4, RUNNING, 10.0, 0.1)
    costs.ended(5, first, 11.55, 0.1)  # Other keepers, and the pipelines of before.
    hear(costs, costs.measured({}, "a", (), {}))
    assert costs.rest_us == 250_000
    assert costs.begin(first).total_us == 1_550_000 and costs.begin(RUNNING).total_us == 1_250_000
    assert str(costs.begin(first)).startswith("predicted 1250.0 ms a step (700.0 computing, ")
    assert str(costs.begin(first)).endswith("), the first 300.0 ms more for state that moves")


def test_steps_of_the_same_pipelines_are_predicted_by_what_the_last_ones_took():
    """Costs and rates that are measured anew, above all after a start, change no step that runs as before."""
    costs, corrected = StepCosts(2), SimpleNamespace(**{**vars(RUNNING), "predicted_us": 5e6})
    assert costs.begin(RUNNING).total_us == 900_000
    costs.ended(4, RUNNING, 10.0, 0.0)
    costs.ended(5, RUNNING, 12.0, 0.0)
    assert costs.begin(RUNNING).total_us == costs.begin(corrected).total_us == 2_000_000
    costs.ended(6, RUNNING, 13.0, 0.0)
    assert costs.begin(RUNNING).total_us == 1_000_000
    assert costs.begin(RUNNING, TREES).total_us == costs.begin(OTHER).total_us == 900_000


def test_the_first_step_of_new_pipelines_counts_where_nothing_else_is_known():
    for known, then_us in (({}, 3_000_000), ({"rest": (7.0, 1.0)}, 900_007)):
        costs = StepCosts(2)
        hear(costs, known)
        costs.ended(4, OTHER, 10.0, 0.0)
        costs.begin(RUNNING)
        costs.ended(5, RUNNING, 13.0, 0.0)
        assert costs.begin(RUNNING).total_us == then_us


def test_what_steps_took_over_another_link_is_forgotten_but_for_the_one_that_was_slow_with_it():
    costs = StepCosts(2)
    hear(costs, costs.measured({}, "a", "ab", reading(sent_bps=1e9)))
    costs.begin(RUNNING)
    for round, now_s in enumerate((10.0, 12.0, 14.0)):
        costs.ended(round, RUNNING, now_s, 0.0)
    for round in (3, 4):
        hear(costs, costs.measured({}, "a", "ab", reading(sent_bps=1e8)))
        costs.ended(round, RUNNING, 20.0 + 20 * round, 0.0)
    assert costs.begin(RUNNING).total_us == 20_000_000
    assert "rest" not in costs.measured({}, "a", (), {}), "it was predicted with the link of before"


def test_a_prediction_that_rests_on_no_step_says_so():
    costs = StepCosts(2)
    assert str(costs.begin(RUNNING)).endswith("150.0 sums), a first guess")
    hear(costs, {"rest": (7.0, 1.0)})
    assert str(costs.begin(RUNNING)).endswith("rest)")
    assert costs.begin(RUNNING, TREES).is_guess, "who was alone knows nothing of links"
    hear(costs, costs.measured({}, "a", "ab", reading(sent_bps=1e9)))
    hear(costs, {"rest": (7.0, 1.0)})
    assert not costs.begin(RUNNING, TREES).is_guess
