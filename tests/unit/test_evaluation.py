"""`chaosnet.data.evaluation`: each sample once, whoever comes, dies or does otherwise, and one result for all."""

import pytest

from chaosnet.data.evaluation import Evaluation
from chaosnet.protocols.contributions import merge
from chaosnet.protocols.data_cursor import positions
from chaosnet.protocols.errors import ConfigError
from chaosnet.protocols.messages import Contribution


class Cluster:
    """Members that agree on each round. What a script would average is the sum of the indices that it has seen."""

    def __init__(self, names, length=100):
        self.length, self.nodes = length, {name: Evaluation(name) for name in names}
        self.seen = {}  # By index: who has counted it.
        self.sums = {}

    def enter(self, **sizes):
        for name, size in sizes.items():
            self.nodes[name].enter(self.length, size)

    def round(self, dies=()):
        said = []
        for name, node in self.nodes.items():
            indices = node.take() if node.under_way and node.size else []
            if name in dies:
                continue
            for index in indices:
                assert index not in self.seen
                self.seen[index] = name
            metrics = {"index": (float(sum(indices)), float(len(indices)))} if indices else {}
            said.append(Contribution(metrics=metrics, **node.contribution()))
        for name in dies:
            del self.nodes[name]
        total = merge(said)
        results = [node.completed(total, list(self.nodes)) for node in self.nodes.values()]
        assert all(each == results[0] for each in results)
        assert len({str(node.to_plain()) for node in self.nodes.values()}) == 1
        self.sums = results[0]

    def run(self):
        rounds = 0
        while True:
            self.round()
            rounds += 1
            if not any(node.under_way for node in self.nodes.values()):
                return rounds


@pytest.fixture
def three():
    cluster = Cluster("abc")
    cluster.enter(a=10, b=20, c=10)
    return cluster


def check_whole(cluster):
    assert sorted(cluster.seen) == list(range(cluster.length))
    assert cluster.sums == {"index": (sum(range(cluster.length)), cluster.length)}


def test_all_evaluate_by_their_sizes_and_have_one_result(three):
    assert three.run() == 1 + 3  # One in which they say so; then 40, 40 and 20 samples.
    check_whole(three)
    assert [list(three.seen.values()).count(name) for name in "abc"] == [25, 50, 25]


def test_what_a_dead_node_had_in_hand_is_dealt_to_the_others(three):
    three.round()
    three.round()
    three.round(dies="b")
    three.run()
    check_whole(three)


def test_who_joins_meanwhile_takes_part_without_samples(three):
    three.round()
    three.round()
    three.nodes["d"] = joiner = Evaluation("d")
    joiner.from_plain(three.nodes["a"].to_plain())
    assert joiner.under_way
    three.run()
    check_whole(three)
    assert "d" not in three.seen.values()


def test_who_comes_back_goes_on_with_what_is_left(three):
    three.round()
    three.round()
    three.nodes["b"].from_plain(three.nodes["a"].to_plain())
    three.run()
    check_whole(three)
    assert "b" in three.seen.values()


def test_a_script_may_end_early_and_when_all_do_the_evaluation_is_over(three):
    three.round()
    three.round()
    three.nodes["b"].leave()
    three.run()
    check_whole(three)
    three.seen.clear()
    three.round()
    assert three.nodes["a"].under_way  # They begin again.
    for node in three.nodes.values():
        node.leave()
    three.round()
    assert not three.nodes["a"].under_way


def test_one_alone_may_evaluate():
    cluster = Cluster("ab", length=7)
    cluster.enter(b=3)
    assert cluster.run() == 1 + 3
    check_whole(cluster)


def test_what_is_expected_is_what_is_dealt_if_nothing_happens(three):
    three.round()
    expected = {name: list(node.ahead()) for name, node in three.nodes.items()}
    three.run()
    for name, batches in expected.items():
        assert [index for batch in batches for index in batch] == sorted(
            index for index, by in three.seen.items() if by == name
        )
    assert list(three.nodes["a"].ahead()) == []


def test_data_sets_that_differ_are_an_error(three):
    three.nodes["a"].enter(99, 10)
    with pytest.raises(ConfigError, match=r"^evaluate: this node's data set has 99 samples, another's 100$"):
        three.round()


def test_who_comes_back_when_it_is_over_catches_up_with_what_the_others_trained():
    a = Evaluation("a")
    a.enter(100, 10)
    a.completed(merge([Contribution(**a.contribution())]), ["a", "b"])
    assert a.under_way
    a.from_plain(None)
    assert a.completed(Contribution(), ["b"]) is None and not a.under_way


def test_what_the_others_evaluated_while_a_node_was_away_is_not_done_once_more(three):
    three.run()
    away = three.nodes["c"]
    away.leave()
    assert not away.missed(), "it took part"
    for _ in range(2):
        three.nodes = {name: three.nodes[name] for name in "ab"}
        three.seen.clear()
        three.enter(a=10, b=20)
        three.run()
    away.from_plain(None)
    away.load_past(three.nodes["a"].past())
    assert away.results == three.nodes["a"].results == three.sums
    assert [away.missed() for _ in range(3)] == [True, True, False], "of two data sets an epoch, say"
    joiner = Evaluation("d")
    joiner.load_past(three.nodes["a"].past())
    assert not joiner.missed()


def test_who_trains_once_more_or_leaves_an_evaluation_early_has_missed_nothing(three):
    three.round()
    three.nodes["c"].leave()
    three.run()
    assert not three.nodes["c"].missed()
    three.seen.clear()
    three.enter(a=10, b=20)
    three.run()
    three.nodes["c"].attend()
    assert not three.nodes["c"].missed()


def test_who_does_not_evaluate_says_nothing_of_it():
    assert Evaluation("a").contribution() == {}
    assert list(positions(Evaluation("a").mine)) == []
