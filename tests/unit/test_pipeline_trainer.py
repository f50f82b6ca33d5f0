"""`PipelineTrainer`, with one member: what is refused, and what it does beside computing."""

import itertools
import math
import statistics
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from chaosnet import Callbacks, Checkpoints, Cluster, ConfigError, PipelineTrainer, Trainer
from chaosnet.emulated import Emulated
from chaosnet.node.state.checkpoint import scan
from chaosnet.node.step_history import pace_s

pytestmark = pytest.mark.realtime
ONE = {"cluster": Cluster(new=True, listen="127.0.0.1:0"), "quiet": True}
SIZES = {"batch": 8, "micro_batch": 2}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.2)), nn.Linear(8, 3)
    )


def make_data(samples=20):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 4, generator=generator), torch.arange(samples) % 3)


def trainer(model=None, optimizer=None, **settings):
    model = make_model() if model is None else model
    if optimizer is None:
        whole = model if isinstance(model, nn.Module) else nn.ModuleList(model)
        optimizer = torch.optim.Adam(whole.parameters(), lr=0.01)
    return PipelineTrainer(model, optimizer, nn.functional.cross_entropy, **{**SIZES, **ONE, **settings})


def test_epochs_end_steps_and_callbacks_hear_of_both():
    heard = []
    callbacks = Callbacks(
        on_step=lambda event: heard.append(event.step), on_epoch=lambda event: heard.append("epoch")
    )
    with trainer(callbacks=callbacks) as t:
        steps = list(t.steps(make_data(), epochs=2))
        assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
        assert t.epoch == 2 and t.step == 6 and t.is_main and t.metrics == steps[-1].metrics
    assert [each for each in heard if each][:9] == [1, 2, 3, "epoch", 4, 5, 6, "epoch", 6][: len(heard)]


def test_every_computation_is_told_with_its_step_and_its_time():
    told = []
    with trainer(callbacks=Callbacks(on_computed=told.append)) as t:
        steps = list(t.steps(make_data(), epochs=1))
    assert [each.round for each in told] == sorted(each.round for each in told)
    first = [each for each in told if each.round == steps[0].round]
    assert {(each.micro_batch, each.backward) for each in first} == {
        (number, backward) for number in range(4) for backward in (False, True)
    }
    assert all(each.layers == (0, 3) and each.began_s < each.ended_s for each in first)
    assert all(a.ended_s <= b.began_s for a, b in itertools.pairwise(told))
    last = {each.micro_batch for each in told if each.round == steps[-1].round}
    assert last == {0, 1}  # The last step of an epoch has the samples that are left.


def test_nothing_is_predicted_before_a_layer_is_measured(capfd):
    """The first pipelines are those of a guess, by parameters."""
    with trainer(quiet=False) as alone:
        next(iter(alone.steps(make_data(), epochs=1)))
        told = capfd.readouterr().err
        assert "x4; predicted nothing yet, as no layer is measured" in told
        assert "ms a step" not in told


def test_a_step_takes_what_it_is_predicted_to_once_some_were_measured():
    layers = [Emulated(0.002, 0.004) for _ in range(3)]
    ratios, began_s = [], time.monotonic()
    with trainer(layers, torch.optim.SGD(nn.ModuleList(layers).parameters(), 0.1)) as alone:
        for _ in alone.steps(make_data(16), epochs=8):
            took_s, began_s = time.monotonic() - began_s, time.monotonic()
            predicted = alone.engine.predicted
            ratios.append(1e6 * took_s / predicted.total_us)
        assert predicted.computing_us <= predicted.total_us
        status = alone.status()
        assert status.predicted_s == predicted.total_us / 1e6
        assert status.step_s == pace_s(alone.status(history=True).steps)
    assert 0.67 < statistics.median(ratios[6:]) < 1.5


def test_the_schedule_follows_steps_of_the_cluster():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with trainer(model, optimizer, lr_scheduler=schedule, lr_scheduler_every="epoch") as t:
        list(t.steps(make_data(), epochs=2))
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_run_goes_on_from_its_checkpoint_to_the_bit(tmp_path):
    with trainer() as t:
        list(t.steps(make_data(), epochs=4))
        wanted = t.state_hash()
    with trainer(checkpoints=Checkpoints(tmp_path, every=2)) as t:
        for step in t.steps(make_data(), epochs=4):
            if step.step == 7:
                break
    with trainer(checkpoints=Checkpoints(tmp_path, every=2, resume=True)) as t:
        assert t.step == 7  # The last that leaves writes one more.
        list(t.steps(make_data(), epochs=4))
        assert t.state_hash() == wanted


def test_a_loss_that_becomes_nan_is_told_and_no_checkpoint_takes_the_place_of_those_from_before(
    tmp_path, capfd
):
    inputs, targets = make_data().tensors
    inputs[17] = float("nan")
    with trainer(checkpoints=Checkpoints(tmp_path, every=1, kept=1), quiet=False) as t:
        losses = [step.metrics["loss"] for step in t.steps(TensorDataset(inputs, targets), epochs=3)]
    assert not math.isfinite(losses[-1])
    first = next(number for number, loss in enumerate(losses, 1) if not math.isfinite(loss))
    told = capfd.readouterr().err
    assert (
        told.count(f"the loss of step {first} is nan; no checkpoint is written while it is not finite") == 1
    )
    assert all(checkpoint.step < first for checkpoint in scan(tmp_path))


def test_a_loss_that_was_infinite_for_a_step_does_not_end_checkpoints(tmp_path):
    losses = iter([1.0, math.inf, 1.0])
    scale = lambda out, y: nn.functional.cross_entropy(out, y) + next(losses)  # noqa: E731
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = {"batch": 8, "micro_batch": 8}
    with PipelineTrainer(
        model, optimizer, scale, checkpoints=Checkpoints(tmp_path, every=1, kept=1), **sizes, **ONE
    ) as t:
        told = [step.metrics["loss"] for step in t.steps(make_data(24), epochs=1)]
    assert [math.isfinite(loss) for loss in told] == [True, False, True]
    assert [checkpoint.step for checkpoint in scan(tmp_path)] == [3]


def test_gradients_larger_than_the_grid_cost_a_try_and_no_step():
    model = make_model()
    tries = []
    loss = lambda out, y: 1e9 * nn.functional.cross_entropy(out, y)  # noqa: E731
    with PipelineTrainer(
        model, torch.optim.SGD(model.parameters(), lr=1e-12), loss,
        callbacks=Callbacks(on_step=lambda event: tries.append(event.applied)), **SIZES, **ONE,
    ) as t:  # fmt: skip
        steps = list(t.steps(make_data(), epochs=1))
    assert [step.step for step in steps] == [1, 2, 3]
    assert tries.count(True) == 3 and False in tries[1:3]


def test_sums_in_single_precision_train_as_well():
    losses = {}
    for exact in (True, False):
        with trainer(exact=exact) as t:
            losses[exact] = [step.metrics["loss"] for step in t.steps(make_data(), epochs=3)]
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


def test_another_layout_may_be_asked_for_and_one_that_cannot_be_is_refused():
    with trainer() as t:
        for step in t.steps(make_data(), epochs=2):
            if step.step == 1:
                t.relayout("1")
                for wrong, says in (("x", "'x'"), ("4", "3 layers"), ("2", "takes 2 members .there are 1")):
                    with pytest.raises(ConfigError, match=f"layout: .*{says}"):
                        t.relayout(wrong)
            if step.step == 3:
                assert t.engine.wishes.holds == "1"
                t.relayout(None)
        assert t.engine.wishes.holds == ""
        assert t.layout == f"{t.name} 0-2 x4"


def test_a_model_of_which_an_earlier_trainer_kept_a_part_may_not_found_a_cluster_but_resume(tmp_path):
    model, disk = make_model(), Checkpoints(tmp_path, every=1)
    with trainer(model, keepers=2, checkpoints=disk) as t:
        list(t.steps(make_data(), epochs=1))
        t.gather()
        values = [parameter.detach().clone() for parameter in model.parameters()]
    t.engine.keeping.parts.keep(())  # As where others keep all of it.
    with pytest.raises(ConfigError, match="no values of layers 0, 2 are here"):
        trainer(model, keepers=2)
    resumed = Checkpoints(tmp_path, every=1, resume=True)
    with trainer(model, keepers=2, checkpoints=resumed) as t:
        assert all(map(torch.equal, model.parameters(), values))


class _Pair(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]


class _Twice(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


class _Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.a(x), self.b(x)


def test_layers_may_hand_on_several_tensors():
    with trainer([_Split(), _Pair()]) as t:
        assert len(list(t.steps(make_data(), epochs=1))) == 3


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"model": nn.Linear(4, 3)}, "model: Linear .expected an nn.Sequential"),
        (
            {"model": [nn.Linear(4, 3), "relu"], "optimizer": torch.optim.SGD(make_model().parameters())},
            "model: layer 1 is a str .expected",
        ),
        (
            {"model": [nn.Linear(4, 3), torch.relu], "optimizer": torch.optim.SGD(make_model().parameters())},
            "layer 1: its function fails.*argument.*expected a module, or a function without arguments",
        ),
        (
            {"model": _Twice(nn.Linear(4, 3))},
            "model: _Twice has a forward of its own, which nobody would call",
        ),
        ({"model": nn.Sequential(), "optimizer": torch.optim.SGD(make_model().parameters())}, "no layers"),
        ({"model": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))}, "'1' is a BatchNorm1d"),
        ({"layout": "2 and 2"}, "layout: '2 and 2'"),
        (
            {"layout": "4"},
            "layout: '4' has a pipeline of 4 stages .expected at most 3, as the model has 3 layers",
        ),
        ({"batch": 9}, "micro_batch: 2 does not divide the batch of 9"),
        ({"optimizer": torch.optim.LBFGS(make_model().parameters())}, "LBFGS"),
        ({"optimizer": torch.optim.SGD}, "optimizer: <class .*expected a torch.optim optimizer"),
        ({"lr_scheduler": [0.1]}, r"lr_scheduler: \[0.1\] .expected a scheduler"),
        ({"stages": "2"}, "stages: '2' .expected a whole number from 1 on"),
        ({"stages": 0}, "stages: 0 .expected"),
        ({"stages": 9}, "stages: 9 .expected at most 3, as the model has 3 layers"),
        ({"layout": 1}, "layout: 1 .expected stages of each pipeline"),
        ({"max_grad_norm": -1.0}, "max_grad_norm: -1.0"),
        ({"max_grad_norm": "1"}, "max_grad_norm: '1'"),
        (
            {"lr_scheduler_every": 0},
            "lr_scheduler_every: 0 .expected 'step', 'epoch', 'evaluation' or a whole",
        ),
        ({"lr_scheduler_every": "epochs"}, "lr_scheduler_every: 'epochs'"),
        ({"seed": "1"}, "seed: '1'"),
        ({"callbacks": print}, "callbacks: <built-in function print>"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_cannot_be_is_refused_before_anybody_is_joined(wrong, names):
    with pytest.raises(ConfigError, match=names):
        trainer(**wrong)


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (nn.CrossEntropyLoss(reduction="none"), r"\(2,\)"),
        (lambda out, y: nn.functional.cross_entropy(out.detach(), y), "nothing trained has a part in it"),
        (lambda out, y: 0.5, "float"),
    ],
    ids=["many numbers", "without a gradient", "no tensor"],
)
def test_a_loss_that_is_no_number_with_a_gradient_is_refused(loss, found):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(ConfigError, match=rf"loss: {found} \(expected one number"),
        PipelineTrainer(model, optimizer, loss, **SIZES, **ONE) as t,
    ):
        list(t.steps(make_data(), epochs=1))


def frozen(*layers):
    """Those layers of the model are."""
    model = make_model()
    for number in layers:
        model[number].requires_grad_(False)
    return model


def test_a_layer_that_is_thawed_while_it_trains_is_refused_by_name():
    model = frozen(0)
    with (
        pytest.raises(ConfigError, match="'weight' of a layer has a gradient but had requires_grad=False"),
        trainer(model) as t,
    ):
        for _ in t.steps(make_data(), epochs=2):
            model[0].requires_grad_(True)


def test_a_gradient_from_before_a_layer_was_frozen_is_none_of_ours():
    model = make_model()
    model(torch.ones(2, 4)).sum().backward()
    model[0].requires_grad_(False)
    with trainer(model) as t:
        assert len(list(t.steps(make_data(), epochs=1))) == 3


def test_a_sparse_gradient_is_refused_by_name():
    model = nn.Sequential(nn.EmbeddingBag(5, 4, sparse=True), nn.Linear(4, 3))
    data = TensorDataset(torch.arange(20).reshape(20, 1) % 5, torch.arange(20) % 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        pytest.raises(ConfigError, match="'weight' of a layer has a sparse gradient"),
        trainer(model, optimizer) as t,
    ):
        list(t.steps(data, epochs=1))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kept": 1}, "kept checkpoints: 1 .expected at least 2"),
        ({"copies": "whole"}, "expected .shard. with keepers=2"),
    ],
)
def test_keepers_need_checkpoints_that_all_can_go_back_to(tmp_path, wrong, says):
    with pytest.raises(ConfigError, match=says):
        trainer(keepers=2, checkpoints=Checkpoints(tmp_path, **wrong))


def test_keepers_of_nothing_that_is_trained_are_refused():
    with pytest.raises(ConfigError, match="keepers: no layer has a parameter that is trained"):
        trainer(frozen(0, 2), keepers=2)


def test_a_run_goes_on_with_one_layer_more_that_has_no_parameters_and_without_it(tmp_path):
    """The layout in the checkpoint is of other layers."""
    to_disk = Checkpoints(tmp_path, every=2, resume=True)
    for epochs, more in enumerate(([], [nn.Identity()], []), start=1):
        model = nn.Sequential(*make_model(), *more)
        with trainer(model, checkpoints=to_disk) as t:
            list(t.steps(make_data(), epochs=epochs))
            assert (t.step, t.layout) == (3 * epochs, f"{t.name} 0-{2 + len(more)} x4")


def test_a_run_goes_on_with_other_layers_frozen(tmp_path):
    with trainer(checkpoints=Checkpoints(tmp_path, every=2)) as t:
        list(t.steps(make_data(), epochs=1))
    model = frozen(0)
    with trainer(model, checkpoints=Checkpoints(tmp_path, every=2, resume=True)) as t:
        before = model[0].weight.clone()
        assert [step.step for step in t.steps(make_data(), epochs=2)] == [4, 5, 6]
        assert torch.equal(model[0].weight, before)


def test_a_mean_of_a_training_step_does_not_weigh_as_the_last_batch_of_an_evaluation():
    with trainer() as t:
        for step in t.steps(make_data(), epochs=1):
            if step.step == 1:
                list(t.evaluate(make_data(7), 3))
            else:
                t.mean(1.0, "x")
                assert t.engine.means.take()["x"] == (1.0, 1.0)


def test_names_by_which_engines_signal_are_no_names_of_means():
    with trainer() as t, pytest.raises(ConfigError, match="mean: 'void' is a signal of chaosnet's own"):
        t.mean(1.0, "void")


def test_who_leaves_before_it_has_data_holds_nobody_up():
    t = trainer()
    t.close()
    t.close()


@pytest.mark.parametrize("asks", ["steps", "gather", "evaluate"])
@pytest.mark.parametrize("place", ["on_step", "on_epoch", "on_computed", "loss"])
def test_a_step_within_a_step_is_refused(place, asks):
    def ask(*_):
        if asks == "gather":
            t.engine.keeping.whole = frozenset()
        calls = {"steps": lambda: t.steps(make_data(), 2), "evaluate": lambda: t.evaluate(make_data(), 4)}
        next(iter(calls[asks]())) if asks in calls else t.gather()

    def loss(out, y):
        ask()
        return nn.functional.cross_entropy(out, y)

    model = make_model()
    with (
        pytest.raises(ConfigError, match=r"in the middle of a step asked for another one, by steps\(\), gather"),
        PipelineTrainer(
            model, torch.optim.SGD(model.parameters(), 0.1), loss if place == "loss" else nn.functional.cross_entropy,
            keepers=2, callbacks=Callbacks(**{place: ask}) if place != "loss" else None, **SIZES, **ONE,
        ) as t,
    ):  # fmt: skip
        list(t.steps(make_data(), epochs=1))


def test_who_leaves_within_the_loss_has_left_after_the_step():
    model = make_model()

    def loss(out, y):
        t.request_node_exit()
        return nn.functional.cross_entropy(out, y)

    with PipelineTrainer(model, torch.optim.SGD(model.parameters(), 0.1), loss, **SIZES, **ONE) as t:
        assert not list(t.steps(make_data(), epochs=1))


def test_a_callback_may_have_the_node_leave_after_the_step():
    here = []
    callbacks = Callbacks(on_step=lambda event: here[0].close() if here and event.step == 2 else None)
    t = trainer(callbacks=callbacks)
    here.append(t)
    assert [step.step for step in t.steps(make_data(), epochs=5)] == [1, 2]
    t.close()
    assert t.session.ended is not None


def test_what_the_script_goes_back_through_by_itself_changes_nothing():
    losses = []
    for own in (False, True):
        with trainer() as t:
            found = []
            for step in t.steps(make_data(), epochs=2):
                found.append(step.metrics["loss"])
                if own:
                    t.model(torch.randn(2, 4)).sum().backward()
            losses.append(found)
    assert losses[0] == losses[1]


def test_a_loss_that_uses_parameters_of_other_layers_is_refused():
    model = make_model()

    def loss(out, y):
        return nn.functional.cross_entropy(out, y) + 0.1 * sum(p.square().sum() for p in model.parameters())

    with (
        pytest.raises(ConfigError, match="uses a parameter of another layer"),
        PipelineTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, **SIZES, **ONE) as t,
    ):
        list(t.steps(make_data(), epochs=1))


def test_a_checkpoint_goes_on_in_trainer_and_one_of_trainer_in_pipelines(tmp_path):
    to_disk = Checkpoints(tmp_path, every=2, resume=True)
    data = make_data()
    numbered = TensorDataset(*data.tensors, torch.arange(20))
    with trainer(checkpoints=Checkpoints(tmp_path, every=2)) as t:
        for step in t.steps(data, epochs=1):
            if step.step == 2:
                break
        wanted = t.state_hash()
        left = {*range(20)} - {*t.engine.batches.share.order.indices(0, [(0, 16)])}
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Trainer(model, optimizer, checkpoints=to_disk, **ONE) as t:
        assert (t.step, t.epoch, t.samples, t.state_hash()) == (2, 0, 16, wanted)
        seen = []
        for x, y, numbers in t.batches(numbered, 3, epochs=1):
            seen += numbers.tolist()
            nn.functional.cross_entropy(model(x), y).backward()
            t.update()
        assert {*seen} == left  # It goes on within the epoch.
        assert (t.step, t.epoch) == (4, 1)
        wanted = t.state_hash()
    with trainer(checkpoints=to_disk) as t:
        assert (t.step, t.epoch, t.state_hash()) == (4, 1, wanted)
        assert [step.step for step in t.steps(data, epochs=2)] == [5, 6, 7]


def test_an_evaluation_in_the_middle_is_of_the_model_as_it_is_and_costs_no_step():
    data, test = make_data(), make_data(7)
    plain, heard = [], []
    with trainer() as t:
        for step in t.steps(data, epochs=2):
            plain.append((step.step, step.metrics["loss"]))
    with trainer() as t:
        seen = []
        for step in t.steps(data, epochs=2):
            seen.append((step.step, step.metrics["loss"]))
            before, samples = t.state_hash(), 0
            t.model.eval()
            for x, y in t.evaluate(test, 3):
                with torch.no_grad():
                    t.mean((t.model(x).argmax(1) == y).float().mean(), "right")
                samples += len(x)
            t.model.train()
            assert (samples, t.state_hash(), t.step) == (7, before, step.step)
            with torch.no_grad():
                right = (t.model.eval()(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean()
            t.model.train()
            heard.append(t.metrics["right"] == pytest.approx(float(right)))
    assert seen == plain
    assert all(heard) and len(heard) == 6


def test_gathering_in_the_middle_is_of_the_model_as_it_is_and_costs_no_step():
    with trainer(keepers=2) as t:
        seen = []
        for step in t.steps(make_data(), epochs=2):
            seen.append(step.step)
            t.engine.keeping.whole = frozenset()  # As if others kept some of it.
            t.gather()
            assert t.step == step.step
    assert seen == [1, 2, 3, 4, 5, 6]


def test_a_loop_that_breaks_before_a_step_is_done_over_ends_the_script_with_its_own_error():
    def breaks():
        raise ZeroDivisionError("a bug of ours")

    with pytest.raises(ZeroDivisionError, match="a bug of ours"), trainer() as t:
        for _ in t.steps(make_data(), epochs=1):
            t.session.loop._call(breaks)
            t.session.loop._thread.join()
            t.engine._tried = t.engine.round  # As if the step had been torn by that.


class _Of(nn.Module):
    """What a function makes of its input, and of this layer's own."""

    def __init__(self, function, *own):
        super().__init__()
        self.function, self.own = function, nn.ModuleList(own)

    def forward(self, x):
        return self.function(x, *self.own)


def both_ways(make):
    """Losses of one epoch of one micro-batch a step, here and by a plain loop over the same samples."""
    found, sizes, data = [], {"batch": 4, "micro_batch": 4}, make_data()
    torch.manual_seed(0)
    model = nn.Sequential(*make())
    with trainer(model, torch.optim.SGD(model.parameters(), lr=0.3), **sizes) as t:
        found.append([step.metrics["loss"] for step in t.steps(data, epochs=1)])
        order = t.engine.batches.share.order.indices(0, [(0, 20)])
    torch.manual_seed(0)
    model = nn.Sequential(*make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    found.append([])
    for at in range(0, 20, 4):
        x, y = (each[order[at : at + 4]] for each in data.tensors)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found[1].append(float(loss.detach()))
    return found


def test_complex_numbers_between_layers_have_gradients():
    """Layers before them were not trained."""
    here, plain = both_ways(
        lambda: [
            nn.Linear(4, 8),
            _Of(torch.fft.rfft),
            _Of(lambda z: z.conj()),
            _Of(lambda z, head: head(torch.cat([z.real, z.imag], -1)), nn.Linear(10, 3)),
        ]
    )
    assert here == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.add_(1.0),
        lambda x: nn.functional.relu(x, inplace=True),
        lambda x: nn.functional.dropout(x, 0.0).view(-1).mul_(2.0).view(x.shape),
    ],
    ids=["added", "function", "view"],
)
def test_a_layer_may_change_its_input_in_place(change):
    """As in one process. It ended with: a leaf Variable that requires grad is being used in an in-place operation."""
    here, plain = both_ways(lambda: [nn.Linear(4, 8), _Of(change), nn.Linear(8, 3)])
    assert here == pytest.approx(plain, rel=1e-5)


def test_a_layer_that_is_run_again_with_a_copy_draws_the_same():
    def losses(layer):
        torch.manual_seed(0)
        with trainer(nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 3))) as t:
            return [step.metrics["loss"] for step in t.steps(make_data(), epochs=1)]

    late = losses(_Of(lambda x: nn.functional.dropout(x, 0.5) + x.mul_(2.0)))
    assert late == losses(_Of(lambda x: nn.functional.dropout(x, 0.5) + 2.0 * x))


def test_what_else_torch_refuses_in_a_layer_is_told_as_it_is():
    calls = []

    def refuse(x):
        calls.append(x)
        raise RuntimeError("shapes do not fit")

    model = nn.Sequential(nn.Linear(4, 3), _Of(refuse))
    with pytest.raises(RuntimeError, match="shapes do not fit"), trainer(model) as t:
        list(t.steps(make_data(), epochs=1))
    assert len(calls) == 1


class _Counts(nn.Module):
    """Writes to a buffer as it computes, or puts another in its place."""

    def __init__(self, persistent, replaces):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=persistent)
        self.replaces = replaces

    def forward(self, x):
        if self.replaces:
            self.seen = self.seen + len(x)
        else:
            self.seen += len(x)
        return x


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (_Counts(True, replaces=False), "layer 1 changes its buffer 'seen' as it computes"),
        (_Counts(True, replaces=True), "layer 1 changes its buffer 'seen'"),
        (
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
            "layer 1 changes .*'parametrizations.weight",
        ),
    ],
    ids=["written", "replaced", "spectral norm"],
)
def test_a_layer_that_writes_to_the_state_as_it_computes_is_refused_by_its_buffer(layer, names):
    model = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 3))
    with pytest.raises(ConfigError, match=names), trainer(model) as t:
        list(t.steps(make_data(), epochs=1))


@pytest.mark.parametrize("replaces", [False, True])
def test_what_a_layer_keeps_to_save_time_is_its_own(replaces):
    with trainer(nn.Sequential(nn.Linear(4, 3), _Counts(False, replaces))) as t:
        assert len(list(t.steps(make_data(), epochs=1))) == 3


def test_who_has_resumed_may_evaluate_and_gather_before_it_trains(tmp_path):
    with trainer(checkpoints=Checkpoints(tmp_path, every=1)) as t:
        next(t.steps(make_data(), epochs=9))
    for keepers in (None, 2):
        with trainer(checkpoints=Checkpoints(tmp_path, every=1, resume=True), keepers=keepers) as t:
            at = t.step
            t.gather()
            for x, y in t.evaluate(make_data(), batch_size=8):
                t.mean(nn.functional.cross_entropy(t.model(x), y), "held out")
            assert t.metrics["held out"] > 0 and at == t.step > 0
            assert next(t.steps(make_data(), epochs=9)).step == at + 1
