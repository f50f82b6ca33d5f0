"""Profiles of real layers, and what the planner reads back."""

import pytest
import torch
from torch import nn

from chaosnet.errors import ConfigError, PlanInfeasible
from chaosnet.profiler import profile_layers, save
from chaosnet.scheduler.elastic.profile import read


def layers():
    torch.manual_seed(0)
    return [nn.Embedding(50, 32), nn.Linear(32, 256), nn.Sequential(nn.ReLU(), nn.Linear(256, 50))]


def test_bytes_of_layers_are_those_of_their_parameters_and_outputs():
    found = profile_layers("small", layers(), torch.zeros(1, 8, dtype=torch.long), sizes=(1, 2), rounds=1)
    embedding, linear, head = found.layers
    assert embedding.parameter_bytes == 50 * 32 * 4 and embedding.optimizer_bytes == 12 * 50 * 32
    assert linear.boundary_bytes == 8 * 256 * 4 and head.boundary_bytes == 8 * 50 * 4
    assert linear.activation_bytes == 8 * 32 * 4, "a linear layer keeps what came in"
    assert all({*layer.seconds} == {1, 2} for layer in found.layers)


class Scaled(nn.Module):
    """As rotary embeddings: multiplies by a table that is no parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(1000, 4))

    def forward(self, x):
        return x * self.table[: x.shape[1]]


def test_a_table_of_a_layer_is_not_kept_for_each_micro_batch():
    (layer,) = profile_layers("scaled", [Scaled()], torch.zeros(1, 8, 4), sizes=(1,), rounds=1).layers
    assert layer.activation_bytes == 0


def test_a_larger_layer_takes_longer():
    found = profile_layers(
        "two", [nn.Linear(64, 2048), nn.Linear(2048, 2048)], torch.zeros(1, 256, 64), rounds=3
    )
    small, large = (sum(layer.seconds[4]) for layer in found.layers)
    assert large > small


def test_a_frozen_layer_has_no_gradients_and_no_optimizer():
    frozen = nn.Linear(4, 4).requires_grad_(False)
    (layer,) = profile_layers("frozen", [frozen], torch.zeros(1, 4), sizes=(1,), rounds=1).layers
    assert layer.gradient_bytes == layer.optimizer_bytes == 0 < layer.parameter_bytes


def test_a_profile_is_read_back_as_it_was_written(tmp_path):
    found = profile_layers("small", layers(), torch.zeros(1, 8, dtype=torch.long), sizes=(1,), rounds=1)
    save(found, tmp_path / "profile.json")
    assert read((tmp_path / "profile.json").read_bytes()) == found


def test_what_cannot_be_profiled_is_named():
    with pytest.raises(ConfigError, match=r"0 layers, sizes \(1, 2, 4\), a sample of shape \(1, 4\)"):
        profile_layers("none", [], torch.zeros(1, 4))
    with pytest.raises(ConfigError, match=r"shape \(2, 4\)"):
        profile_layers("two samples", [nn.Linear(4, 4)], torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        (b"{", ConfigError, "Input data was truncated"),
        (b'{"model": "m", "layers": []}', PlanInfeasible, "no layers"),
        (b'{"model": "m", "layers": [{"seconds": {"1": [-1, 1]}}]}', PlanInfeasible, "Expected `float` >= 0"),
    ],
)
def test_a_file_that_is_no_profile_says_where(text, error, told):
    with pytest.raises(error, match=told):
        read(text)
