"""`chaosnet.engines.keeping`: what a member sends of what it keeps."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from chaosnet.data.evaluation import Evaluation
from chaosnet.engines import tensor_bytes
from chaosnet.engines.keeping import Keeping
from chaosnet.engines.layer_builds import LayerBuilds
from chaosnet.engines.made_layers import MadeLayers
from chaosnet.engines.state_parts import StateParts
from chaosnet.scheduler.elastic.running import Facts, choose

MEMBERS = ("a", "b", "c")
RATES = {"a": 300, "b": 100}
KEY = (1, 1)


def keeper(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 100))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    parts = StateParts(model, [list(model.parameters())], optimizer)
    parts.check_optimizer()
    parts.note_stepped(range(2))
    sent = []
    made = Keeping(
        name, parts, [{0}], 2, Evaluation(name), lambda message, payload: sent.append((message, payload)),
        MadeLayers([{0}], parts, LayerBuilds({}, 0), None),
    )  # fmt: skip
    made.begin_anew(["a", "b"])
    return made, sent


def test_layers_that_are_lost_are_one_or_more():
    made, _ = keeper("a")
    assert made.lost_in(("c",)) == "layer 0 is lost: all who kept it (a, b) are gone"
    made._users = [{0, 1, 2}]
    assert made.lost_in(("c",)) == "layers 0-2 are lost: all who kept them (a, b) are gone"
    assert not made.lost_in(("b", "c"))


def begin(made, running):
    view = SimpleNamespace(member_ids=MEMBERS)
    made.begin(view, KEY, 1, running, None, lambda source, to: RATES[source])


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(tensor_bytes, "PART_BYTES", 1000)


def test_two_keepers_send_each_part_once_and_more_where_the_link_is_faster(small_parts):
    (a, by_a), (b, by_b) = keeper("a"), keeper("b")
    running = choose(MEMBERS, Facts(((10, 20),), 3))  # All three compute the only layer; c does not keep it.
    for made in (a, b):
        begin(made, running)
    parts = [(each.micro_batch, each.part) for each, _ in by_a + by_b]
    assert len(parts) == len({*parts})
    of = {each.micro_batch: each.parts for each, _ in by_a + by_b}
    assert len(parts) == sum(of.values()) and of.keys() == {0, 1}
    assert {(each.way, each.target) for each, _ in by_a + by_b} == {("p", "c")}
    sent_by_a = sum(len(payload) for _, payload in by_a)
    assert sent_by_a / (sent_by_a + sum(len(payload) for _, payload in by_b)) == pytest.approx(0.75, abs=0.03)


def test_what_two_send_is_the_weight(small_parts):
    (a, by_a), (b, by_b) = keeper("a"), keeper("b")
    running = choose(MEMBERS, Facts(((10, 20),), 3))
    for made in (a, b):
        begin(made, running)
    weight = sorted((pair for pair in by_a + by_b if pair[0].micro_batch == 0), key=lambda pair: pair[0].part)
    assert torch.equal(tensor_bytes.joined(weight), a.parts.groups[0][0].detach())
