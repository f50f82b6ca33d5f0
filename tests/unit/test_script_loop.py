"""The usual loop of PyTorch scripts, unchanged: alone in a cluster it ends where it does without one, to the bit."""

import copy
import operator
import pickle
import socket
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import TensorDataset

from chaosnet import ConfigError, Trainer
from chaosnet.node.sums.gradients import Gradients
from chaosnet.script.loop import AMP
from chaosnet.script.rules import ScriptRules
from chaosnet.training.named_updates import NamedOptimizers, NamedSchedulers

pytestmark = [pytest.mark.realtime, pytest.mark.usefixtures("fresh_exit_events")]

STEPS = 6
OVERFLOWS_AT = 2


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def loss_of(model, step=0):
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(3, 4, generator=generator)).square().mean()


@pytest.fixture
def start():
    trainers = []

    def make(model, optimizer, *rest, **settings):
        trainer = Trainer(model, optimizer, *rest, **{"quiet": True, **settings})
        trainers.append(trainer)
        return trainer

    yield make
    for trainer in trainers:
        trainer.close()


# --- as people write it ---


def plain(model, optimizer, scheduler):
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def zero_grad_first(model, optimizer, scheduler):
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, step).backward()
        optimizer.step()
        scheduler.step()


def clipped(model, optimizer, scheduler):
    for step in range(STEPS):
        loss_of(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def by_closure(model, optimizer, scheduler):
    losses = []

    def closure():
        optimizer.zero_grad()
        losses.append(loss_of(model, len(losses)))
        losses[-1].backward()
        return losses[-1]

    for step in range(STEPS):
        assert optimizer.step(closure) is losses[step]
        scheduler.step()
    assert len(losses) == STEPS


def accumulated(model, optimizer, scheduler):
    for step in range(3 * STEPS):
        (loss_of(model, step) / 3).backward()
        if step % 3 == 2:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def scaled(model, optimizer, scheduler, unscale=False, only_if_stepped=False):
    """With a gradient that overflows in one step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        factor = float("inf") if step == OVERFLOWS_AT else 1.0
        (scaler.scale(loss_of(model, step)) * factor).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale() < scale) is (step == OVERFLOWS_AT)
        if not only_if_stepped or scale <= scaler.get_scale():
            scheduler.step()


def scaled_and_clipped(model, optimizer, scheduler):
    scaled(model, optimizer, scheduler, unscale=True, only_if_stepped=True)


def scaled_and_scheduled_as_it_steps(model, optimizer, scheduler):
    scaled(model, optimizer, scheduler, only_if_stepped=True)


LOOPS = [
    plain, zero_grad_first, clipped, by_closure, accumulated, scaled_and_clipped, scaled_and_scheduled_as_it_steps,
]  # fmt: skip
OPTIMIZERS = {
    "sgd": sgd,
    "adam": lambda model: torch.optim.Adam(model.parameters(), 0.01),
    "fused adam": lambda model: torch.optim.AdamW(model.parameters(), 0.01, fused=True),
    "groups": lambda model: torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.3}, {"params": model[2].parameters()}], 0.1
    ),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_usual_loop_ends_where_it_does_without_a_trainer(start, loop, kind):
    ends = []
    for alone in (True, False):
        model = make_model()
        optimizer = OPTIMIZERS[kind](model)
        scheduler = schedulers.StepLR(optimizer, 2, 0.5)
        trainer = None if alone else start(model, optimizer, scheduler)
        loop(model, optimizer, scheduler)
        rates = [group["lr"] for group in optimizer.param_groups]
        ends.append((model.state_dict(), optimizer.state_dict()["state"], rates, scheduler.last_epoch))
    (weights, state, *rest), (weights_of_ours, state_of_ours, *rest_of_ours) = ends
    assert trainer.step == STEPS - loop.__name__.startswith("scaled")
    torch.testing.assert_close(weights_of_ours, weights, rtol=0, atol=0)
    torch.testing.assert_close(state_of_ours, state, rtol=0, atol=0)
    assert rest_of_ours == rest


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("early", [True, False])
def test_a_scheduler_may_be_made_before_or_after_the_trainer(start, early):
    """Each of torch's wraps optimizer.step, and warns where its wrapping is gone."""
    model = make_model()
    optimizer = sgd(model)
    scheduler = schedulers.StepLR(optimizer, 1, 0.5) if early else None
    trainer = start(model, optimizer, scheduler)
    scheduler = scheduler or schedulers.StepLR(optimizer, 1, 0.5)
    loss_of(model).backward()
    optimizer.step()
    scheduler.step()
    assert (trainer.step, optimizer.param_groups[0]["lr"]) == (1, 0.05)


def test_named_optimizers_are_stepped_by_their_own_step(start):
    d, g = make_model(), make_model()
    opt_d, opt_g = sgd(d), sgd(g)
    schedule = schedulers.StepLR(opt_g, 1, 0.5)
    trainer = start({"D": d, "G": g}, {"D": opt_d, "G": opt_g}, {"G": schedule})
    for step in range(3):
        for model, optimizer in ((d, opt_d), (g, opt_g)):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        schedule.step()
    assert (trainer.step, schedule.last_epoch, opt_d.param_groups[0]["lr"]) == (6, 3, 0.1)
    loss_of(g).backward()
    with pytest.raises(ConfigError, match="name='G', but 'D' is due"):
        opt_g.step()


def by_kind(model):
    """Those that step together: one has the matrices, the other the rest, as Muon and AdamW."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [torch.optim.SGD(matrices, 0.1, momentum=0.9), torch.optim.AdamW(rest, 0.01)]


def each_cleared_after_its_step(model, optimizers, schedules):
    for step in range(STEPS):
        loss_of(model, step).backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


def scaled_together(model, optimizers, schedules, unscale=False):
    """Gradients of both overflow in one step, in another those of the second alone."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        scaler.scale(loss_of(model, step)).backward()
        if step == OVERFLOWS_AT:
            model[0].bias.grad[0] = model[2].weight.grad[0] = float("inf")
        for optimizer in optimizers:
            if unscale:
                scaler.unscale_(optimizer)
        for optimizer in reversed(optimizers):
            scaler.step(optimizer)
        scaler.update()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.zero_grad()
            if step != OVERFLOWS_AT:
                schedule.step()


def unscaled_together(model, optimizers, schedules):
    scaled_together(model, optimizers, schedules, unscale=True)


@pytest.mark.parametrize("loop", [each_cleared_after_its_step, scaled_together, unscaled_together])
def test_optimizers_that_step_together_end_where_they_do_without_a_trainer(start, loop):
    ends = []
    for alone in (True, False):
        model = make_model()
        optimizers = by_kind(model)
        schedules = [schedulers.StepLR(each, 2, 0.5) for each in optimizers]
        trainer = None if alone else start(model, optimizers, schedules)
        loop(model, optimizers, schedules)
        states = [each.state_dict()["state"] for each in optimizers]
        counts = [(each.last_epoch, each.get_last_lr()) for each in schedules]
        ends.append((model.state_dict(), states, counts))
    (weights, state, counted), (weights_of_ours, state_of_ours, counted_of_ours) = ends
    assert trainer.step == STEPS - (loop is not each_cleared_after_its_step)
    torch.testing.assert_close(weights_of_ours, weights, rtol=0, atol=0)
    torch.testing.assert_close(state_of_ours, state, rtol=0, atol=0)
    assert counted_of_ours == counted


def test_a_gradient_that_overflows_in_one_of_the_optimizers_that_step_together_is_of_none(start):
    model = make_model()
    optimizers = by_kind(model)
    trainer, scaler = start(model, optimizers), torch.amp.GradScaler("cpu", init_scale=8.0)
    before = copy.deepcopy(model.state_dict())
    scaler.scale(loss_of(model)).backward()
    model[0].bias.grad[0] = float("inf")
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert (trainer.step, scaler.get_scale()) == (0, 8.0)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_update_steps_all_optimizers_that_step_together_and_a_schedule_may_be_of_one(start):
    model = make_model()
    optimizers = by_kind(model)
    trainer = start(model, optimizers, [None, schedulers.StepLR(optimizers[1], 1, 0.5)], max_grad_norm=1.0)
    before = copy.deepcopy(model.state_dict())
    loss_of(model).backward()
    trainer.update()
    assert trainer.step == 1
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [each.param_groups[0]["lr"] for each in optimizers] == [0.1, 0.005]


def test_one_of_the_optimizers_that_step_together_cannot_be_left_out(start):
    model = make_model()
    optimizers = by_kind(model)
    trainer = start(model, optimizers)
    loss_of(model).backward()
    optimizers[0].step()
    loss_of(model).backward()
    with pytest.raises(ConfigError, match=r"SGD\.step\(\) was called again before"):
        optimizers[0].step()
    assert trainer.step == 1


def test_gradients_of_optimizers_that_step_together_are_all_unscaled_or_none(start):
    model = make_model()
    optimizers = by_kind(model)
    start(model, optimizers)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizers[0])
    scaler.step(optimizers[0])
    with pytest.raises(ConfigError, match=r"unscale_\(\) was called for some"):
        scaler.step(optimizers[1])


@pytest.mark.parametrize("schedule", [lambda each: schedulers.StepLR(each[0], 1), lambda each: [None]])
def test_optimizers_that_step_together_have_a_list_of_schedules(start, schedule):
    model = make_model()
    optimizers = by_kind(model)
    with pytest.raises(ConfigError, match="a list of as many as there are optimizers"):
        start(model, optimizers, schedule(optimizers))


def test_a_schedule_by_epochs_is_called_after_each(start):
    model = make_model()
    optimizer = sgd(model)
    scheduler = schedulers.StepLR(optimizer, 1, 0.5)
    trainer = start(model, optimizer, scheduler, lr_scheduler_every="epoch")
    data, rates = TensorDataset(torch.randn(24, 4)), []
    for _ in trainer.epochs(3):
        for (x,) in trainer.batches(data, 8):
            model(x).square().mean().backward()
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert rates == [0.1, 0.1, 0.05, 0.05, 0.05, 0.025, 0.025, 0.025, 0.0125]


def test_a_batch_whose_gradient_overflows_is_used_up(start):
    model = make_model()
    optimizer = sgd(model)
    trainer = start(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    data = TensorDataset(torch.randn(24, 4))
    for number, (x,) in enumerate(trainer.batches(data, 8)):
        loss = model(x).square().mean() * (float("inf") if number == 1 else 1.0)
        trainer.mean(loss)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert trainer.metrics.get("loss", 0.0) < float("inf")
    assert (trainer.epoch, trainer.step, trainer.samples) == (1, 2, 16)


class Custom(torch.optim.SGD):
    def step(self):
        super().step()


class Scaled(torch.optim.SGD):
    def step(self, closure=None, *, grad_scaler=None):
        super().step(closure)


@pytest.mark.parametrize("kind", [Custom, Scaled])
def test_a_grad_scaler_steps_an_optimizer_with_a_step_of_its_own(start, kind):
    model = make_model()
    optimizer = kind(model.parameters(), 0.1)
    trainer = start(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert trainer.step == 1


def test_an_error_out_of_a_step_leaves_nothing_of_the_grad_scaler(start):
    model = make_model()
    optimizer = sgd(model)
    trainer = start(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model)).backward()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ConfigError, match="param_groups"):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
    assert trainer.step == 0


@pytest.mark.filterwarnings(
    "ignore:Dynamo does not know"
)  # How to trace our hooks of gradients: it need not.
def test_a_compiled_function_may_step(start):
    model = make_model()
    optimizer = sgd(model)
    scheduler = schedulers.StepLR(optimizer, 1, 0.5)
    trainer = start(model, optimizer, scheduler)

    @torch.compile(backend="eager")
    def train(step):
        loss_of(model, step).backward()
        optimizer.step()
        scheduler.step()

    for step in range(2):
        train(step)
    assert (trainer.step, optimizer.param_groups[0]["lr"]) == (2, 0.025)


class Wrapper:
    """Hands everything on to the scheduler inside."""

    def __init__(self, inner):
        self.inner, self.step = inner, inner.step

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_a_scheduler_whose_step_cannot_be_watched_is_left_as_it_is(start):
    model = make_model()
    optimizer = sgd(model)
    scheduler = Wrapper(schedulers.StepLR(optimizer, 1, 0.5))
    trainer = start(model, optimizer, scheduler)
    loss_of(model).backward()
    optimizer.step()
    assert (trainer.step, optimizer.param_groups[0]["lr"], type(scheduler)) == (1, 0.05, Wrapper)


class Halving:
    """Of a script's own, with nothing that torch's have."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] /= 2

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Slotted:
    __slots__ = ("optimizer", "steps")
    __init__, step = Halving.__init__, Halving.step
    state_dict, load_state_dict = Halving.state_dict, Halving.load_state_dict


class Holding:
    """Passes on to torch's, as wrappers of libraries do."""

    def __init__(self, optimizer):
        self.inner = schedulers.StepLR(optimizer, 1, 0.5)

    def step(self):
        self.inner.step()

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


class SlottedHolding:
    __slots__ = "inner"  # A name alone is allowed, too.
    __init__, step = Holding.__init__, Holding.step
    state_dict, load_state_dict = Holding.state_dict, Holding.load_state_dict


class Borrowing(Holding):
    """Its step is the object's own, not the class's."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.step = self.inner.step


COMPOSITES = {
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.5, 9), schedulers.ConstantLR(o, 1.0, 9)], [9]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.StepLR(o, 1, 0.5), schedulers.StepLR(o, 9)]
    ),
}


@pytest.mark.parametrize("kind", [Halving, Slotted, Holding, SlottedHolding, *COMPOSITES.values()])
def test_a_scheduler_of_any_kind_is_stepped_once(start, kind):
    """Slotted ones were stepped by Trainer, and once more by the script, in silence."""
    ends = []
    for alone in (True, False):
        model = make_model()
        optimizer = sgd(model)
        scheduler = kind(optimizer)
        trainer = None if alone else start(model, optimizer, scheduler)
        plain(model, optimizer, scheduler)
        ends.append((optimizer.param_groups[0]["lr"], scheduler.state_dict().get("steps")))
    assert ends[0] == ends[1]
    trainer.close()
    assert type(scheduler) is (kind if isinstance(kind, type) else type(scheduler))


@pytest.mark.parametrize(
    ("kind", "step"),
    [(Holding, "inner.step"), (SlottedHolding, "inner.step"), (Borrowing, "step")],
)
def test_a_scheduler_inside_that_the_script_steps_itself_is_refused(start, kind, step):
    model = make_model()
    optimizer = sgd(model)
    scheduler = kind(optimizer)
    trainer = start(model, optimizer, scheduler)
    one_step(trainer, model)
    operator.attrgetter(step)(scheduler)()
    with pytest.raises(ConfigError, match=rf"{kind.__name__} was stepped past Trainer.*expected no call"):
        one_step(trainer, model)


class Final(Halving):
    """Nobody derives from it."""

    def __init_subclass__(cls):
        raise RuntimeError("final")


class HalvingByItself(Halving):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.step = super().step


@pytest.mark.parametrize("kind", [Final, HalvingByItself])
def test_a_scheduler_whose_steps_can_be_neither_watched_nor_counted_is_refused(start, kind):
    model = make_model()
    optimizer = sgd(model)
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\.step\(\) cannot be watched.*expected a class"):
        start(model, optimizer, kind(optimizer))
    assert "step" not in vars(optimizer)


# --- what cannot be meant ---


def one_step(trainer, model):
    loss_of(model).backward()
    trainer.optimizer.step()


@pytest.mark.parametrize(("args", "kwargs"), [((0.1,), {}), ((None, 2), {}), ((), {"grads": []})])
def test_an_argument_of_a_step_that_is_no_closure_is_refused(start, args, kwargs):
    model = make_model()
    optimizer = sgd(model)
    start(model, optimizer)
    with pytest.raises(
        ConfigError, match=r"optimizer\.step\(\) was called with an argument \(expected none, or a"
    ):
        optimizer.step(*args, **kwargs)


@pytest.mark.parametrize("order", [("update", "step"), ("step", "update")])
def test_two_steps_for_one_backward_are_refused(start, order):
    model = make_model()
    optimizer = sgd(model)
    trainer = start(model, optimizer)
    calls = {"update": trainer.update, "step": optimizer.step}
    loss_of(model).backward()
    calls[order[0]]()
    with pytest.raises(ConfigError, match=r"no backward\(\) between them.*delete the other"):
        calls[order[1]]()
    loss_of(model).backward()
    calls[order[1]]()
    assert trainer.step == 2


def make_two(start):
    d, g = make_model(), make_model()
    opt_d, opt_g = sgd(d), sgd(g)
    return start({"D": d, "G": g}, {"D": opt_d, "G": opt_g}), d, g, opt_d, opt_g


def test_one_backward_for_two_named_optimizers_is_refused(start):
    """The step of the first drops the gradients of the second."""
    _, d, g, opt_d, opt_g = make_two(start)
    (loss_of(d) + loss_of(g)).backward()
    opt_d.step()
    with pytest.raises(
        ConfigError, match=r"'G' was stepped with no backward\(\) since the step of 'D'.*a list of optimizers"
    ):
        opt_g.step()


def test_a_named_update_without_samples_needs_no_backward(start):
    trainer, d, _, opt_d, _ = make_two(start)
    for _ in range(2):
        loss_of(d).backward()
        opt_d.step()
        trainer.update(samples=0, name="G")
    assert trainer.step == 2


def test_the_rest_of_a_round_that_is_void_needs_no_backward(start):
    trainer, d, g, opt_d, opt_g = make_two(start)
    (loss_of(d) + loss_of(g)).backward()
    opt_d.step()
    trainer.engine.named.rejoined()
    opt_g.step()
    assert not trainer.engine.named.void


@pytest.mark.parametrize("call", ["trainer.update", "optimizer.step", "scheduler.step"])
def test_a_step_in_after_step_is_refused(start, call):
    model = make_model()
    optimizer = sgd(model)
    scheduler = schedulers.StepLR(optimizer, 1, 0.5)
    trainer = start(
        model, optimizer, scheduler, after_step=lambda: operator.attrgetter(call)(SimpleNamespace(**made))()
    )
    made = {"trainer": trainer, "optimizer": optimizer, "scheduler": scheduler}
    loss_of(model).backward()
    with pytest.raises(ConfigError, match=rf"after_step called {call}\(\)"):
        optimizer.step()


def test_a_step_that_was_kept_from_before_is_refused(start):
    model = make_model()
    optimizer = sgd(model)
    step = optimizer.step
    start(model, optimizer)
    loss_of(model).backward()
    with pytest.raises(ConfigError, match="stepped past Trainer"):
        step()


@pytest.mark.parametrize(
    ("settings", "steps", "says"),
    [
        ({}, 0, "without a step of the optimizer before it"),
        ({}, 3, "after 3 steps of the optimizer.*lr_scheduler_every='epoch'"),
        ({"lr_scheduler_every": 10}, 1, "by samples: lr_scheduler_every=10.*delete that line"),
    ],
)
def test_a_schedule_that_the_script_means_otherwise_is_refused(start, settings, steps, says):
    model = make_model()
    optimizer = sgd(model)
    scheduler = schedulers.StepLR(optimizer, 5)
    trainer = start(model, optimizer, scheduler, **settings)
    for _ in range(steps):
        one_step(trainer, model)
    with pytest.raises(ConfigError, match=rf"StepLR\.step\(\) was called.*{says}"):
        scheduler.step()


def test_a_schedule_by_epochs_that_is_called_at_each_step_is_refused(start):
    model = make_model()
    optimizer = sgd(model)
    scheduler = schedulers.StepLR(optimizer, 5)
    trainer = start(model, optimizer, scheduler, lr_scheduler_every="epoch")
    batches = iter(trainer.batches(TensorDataset(torch.randn(24, 4)), 8))
    next(batches)
    one_step(trainer, model)
    scheduler.step()
    next(batches)
    one_step(trainer, model)
    with pytest.raises(ConfigError, match=r"within an epoch.*lr_scheduler_every='step'"):
        scheduler.step()


def test_a_plateau_is_not_judged_by_what_one_node_measures(start):
    model = make_model()
    optimizer = sgd(model)
    scheduler = schedulers.ReduceLROnPlateau(optimizer)
    trainer = start(model, optimizer, scheduler)
    one_step(trainer, model)
    with pytest.raises(ConfigError, match=r"trainer\.mean\(loss\) before optimizer\.step\(\)"):
        scheduler.step(0.5)


def test_a_schedule_that_is_stepped_past_the_trainer_is_refused(start):
    model = make_model()
    optimizer = sgd(model)
    scheduler = schedulers.StepLR(optimizer, 5)
    trainer = start(model, optimizer, scheduler)
    one_step(trainer, model)
    schedulers.StepLR.step(scheduler)
    with pytest.raises(ConfigError, match="StepLR was stepped past Trainer"):
        one_step(trainer, model)


def test_a_scheduler_that_the_trainer_was_not_given_is_told(start, capfd):
    model = make_model()
    optimizer = sgd(model)
    schedulers.StepLR(optimizer, 5)
    start(model, optimizer, quiet=False)
    assert "not given to Trainer" in capfd.readouterr().err


# --- and afterwards ---


@pytest.mark.parametrize("kind", ["one", "in a sequence", "with a name"])
def test_a_scheduler_of_another_optimizer_is_refused(start, kind):
    model = make_model()
    mine, other = sgd(model), torch.optim.Adam(model.parameters())
    scheduler = schedulers.StepLR(other, 1)
    if kind == "in a sequence":
        scheduler = schedulers.SequentialLR(other, [scheduler, schedulers.StepLR(other, 2)], milestones=[1])
    rest = (mine, scheduler) if kind != "with a name" else ({"D": mine}, {"D": scheduler})
    with pytest.raises(ConfigError, match="was made for another optimizer, of class Adam"):
        start(model, *rest)
    mine.step()


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("model", [nn.Linear(1, 1)], r"model: \[Linear.*expected a torch.nn.Module"),
        ("optimizer", torch.optim.Adam, r"optimizer: <class .*Adam.*expected a torch.optim optimizer\)"),
        ("optimizer", "sgd", r"optimizer: 'sgd' \(expected"),
        ("scheduler", [1, 2], r"lr_scheduler: \[1, 2\] \(expected a scheduler made for the optimizer"),
        ("scheduler", schedulers.StepLR, r"lr_scheduler: <class .*StepLR"),
        ("scheduler", TensorDataset(torch.ones(2)), r"lr_scheduler: <torch.utils.data"),
    ],
)
def test_what_is_no_model_optimizer_or_scheduler_is_refused_by_name(start, place, value, says):
    model = make_model()
    given = {"model": model, "optimizer": sgd(model), "scheduler": None, place: value}
    with pytest.raises(ConfigError, match=says):
        start(*given.values())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda plateau, loss: plateau.step(loss), None),
        (lambda plateau, loss: plateau.step(metrics=loss, epoch=None), None),
        (lambda plateau, loss: None, None),
        (
            lambda plateau, loss: plateau.step(loss + 1),
            "was called with .* the cluster's evaluation has come to",
        ),
        (lambda plateau, loss: (plateau.step(loss), plateau.step(loss)), "without an evaluation before it"),
    ],
)
def test_a_plateau_may_look_at_what_the_cluster_has_evaluated(start, call, says):
    model = make_model()
    optimizer = sgd(model)
    plateau = schedulers.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=9, threshold_mode="abs"
    )
    trainer = start(model, optimizer, plateau, lr_scheduler_every="evaluation")
    valid = TensorDataset(torch.randn(6, 4))
    for evaluation in range(3):
        loss_of(model).backward()
        optimizer.step()
        with torch.no_grad():
            for (x,) in trainer.evaluate(valid, 4):
                trainer.mean(model(x).square().mean())
        if says is not None:
            with pytest.raises(ConfigError, match=says):
                call(plateau, trainer.metrics["loss"])
            return
        call(plateau, trainer.metrics["loss"])
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**evaluation


def test_a_plateau_may_look_at_an_evaluation_that_has_come_to_no_number(start):
    model = make_model()
    optimizer = sgd(model)
    plateau = schedulers.ReduceLROnPlateau(optimizer)
    trainer = start(model, optimizer, plateau, lr_scheduler_every="evaluation")
    with torch.no_grad():
        for (x,) in trainer.evaluate(TensorDataset(torch.randn(6, 4)), 4):
            trainer.mean(model(x).mean() * float("nan"))
    plateau.step(trainer.metrics["loss"])
    assert plateau.last_epoch == 1
    with pytest.raises(ConfigError, match=r"was called with 0\.5, .* has come to nan"):
        plateau.step(0.5)


def test_a_schedule_by_evaluations_is_not_called_before_one(start):
    model = make_model()
    optimizer = sgd(model)
    scheduler = schedulers.StepLR(optimizer, 1)
    start(model, optimizer, scheduler, lr_scheduler_every="evaluation")
    loss_of(model).backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="without an evaluation before it"):
        scheduler.step()


def test_a_plateau_that_counts_steps_is_told(start, capfd):
    model = make_model()
    optimizer = sgd(model)
    start(model, optimizer, schedulers.ReduceLROnPlateau(optimizer, patience=7), quiet=False)
    assert "its patience of 7 counts steps" in capfd.readouterr().err


@pytest.mark.parametrize("steps", [STEPS, STEPS + 1])
@pytest.mark.parametrize("name", ["CosineAnnealingLR", "LambdaLR"])
def test_a_rate_of_0_is_told_with_the_first_step_that_it_spoils(start, capfd, steps, name):
    model = make_model()
    optimizer = sgd(model)
    to_0 = {
        "CosineAnnealingLR": lambda: schedulers.CosineAnnealingLR(optimizer, STEPS),
        "LambdaLR": lambda: schedulers.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / STEPS)),
    }
    schedule = to_0[name]()
    start(model, optimizer, schedule, quiet=False)
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0
    told = capfd.readouterr().err
    assert (f"{name} has come to a learning rate of 0: nothing is learned" in told) == (steps > STEPS)


@pytest.mark.parametrize("steps", [STEPS, STEPS + 1])
def test_a_schedule_that_ends_with_the_training_is_not_said_to_be_over(start, capfd, steps):
    model = make_model()
    optimizer = sgd(model)
    cycle = schedulers.OneCycleLR(optimizer, 0.1, total_steps=STEPS)
    start(model, optimizer, cycle, quiet=False)
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        cycle.step()
    assert ("OneCycleLR is over" in capfd.readouterr().err) == (steps > STEPS)


def test_parameters_that_no_optimizer_has_stay_as_they_are(start, capfd):
    """As without a trainer, where the script clips what it trains."""
    model = make_model()
    head = list(model[2].parameters())
    optimizer = torch.optim.SGD(head, 0.1, momentum=0.9)
    trainer = start(model, optimizer, quiet=False, max_grad_norm=0.1)
    twin = make_model()
    alone = torch.optim.SGD(twin[2].parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        loss_of(twin, step).backward()
        nn.utils.clip_grad_norm_(twin[2].parameters(), 0.1)
        alone.step()
        alone.zero_grad()
    assert trainer.step == STEPS
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    told = capfd.readouterr().err
    assert "2 of the model's parameters are in no optimizer, '0.weight' first" in told


def test_a_model_that_can_take_part_in_no_step_ends_its_node_once(start):
    model = make_model()
    model.register_buffer("count", torch.zeros(3))
    trainer = start(model, sgd(model))
    loss_of(model).backward()
    model.count = torch.zeros(5)
    with pytest.raises(ConfigError, match="buffer 'count' had 3 numbers"):
        trainer.update()
    with pytest.raises(ConfigError, match="buffer 'count' had 3 numbers"):
        trainer.close()
    trainer.close()
    model.count = torch.zeros(3)
    start(model, sgd(model))  # Which refuses a second one beside one that is open.


def test_a_buffer_that_is_not_finite_on_purpose_is_nothing_to_the_guard(start):
    model = make_model()
    model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    trainer = start(model, sgd(model), guard="skip")
    one_step(trainer, model)
    assert trainer.step == 1


def test_what_is_usual_for_a_critic_is_not_for_its_generator(start):
    d, g = make_model(), make_model()
    optimizers = {"D": torch.optim.SGD(d.parameters(), 1e-5), "G": torch.optim.SGD(g.parameters(), 1e-5)}
    names = ("D", "D", "D", "G")
    trainer = start({"D": d, "G": g}, optimizers, updates=names, guard="skip")
    for _ in range(12):
        for name in names:
            (loss_of(d) if name == "D" else 100 * loss_of(g)).backward()
            trainer.update(name=name)
    assert trainer.step == 12 * len(names)
    (10_000 * loss_of(d)).backward()
    trainer.update(name="D")
    assert trainer.step == 12 * len(names)


def test_what_spoils_a_buffer_counts_for_nothing_with_a_guard(start, capfd):
    model = make_model()
    model.register_buffer("average", torch.ones(2))
    trainer = start(model, sgd(model), guard="clip", quiet=False)
    model.average += 1
    one_step(trainer, model)
    assert (trainer.step, model.average.tolist()) == (1, [2.0, 2.0])
    model.average[1] = torch.nan
    one_step(trainer, model)
    assert (trainer.step, model.average.tolist()) == (1, [2.0, 2.0])
    assert "forward made its buffer 'average' not finite: skip" in capfd.readouterr().err


def test_a_batch_that_the_script_gave_up_is_in_no_gradient(start):
    model, data = make_model(), TensorDataset(torch.randn(24, 4))
    trainer = start(model, torch.optim.SGD(model.parameters(), 1.0))
    for (x,) in trainer.batches(data, 8):
        (1000 * model(x).square().mean()).backward()
        time.sleep(0.2)  # It has been summed.
        break
    trainer.optimizer.zero_grad()
    for (x,) in trainer.batches(data, 8):
        loss = model[2](torch.ones(1, 8)).sum() + 0 * x.sum()  # The first layer has no gradient.
        before = [p.detach().clone() for p in model.parameters()]
        loss.backward()
        trainer.update()
        break
    moved = [was - now.detach() for was, now in zip(before, model.parameters(), strict=True)]
    expected = [torch.zeros(8, 4), torch.zeros(8), torch.ones(2, 8), torch.ones(2)]
    torch.testing.assert_close(moved, expected)


@pytest.mark.parametrize(("size", "persistent"), [(130_000, True), (120_000, True), (130_000, False)])
def test_constants_that_travel_in_each_step_are_told_by_the_largest(start, capfd, size, persistent):
    model = make_model()
    model.register_buffer("count", torch.zeros(10, dtype=torch.int32))
    model.register_buffer("mask", torch.ones(size, dtype=torch.bool), persistent)
    model.register_buffer("fractions", torch.ones(200_000))
    start(model, sgd(model), quiet=False)
    told = "take 1.0 MB of each step, 8 bytes a number, the largest 'mask' 1.0 MB: "
    assert capfd.readouterr().err.count(told) == (size == 130_000 and persistent)


@pytest.mark.parametrize("samples", [1e-12, 1e12])
def test_the_least_and_the_most_samples_leave_the_gradient_as_it_is(start, samples):
    model = make_model()
    trainer = start(model, torch.optim.SGD(model.parameters(), 1.0))
    loss_of(model).backward()
    gradients, before = zip(*[(p.grad.clone(), p.detach().clone()) for p in model.parameters()], strict=True)
    trainer.update(samples=samples)
    for gradient, was, now in zip(gradients, before, model.parameters(), strict=True):
        torch.testing.assert_close(was - now, gradient, rtol=1e-5, atol=1e-6)


def test_out_of_the_cluster_everything_is_as_it_was(start):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    scheduler = schedulers.StepLR(optimizer, 1, 0.5)
    before = {key: optimizer.__dict__[key] for key in ("step", AMP)}, type(scheduler)
    trainer = start(model, optimizer, scheduler)
    one_step(trainer, model)
    trainer.close()
    assert ({key: optimizer.__dict__[key] for key in ("step", AMP)}, type(scheduler)) == before
    optimizer.step()
    scheduler.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8


def test_one_scheduler_under_two_names_is_as_it_was(start):
    d, g = make_model(), make_model()
    opt_d, opt_g = sgd(d), sgd(g)
    schedule = schedulers.StepLR(opt_g, 1, 0.5)
    start({"D": d, "G": g}, {"D": opt_d, "G": opt_g}, {"D": schedule, "G": schedule}).close()
    assert type(schedule) is schedulers.StepLR


def test_a_trainer_that_cannot_listen_leaves_the_optimizer_as_it_was(start):
    model = make_model()
    optimizer = sgd(model)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Exception, match="listen"):
        start(model, optimizer, listen=f"127.0.0.1:{taken.getsockname()[1]}", insecure=True)
    optimizer.step()
    assert "step" not in vars(optimizer)


class Hookless(torch.optim.SGD):
    def register_step_pre_hook(self, hook):
        raise RuntimeError("no hooks here")


@pytest.mark.parametrize("bad", ["optimizer", "scheduler", "neither"])
def test_a_script_that_cannot_be_watched_is_left_as_it_was_in_all_its_parts(bad):
    """What is told of first has been changed by then."""
    d, g = make_model(), make_model()
    parts = {
        "D": sgd(d),
        "G": Hookless(g.parameters(), 0.1) if bad == "optimizer" else sgd(g),
    }
    schedule = schedulers.StepLR(parts["D"], 1)
    schedules = {
        "D": schedule,
        "G": Final(parts["G"]) if bad == "scheduler" else schedulers.StepLR(parts["G"], 1),
    }
    optimizer = NamedOptimizers(parts)
    before = [(dict(vars(each)), dict(each._optimizer_step_pre_hooks)) for each in parts.values()]

    def make():
        model, scheduler = nn.ModuleDict({"D": d, "G": g}), NamedSchedulers(schedules)
        told = [lambda *_: None] * 3
        return ScriptRules(model, optimizer, scheduler, Gradients(model), *told)

    if bad == "neither":
        make().remove()
    else:
        with pytest.raises((RuntimeError, ConfigError), match=r"no hooks here|cannot be watched"):
            make()
    assert [(vars(each), each._optimizer_step_pre_hooks) for each in parts.values()] == before
    assert type(schedule) is schedulers.StepLR


@pytest.mark.parametrize("way", ["loop", "before training", "after_step", "scheduler"])
def test_a_learning_rate_that_the_loop_sets_is_told_before_a_joiner_finds_it_out(start, capfd, way):
    model = make_model()
    optimizer = sgd(model)

    def set_rate(trainer):
        optimizer.param_groups[0]["lr"] = 0.1 / (2 + trainer.step)

    schedule = schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)) if way == "scheduler" else None
    after_step = set_rate if way == "after_step" else None
    trainer = start(model, optimizer, schedule, after_step=after_step, quiet=False)
    for step in range(3):
        if way == "loop" or (way == "before training" and not step):
            set_rate(trainer)
        loss_of(model).backward()
        trainer.update()
    told = capfd.readouterr().err
    assert told.count("after the last step, and the script has made it") == (way == "loop")
    assert ("param_groups[0]['lr'] was 0.05 after the last step" in told) == (way == "loop")


def test_a_schedule_that_goes_on_with_an_evaluation_is_not_taken_for_the_scripts_doing(
    start, capfd, monkeypatch
):
    model = make_model()
    optimizer = sgd(model)
    schedule = schedulers.StepLR(optimizer, 1, 0.5)
    trainer = start(model, optimizer, schedule, lr_scheduler_every="evaluation", quiet=False)
    monkeypatch.setattr(
        trainer.engine.agreement, "forget", lambda: None
    )  # As with others, with whom it compares.
    for _ in range(3):
        loss_of(model).backward()
        trainer.update()
        for (x,) in trainer.evaluate(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=2):
            trainer.mean(x.mean(), "valid")
    assert schedule.last_epoch == 3
    assert "the script has made it" not in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:Seems like")  # So says torch of every scheduler that is copied.
def test_copies_of_optimizer_and_scheduler_are_the_scripts_own(start):
    model = make_model()
    optimizer = sgd(model)
    scheduler = schedulers.StepLR(optimizer, 1, 0.5)
    trainer = start(model, optimizer, scheduler)
    twin = copy.deepcopy(scheduler)
    twin.optimizer.step()
    twin.step()
    assert type(pickle.loads(pickle.dumps(scheduler))) is schedulers.StepLR
    assert (trainer.step, scheduler.last_epoch, twin.last_epoch) == (0, 0, 1)
