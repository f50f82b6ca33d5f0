"""What `Trainer` refuses or tells of a script that changes what is the cluster's; LR schedules; comparing."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import TensorDataset

from chaosnet import ConfigError, Trainer
from chaosnet.node.state.state_window import EVERY, StateWindow
from chaosnet.node.state.training_state import TrainingState
from chaosnet.node.sums.gradients import Gradients
from chaosnet.protocols.contributions import NAMED, merge, merge_sides
from chaosnet.protocols.messages import Contribution, Side
from chaosnet.training.agreement import Agreement
from chaosnet.training.lr_schedule import LRSchedule, finished
from chaosnet.training.named_updates import NamedOptimizers, NamedSchedulers
from chaosnet.training.replica_settings import first_difference

LENGTH = 24


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def start(fresh_exit_events):
    trainers = []

    def make(model, optimizer, *rest, **settings):
        trainer = Trainer(model, optimizer, *rest, **settings)
        trainers.append(trainer)
        return trainer

    yield make
    for trainer in trainers:
        trainer.close()


def backward(model):
    model(torch.ones(3, 4)).square().mean().backward()


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


# --- what belongs to the cluster ---


@pytest.mark.realtime
def test_a_parameter_group_that_is_added_later_is_refused(start):
    model = make_model()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    trainer = start(model, optimizer)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    backward(model)
    with pytest.raises(ConfigError, match=r"'2\.weight', '2\.bias' added"):
        trainer.update()


@pytest.mark.realtime
def test_a_parameter_that_is_added_later_and_has_a_gradient_is_refused(start):
    model = make_model()
    trainer = start(model, sgd(model))
    model.append(nn.Linear(2, 2))
    backward(model)
    with pytest.raises(ConfigError, match=r"parameter '3\.weight' has a gradient, but was no part"):
        trainer.update()


@pytest.mark.realtime
def test_a_parameter_that_is_swapped_in_the_optimizer_is_refused_at_the_next_step(start):
    model = make_model()
    optimizer = sgd(model)
    trainer = start(model, optimizer)
    model[2] = nn.Linear(8, 2)
    optimizer.param_groups[0]["params"][2:] = model[2].parameters()
    backward(model)
    with pytest.raises(
        ConfigError, match=r"groups hold other parameters than .*'2\.weight', '2\.bias' added"
    ):
        trainer.update()


@pytest.mark.realtime
def test_a_parameter_that_is_swapped_in_the_model_is_refused_at_the_next_step(start):
    model = make_model()
    trainer = start(model, sgd(model))
    backward(model)
    trainer.update()
    model[2] = nn.Linear(8, 2)
    backward(model)
    with pytest.raises(ConfigError, match=r"parameter '2\.weight' has a gradient, but was no part"):
        trainer.update()


@pytest.mark.realtime
def test_another_optimizer_that_steps_the_models_parameters_is_refused(start):
    model = make_model()
    trainer = start(model, sgd(model))
    second = torch.optim.Adam(model[2].parameters())
    backward(model)
    before = model[2].weight.clone()
    with pytest.raises(ConfigError, match=r"Adam, which is not the one that Trainer has.*'2\.weight'"):
        second.step()
    assert torch.equal(model[2].weight, before)
    trainer.crash("it ends")
    second.step()
    assert not torch.equal(model[2].weight, before)


@pytest.mark.realtime
def test_optimizers_of_other_parameters_are_the_scripts_own(start):
    model, other = make_model(), make_model()
    trainer = start(model, sgd(model))
    second = sgd(other)
    backward(other)
    second.step()
    backward(model)
    trainer.update()
    assert trainer.step == 1


class Outer(torch.optim.SGD):
    """Steps another optimizer of the same parameters, as SAM does."""

    def __init__(self, parameters):
        super().__init__(parameters, 0.1)
        self.inner = torch.optim.Adam(self.param_groups[0]["params"], 0.1)

    def step(self, closure=None):
        self.inner.step()


@pytest.mark.realtime
def test_an_optimizer_within_the_trainers_own_steps_with_it_and_not_by_itself(start):
    model = make_model()
    optimizer = Outer(model.parameters())
    trainer = start(model, optimizer)
    backward(model)
    optimizer.step()
    assert trainer.step == 1 and len(optimizer.inner.state) == 4
    backward(model)
    with pytest.raises(ConfigError, match="Adam, which is not the one"):
        optimizer.inner.step()


@pytest.mark.realtime
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_before_update_is_told_after_two_steps(start, capfd, set_to_none):
    model = make_model()
    optimizer = sgd(model)
    trainer = start(model, optimizer)
    for step in range(4):
        backward(model)
        optimizer.zero_grad(set_to_none=set_to_none)
        assert ("contributed no gradient" in capfd.readouterr().err) is (step == 2)
        trainer.update()


@pytest.mark.realtime
def test_nothing_is_told_of_a_script_that_keeps_to_the_rules(start, capfd):
    model = make_model()
    trainer = start(model, sgd(model))
    for _ in range(4):
        backward(model)
        trainer.update()
    assert "no gradient" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("setting", "value"),
    [("on_divergence", "ignore"), ("lr_scheduler_every", 0), ("lr_scheduler_every", "batch")],
)
def test_bad_settings_are_refused_by_name(setting, value):
    with pytest.raises(ConfigError, match=f"{setting}: {value!r}"):
        Trainer(**{setting: value})


# --- LR schedules ---


@pytest.mark.realtime
def test_a_schedule_by_epochs_is_stepped_when_the_cluster_has_completed_one(start):
    model = make_model()
    optimizer = sgd(model)
    trainer = start(model, optimizer, schedulers.StepLR(optimizer, 1, 0.5), lr_scheduler_every="epoch")
    data = TensorDataset(torch.randn(LENGTH, 4), torch.arange(LENGTH) % 2)
    rates = []
    for _ in trainer.batches(data, 8, epochs=3):
        backward(model)
        trainer.update()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.1, 0.1, 0.05, 0.05, 0.05, 0.025, 0.025, 0.025, 0.0125]


@pytest.mark.realtime
def test_a_schedule_by_epochs_that_nobody_counts_is_refused(start):
    model = make_model()
    optimizer = sgd(model)
    trainer = start(model, optimizer, schedulers.StepLR(optimizer, 1), lr_scheduler_every="epoch")
    backward(model)
    with pytest.raises(ConfigError, match=r"counts epochs of trainer\.batches"):
        trainer.update()


@pytest.mark.realtime
def test_a_schedule_by_samples_is_stepped_by_those_of_the_cluster(start):
    model = make_model()
    optimizer = sgd(model)
    trainer = start(model, optimizer, schedulers.StepLR(optimizer, 1, 0.5), lr_scheduler_every=10)
    rates = []
    for _ in range(4):
        backward(model)
        trainer.update(samples=7)  # 7, 14, 21, 28.
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.1, 0.05, 0.025, 0.025]


def test_after_a_rejoin_to_an_older_state_the_script_may_end_the_same_epoch_again():
    optimizer = sgd(make_model())
    schedule = LRSchedule(schedulers.StepLR(optimizer, 1), optimizer, "epoch")
    older = schedule.to_plain()
    schedule.called("", ())
    with pytest.raises(ConfigError, match="within an epoch"):
        schedule.called("", ())
    schedule.from_plain(older)
    schedule.called("", ())


def two_by_name(make, every):
    """Two optimizers, each with a schedule of its own."""
    optimizers = NamedOptimizers({"D": sgd(make_model()), "G": sgd(make_model())})
    schedulers_of = NamedSchedulers({name: make(each) for name, each in optimizers.parts.items()})
    said = []
    return optimizers, schedulers_of, LRSchedule(schedulers_of, optimizers, every, said.append), said


def rates_of(optimizers):
    return [each.param_groups[0]["lr"] for each in optimizers.parts.values()]


def round_of_two(optimizers, schedulers_of, schedule, losses):
    for name, loss in losses.items():
        optimizers.due = schedulers_of.due = name
        optimizers.step()
        schedule.stepped((loss, 1.0))


@pytest.mark.parametrize("every", ["epoch", "evaluation", 4])
def test_schedules_of_several_optimizers_all_go_on_with_the_cluster(every):
    """Not only that of the update that a round ends with."""
    *both, schedule, _ = two_by_name(lambda o: schedulers.StepLR(o, 1, 0.5), every)
    for count in (1, 2):
        round_of_two(*both, schedule, {"D": 1.0, "G": 1.0})
        schedule.progressed(count, 4.0 * count, {} if every == "evaluation" else None)
    assert rates_of(both[0]) == [0.025, 0.025]


def test_each_plateau_of_several_optimizers_follows_the_loss_of_its_own_updates():
    *both, schedule, _ = two_by_name(lambda o: schedulers.ReduceLROnPlateau(o, patience=0), "epoch")
    for epoch in (1, 2):
        round_of_two(*both, schedule, {"D": 1.0, "G": 9.0 / epoch})
        told = schedule.to_plain()
        schedule.from_plain(told)  # As a joiner's.
        assert told[1] == {"D": [1.0, 1.0], "G": [9.0 / epoch, 1.0]}
        schedule.progressed(epoch, 0.0)
    assert rates_of(both[0]) == pytest.approx([0.01, 0.1])


@pytest.mark.filterwarnings("ignore")
def test_schedules_of_several_optimizers_end_as_one_does():
    *both, schedule, said = two_by_name(lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=5), "step")
    for _ in range(9):
        round_of_two(*both, schedule, {"D": 1.0, "G": 1.0})
    assert len(said) == 2 and all("OneCycleLR is over" in text for text in said)
    assert len(set(rates_of(both[0]))) == 1


FINITE = {
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 20, eta_min=1e-3),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 20),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 5), schedulers.CosineAnnealingLR(o, 15, eta_min=1e-3)], [5]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.OneCycleLR(o, 0.1, total_steps=20)]
    ),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.1),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: max(0.0, 1 - step / 20)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FINITE)
def test_a_schedule_that_is_over_is_told_once_and_the_rate_stays(name):
    optimizer, said = sgd(make_model()), []
    schedule = LRSchedule(FINITE[name](optimizer), optimizer, "step", said.append)
    rates = []
    for _ in range(60):
        optimizer.step()
        schedule.stepped((0.0, 0.0))
        schedule.check()
        rates.append(optimizer.param_groups[0]["lr"])
    assert len(said) == 1
    assert name in said[0]
    assert len(set(rates[-30:])) == 1
    assert rates[-1] == 0 or rates[-1] > 1e-11


ENDLESS = {
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 7),
    "StepLR": lambda o: schedulers.StepLR(o, 30),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.1, 5),
    "warmup from 0": lambda o: schedulers.LambdaLR(o, lambda step: min(1.0, step / 10)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENDLESS)
def test_nothing_is_told_of_schedules_that_go_on(name):
    optimizer, twin, said = sgd(make_model()), sgd(make_model()), []
    schedule, plain = (
        LRSchedule(ENDLESS[name](optimizer), optimizer, "step", said.append),
        ENDLESS[name](twin),
    )
    for _ in range(60):
        schedule.stepped((0.0, 0.0))
        plain.step()
        assert not finished(schedule.scheduler)
        assert optimizer.param_groups[0]["lr"] == twin.param_groups[0]["lr"]
    assert said == []


# --- comparing ---


def agreement_of(extra=None, me="a", optimizer=torch.optim.Adam, policy="stop"):
    model = make_model()
    state = TrainingState(model, optimizer(model.parameters(), 0.1), None, extra)
    return Agreement(state, Gradients(model), me, policy), state


def test_nodes_with_the_same_state_tell_the_same():
    first, _ = agreement_of({"a": 1, "b": [2.0]}, "a")
    second, _ = agreement_of({"b": (2,), "a": 1.0}, "b")
    for step in range(3):
        ours, theirs = first.tell(step, step, True)[0], second.tell(step, step, True)[0]
        assert {kind: list(sides) for kind, sides in ours.items()} == {k: list(s) for k, s in theirs.items()}


def test_settings_of_execution_are_not_compared():
    first, state = agreement_of()
    before = list(first.tell(1, 1, True)[0]["settings"])
    state.optimizer.param_groups[0]["foreach"] = True
    assert list(first.tell(2, 2, True)[0]["settings"]) == before
    state.optimizer.param_groups[0]["lr"] = 0.2
    assert list(first.tell(3, 3, True)[0]["settings"]) != before


def step_of(nodes, step):
    told = [node.tell(step, step, True) for node in nodes]
    return merge([Contribution(digests=digests, accounts=accounts) for digests, accounts in told])


def judged(nodes, step):
    total, order = step_of(nodes, step), ["n0", "n1", "n2", "n3", "n4", "n5"]
    return [node.judge(total, step + 1, order) for node in nodes]


def test_the_first_difference_is_named_with_its_values_and_nodes():
    made = [agreement_of(me=f"n{index}") for index in range(6)]
    nodes, states = [each for each, _ in made], [each for _, each in made]
    assert judged(nodes, 40) == [None] * 6
    states[2].optimizer.param_groups[0]["lr"] = 0.0005
    assert judged(nodes, 41) == [None] * 6
    verdicts = judged(nodes, 42)
    values = "optimizer.param_groups[0]['lr'] is 0.0005 on n2, 0.1 on n0, n1 and 3 more."
    assert {values in verdict.sentence for verdict in verdicts} == {True}
    assert verdicts[0].sentence.startswith("replicas differ after step 41: ")
    assert [verdict.here for verdict in verdicts] == [False, False, True, False, False, False]


def test_in_a_tie_the_most_senior_is_right():
    made = [agreement_of(me=name) for name in ("n1", "n0")]
    nodes = [each for each, _ in made]
    made[1][1].optimizer.param_groups[0]["lr"] = 0.0005  # That of n0.
    judged(nodes, 41)
    assert [verdict.here for verdict in judged(nodes, 42)] == [True, False]


def test_who_joins_after_a_warning_does_not_tell_at_every_step_what_differs():
    members = [agreement_of(me=name, policy="warn") for name in "abc"]
    members[2][1].optimizer.param_groups[0]["lr"] = 0.5
    nodes = [node for node, _ in members]
    assert judged(nodes, 1) == [None] * 3
    assert None not in judged(nodes, 2)
    nodes.append(agreement_of(me="d", policy="warn")[0])
    assert [judged(nodes, step) for step in range(3, 8)] == [[None] * 4] * 5
    assert [node.tell(8, 8, True)[1] for node in nodes] == [{}] * 4


@pytest.mark.parametrize("evaluates", [range(4), range(50, 64), range(0)])
def test_evaluations_however_often_they_come_hide_no_part_of_the_state(evaluates):
    """Of each 64 rounds some are of an evaluation, always the same."""
    made = [agreement_of(me=name) for name in ("n0", "n1")]
    nodes = [each for each, _ in made]
    with torch.no_grad():
        next(made[1][1].model.parameters()).add_(1)
    step, verdicts = 200, []
    for round in range(300, 300 + 3 * EVERY):
        evaluating = round % 64 in evaluates
        told = [node.tell(round, step, not evaluating, evaluating) for node in nodes]
        total = merge([Contribution(digests=digests, accounts=accounts) for digests, accounts in told])
        step += not evaluating
        verdicts += [each for node in nodes if (each := node.judge(total, step, ["n0", "n1"]))]
        if step > 200 + EVERY + 1:
            break
    assert {each.kind for each in verdicts} == {"state"}


def test_every_byte_of_the_state_is_in_a_window_within_so_many_steps():
    model = nn.Sequential(nn.Linear(300, 500), nn.BatchNorm1d(500), nn.Linear(500, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model(torch.randn(4, 300)).square().mean().backward()
    optimizer.step()
    state, gradients = TrainingState(model, optimizer, None, {"mean": torch.zeros(7)}), Gradients(model)
    base = [StateWindow(state, gradients).read(step) for step in range(1000, 1000 + EVERY)]
    generator = torch.Generator().manual_seed(0)
    tensors = [p.detach() for p in model.parameters()] + [state.extra_state["mean"]]
    tensors += [value for p in model.parameters() for value in optimizer.state[p].values()]
    for tensor in tensors:
        place = int(torch.randint(tensor.numel(), (), generator=generator))
        flat = tensor.view(-1)
        before = flat[place].clone()
        flat[place] += 1
        window = StateWindow(state, gradients)
        readings = [window.read(step) for step in range(1000, 1000 + EVERY)]
        assert sum(a != b for a, b in zip(base, readings, strict=True)) == 1
        flat[place] = before


def test_who_comes_later_says_of_an_equal_state_what_the_others_say():
    """A tensor has come since the first laid its window out."""
    model = nn.Linear(3, 2)
    state = TrainingState(
        model, torch.optim.SGD(model.parameters(), 0.1), None, extra := {"losses": torch.zeros(1)}
    )
    gradients = Gradients(model)
    old = StateWindow(state, gradients)
    for step in range(5):
        old.read(step)
    extra["losses"] = torch.zeros(2)
    new = StateWindow(state, gradients)
    for step in range(5, 8):
        old.read(step), new.read(step)
    for step in range(8, 2 * EVERY):
        assert old.read(step) == new.read(step)


@pytest.mark.parametrize("after", [None, 3.0, {}, [torch.zeros(1)]])
def test_a_tensor_that_the_script_has_replaced_by_something_else_ends_no_training(after):
    model = nn.Linear(3, 2)
    state = TrainingState(
        model, torch.optim.SGD(model.parameters(), 0.1), None, extra := {"best": {"w": torch.zeros(1 << 17)}}
    )
    window = StateWindow(state, Gradients(model))
    window.read(0)
    extra["best"] = after
    readings = [window.read(step) for step in range(1, 2 * EVERY)]
    assert readings[-EVERY] is not None


def test_hashes_of_many_nodes_add_up_in_any_order():
    sides = [{"settings": {"x" if i % 3 else "y": Side(nodes=1, names=(f"n{i:02}",))}} for i in range(30)]
    whole = merge_sides(sides)
    assert merge_sides([merge_sides(sides[20:]), merge_sides(sides[:20])]) == whole
    assert {digest: side.nodes for digest, side in whole["settings"].items()} == {"x": 20, "y": 10}
    assert len(whole["settings"]["x"].names) == NAMED


def test_what_a_peer_makes_up_breaks_nothing():
    node, _ = agreement_of()
    sides = {"x": Side(nodes=0), "y": Side(nodes=3, items=(("", ""),))}
    total = Contribution(digests={"": sides, " ": sides}, accounts={"": sides, " ": sides, "state": sides})
    assert node.judge(total, 1, []) is not None
    node.tell(1, 1, True)


def test_what_is_on_one_side_only_is_a_difference():
    assert first_difference([[("a", "1"), ("b", "2")], [("a", "1")]]) == ("b", ["2", "absent"])
    assert first_difference([[("a", "1")], [("a", "1")]]) is None
