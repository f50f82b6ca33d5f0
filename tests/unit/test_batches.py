"""The loops of a script over `trainer.epochs`, `batches` and `evaluate`, alone. More nodes: tests/integration."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chaosnet import ConfigError, Trainer

pytestmark = [pytest.mark.realtime, pytest.mark.usefixtures("fresh_exit_events")]

LENGTH = 24
DATA = TensorDataset(torch.randn(LENGTH, 4), torch.randn(LENGTH, 1), torch.arange(LENGTH))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.fixture
def start():
    """Makes trainers and closes them."""
    trainers = []

    def make(model=None, optimizer=None, **settings):
        model = model or make_model()
        optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
        trainers.append(Trainer(model, optimizer, quiet=True, **settings))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()


def loss_of(trainer, batch):
    return nn.functional.mse_loss(trainer.model(batch[0]), batch[1])


def train(trainer, batches):
    """Returns: the indices that were used, per update."""
    used = []
    for batch in batches:
        loss_of(trainer, batch).backward()
        trainer.update()
        used.append(batch[2].tolist())
    return used


def evaluate(trainer):
    with torch.no_grad():
        for batch in trainer.evaluate(DATA, 10):
            trainer.mean(loss_of(trainer, batch), "valid")
    assert set(trainer.metrics) == {"valid"}


# --- an evaluation with a batch in hand ---


@pytest.mark.parametrize("place", ["before forward", "before backward", "before update"])
@pytest.mark.parametrize("every", [1, 2])
def test_an_evaluation_between_a_batch_and_its_update_changes_nothing(start, place, every):
    def run(evaluates):
        trainer, used, losses = start(), [], []
        for batch in trainer.batches(DATA, 8, epochs=2):
            due = evaluates and len(used) % every == 0
            if due and place == "before forward":
                evaluate(trainer)
            loss = loss_of(trainer, batch)
            mean = trainer.mean(loss)
            if due and place == "before backward":
                evaluate(trainer)
            loss.backward()
            if due and place == "before update":
                evaluate(trainer)
            trainer.update()
            used.append(batch[2].tolist())
            losses.append(float(mean))
            assert len(used) <= 6
        trainer.close()
        weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()]).tolist()
        return used, losses, weights, trainer.samples

    plain = run(False)
    assert run(True) == plain
    assert plain[-1] == 2 * LENGTH


def test_an_evaluation_among_batches_that_belong_together_is_no_step(start):
    trainer = start()
    for batch in trainer.batches(DATA, 8, accumulate=2):
        (loss_of(trainer, batch) * batch.share).backward()
        evaluate(trainer)
        if batch.last:
            trainer.update()
    assert (trainer.step, trainer.samples) == (2, LENGTH)


def test_an_evaluation_is_no_update_of_the_batch(start):
    trainer = start()
    batches = iter(trainer.batches(DATA, 8))
    next(batches)
    evaluate(trainer)
    with pytest.raises(ConfigError, match="asked for without"):
        next(batches)


@pytest.mark.parametrize("what", ["update", "batch"])
def test_nothing_is_trained_within_an_evaluation(start, what):
    trainer = start()
    batches = iter(trainer.batches(DATA, 8))
    loss_of(trainer, next(batches)).backward()
    with pytest.raises(ConfigError, match=r"within a loop over trainer\.evaluate"):
        for _ in trainer.evaluate(DATA, 8):
            trainer.update() if what == "update" else next(batches)
    if what == "update":
        trainer.update()
        assert trainer.samples == 8


def test_an_evaluation_in_the_middle_of_a_round_is_refused_by_the_name_that_is_due(start):
    model = nn.ModuleDict({"D": make_model(), "G": make_model()})
    optimizers = {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in model.items()}
    trainer = start(dict(model.items()), optimizers)
    for x, y, _ in trainer.batches(DATA, 8):
        nn.functional.mse_loss(model["D"](x), y).backward()
        trainer.update(name="D")
        with pytest.raises(ConfigError, match=r"evaluate: update\(name='G'\) is due"):
            next(trainer.evaluate(DATA, 8))
        nn.functional.mse_loss(model["G"](x), y).backward()
        trainer.update(name="G")
    assert trainer.samples == LENGTH


# --- what a batch weighs ---


def test_each_update_with_a_batch_weighs_its_samples_which_are_used_once(start):
    trainer = start()
    for batch in trainer.batches(DATA, 8):
        for _ in range(3):
            loss_of(trainer, batch).backward()
            trainer.update()
    assert (trainer.step, trainer.samples, trainer.epoch) == (9, 3 * LENGTH, 1)


def test_what_is_averaged_after_an_update_has_the_weight_of_its_batch(start):
    trainer = start()
    for batch in trainer.batches(DATA, 10, shuffle=False):
        loss_of(trainer, batch).backward()
        trainer.update()
        trainer.mean(float(batch.samples), "after")
        trainer.mean(0.0, "after", weight=10)
        assert trainer.metrics == ({"after": 5.0} if trainer.step > 1 else {})


def test_own_data_after_batches_counts_as_ever(start):
    trainer = start()
    train(trainer, trainer.batches(DATA, 8))
    loss_of(trainer, DATA[:4]).backward()
    trainer.update()
    assert trainer.samples == LENGTH + 1


# --- samples=0 ---


def test_an_update_without_samples_drops_the_gradient_and_what_was_averaged(start):
    trainer = start()
    batches = iter(trainer.batches(DATA, 8))
    loss = loss_of(trainer, next(batches)) * float("nan")
    loss.backward()
    trainer.mean(loss)
    trainer.update(samples=0)
    assert trainer.metrics == {} and trainer.step == 0
    loss = loss_of(trainer, next(batches))
    loss.backward()
    trainer.mean(loss)
    trainer.update()
    assert trainer.metrics == {"loss": loss.item()} and trainer.step == 1
    assert all(bool(each.isfinite().all()) for each in trainer.model.parameters())


# --- loops that are kept ---


def test_the_length_of_batches_is_refused_with_the_reason_and_lists_do_without_it(start):
    trainer = start()
    batches = trainer.batches(DATA, 6)
    with pytest.raises(TypeError, match=r"has no len\(\): how many batches .* depends on who else is there"):
        len(batches)
    assert batches and len([trainer.update() for _ in batches]) == 4


def test_batches_that_are_kept_are_a_new_pass_in_each_epoch(start):
    trainer = start()
    loader = trainer.batches(DATA, 8)
    used = [train(trainer, loader) for _ in trainer.epochs(3)]
    assert [len(each) for each in used] == [3, 3, 3] and trainer.epoch == 3
    assert all(sorted(index for batch in each for index in batch) == list(range(LENGTH)) for each in used)


def test_an_evaluation_that_is_kept_is_a_new_one_each_time(start):
    trainer = start()
    valid = trainer.evaluate(DATA, 10)
    assert next(valid).samples == 10
    for _ in range(2):
        assert [batch.samples for batch in valid] == [10, 10, 4]


@pytest.mark.parametrize(("what", "given"), [("batches", 0), ("evaluate", 0), ("batches", None)])
def test_arguments_are_checked_before_the_first_batch(start, what, given):
    with pytest.raises(ConfigError, match=r"batch_size: .*a whole number from 1"):
        getattr(start(), what)(DATA, given)


# --- random numbers in workers ---


class Noise:
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.randn(4), torch.zeros(1), index


@pytest.mark.parametrize("kept", [True, False])
def test_workers_draw_others_in_each_epoch_and_the_same_in_two_runs_of_one_seed(start, kept):
    def run():
        torch.manual_seed(5)
        trainer, drawn = start(nn.Linear(4, 1)), []
        loader = DataLoader(Noise(), 8, num_workers=1)
        for _ in trainer.epochs(2):
            for batch in trainer.batches(loader if kept else DataLoader(Noise(), 8, num_workers=1)):
                loss_of(trainer, batch).backward()
                trainer.update()
                drawn.append(batch[0].sum().item())
        trainer.close()
        return drawn

    drawn = run()
    assert len(set(drawn)) == 6 and run() == drawn
