"""`PipelineTrainer(validation=...)`, with one member; with several: tests/integration/test_validation.py."""

import pytest
import torch
from test_pipeline_trainer import make_data, make_model, trainer
from torch import nn

from chaosnet import Callbacks, ConfigError, Validation
from chaosnet.engines.validation import Validating
from chaosnet.protocols.messages import Contribution

pytestmark = pytest.mark.realtime


def hits(out, y):
    return (out.argmax(1) == y).float().mean()


def test_after_each_epoch_the_model_is_validated_and_the_last_epoch_is_too():
    heard = []
    with trainer(
        validation=Validation(make_data(13), {"hits": hits}), callbacks=Callbacks(on_epoch=heard.append)
    ) as t:
        seen = [(step.step, t.validated) for step in t.steps(make_data(), epochs=2)]
        assert [each for _, each in seen[:3]] == [{}] * 3 and all(each for _, each in seen[3:])
        model, (x, y) = t.model.eval(), make_data(13).tensors
        with torch.no_grad():
            wanted = {
                "loss": float(nn.functional.cross_entropy(model(x), y)),
                "hits": float(hits(model(x), y)),
            }
        assert t.validated == pytest.approx(wanted)
        assert t.metrics == {
            "loss": t.metrics["loss"],
            "val_loss": t.validated["loss"],
            "val_hits": t.validated["hits"],
        }
        assert heard[-1].metrics == t.metrics
    assert [event.epoch for event in heard] == [1, 2]
    assert heard[0].metrics.keys() == {"loss", "val_loss", "val_hits"}


def test_a_validation_changes_no_bit_of_what_is_trained_and_leaves_modes_as_they_were():
    hashes = []
    for validation in (None, Validation(make_data(13))):
        model = make_model()
        model[1].eval()  # Of a script that trains without this dropout.
        with trainer(model, validation=validation) as t:
            list(t.steps(make_data(), epochs=3))
            hashes.append(t.state_hash())
            assert [module.training for module in model] == [True, False, True]
    assert hashes[0] == hashes[1]


def test_a_scheduler_may_follow_it():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)
    with trainer(
        model, optimizer, lr_scheduler=plateau, lr_scheduler_every="evaluation",
        validation=Validation(make_data(13), {"hits": hits}),
    ) as t:  # fmt: skip
        list(t.steps(make_data(), epochs=3))
        assert plateau.num_bad_epochs or optimizer.param_groups[0]["lr"] < 1.0
        assert plateau.last_epoch == 3


@pytest.mark.parametrize(
    ("validation", "says"),
    [
        (Validation([]), "0 samples"),
        (Validation(make_data(13), {"loss": hits}), "'loss'"),
        (Validation(make_data(13), {"hits": 3}), "measures: 'hits': 3"),
        (make_data(13), "Validation"),
    ],
)
def test_what_cannot_be_validated_with_is_refused_by_name(validation, says):
    with pytest.raises(ConfigError, match=says):
        trainer(validation=validation)


def test_a_measure_that_is_no_number_is_refused_by_name():
    with (
        trainer(validation=Validation(make_data(13), {"outputs": lambda out, y: out})) as t,
        pytest.raises(ConfigError, match="'outputs' is Tensor"),
    ):
        list(t.steps(make_data(), epochs=1))


def test_a_mean_of_the_same_name_is_refused():
    with trainer(validation=Validation(make_data(13))) as t, pytest.raises(ConfigError, match="'val_loss'"):
        t.mean(1.0, "val_loss")


# --- the agreed part ---


def validating(samples=10):
    return Validating(Validation(make_data(samples)), nn.functional.cross_entropy, 4, 2)


def told(value, weight):
    return Contribution(metrics={"val_loss": (value, weight)})


def test_a_round_that_lacks_samples_is_done_again():
    each = validating()
    assert each.completed(told(4.0, 4.0), epoch=1) is None
    assert each.completed(told(1.0, 2.0), epoch=1) is None, "half of it was void"
    assert each.completed(Contribution(), epoch=1) is None
    assert each.is_due(1)
    assert each.completed(told(6.0, 4.0), epoch=1) is None
    assert each.completed(told(5.0, 2.0), epoch=1) == {"loss": (15.0, 10.0)}
    assert not each.is_due(1) and each.is_due(2) and each.last == {"loss": 1.5}


def test_who_joins_in_the_middle_goes_on_from_there():
    each, other = validating(), validating()
    each.completed(told(4.0, 4.0), epoch=1)
    other.from_plain(each.to_plain(), epoch=1)
    assert [len(other.begin(torch.device("cpu"), 0).fetch(0)[0]), other.to_plain()] == [2, each.to_plain()]


def test_a_checkpoint_of_a_run_without_it_has_none_under_way():
    each = validating()
    each.from_plain(None, epoch=7)
    assert not each.is_due(7) and each.is_due(8)
    without = Validating(None, nn.functional.cross_entropy, 4, 2)
    each.from_plain(without.to_plain(), epoch=7)
    assert not each.is_due(7), "that run did not validate"
    each.from_plain(validating(40).to_plain() | {"at": 36, "epoch": 6}, epoch=7)
    assert each.is_due(7) and each.to_plain()["at"] == 0, "it had other samples"
    other = validating()
    other.completed(told(4.0, 4.0), epoch=7)
    measured = Validating(Validation(make_data(10), {"hits": hits}), nn.functional.cross_entropy, 4, 2)
    measured.from_plain(other.to_plain() | {"epoch": 6}, epoch=7)
    assert measured.is_due(7) and measured.to_plain()["at"] == 0, "it had other measures"
