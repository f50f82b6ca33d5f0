"""Processes that torchrun, srun or mpirun has started are told that they train alone, if they do."""

import pytest
import torch

from chaosnet import Trainer
from chaosnet.discovery.started_alike import alone_among_many
from chaosnet.settings.groups import Cluster
from chaosnet.settings.resolved import node_settings

BY_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
BY_SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
BY_OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
BY_MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2"}
ALONE = Cluster(new=True)  # Whatever this machine remembers.


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        (BY_TORCHRUN, "RANK=1 and WORLD_SIZE=4 are set, as by torchrun"),
        (BY_SRUN, "SLURM_PROCID=0 and SLURM_STEP_NUM_TASKS=2 are set, as by srun"),
        (BY_OPEN_MPI, "OMPI_COMM_WORLD_RANK=0 and OMPI_COMM_WORLD_SIZE=2 are set, as by Open MPI"),
        (BY_MPICH, "PMI_RANK=0 and PMI_SIZE=2 are set, as by mpirun"),
    ],
)
def test_what_was_seen_is_named_with_what_to_write(environ, seen):
    told = alone_among_many(node_settings(ALONE), environ)
    assert told.startswith(f"{seen}, which tells no address: each of the ")
    wanted = "CHAOSNET_CLUSTER=NAME, or CHAOSNET_JOIN=ADDRESS,... and CHAOSNET_FOUND=1"
    assert told.endswith(f"(expected for all of them {wanted})")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "4"},
        {"RANK": "0", "WORLD_SIZE": "many"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
    ],
    ids=["nobody", "one", "no number", "no count", "a batch script of Slurm"],
)
def test_who_was_started_once_is_told_nothing(environ):
    assert alone_among_many(node_settings(ALONE), environ) == ""


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(join="127.0.0.1:5555"),
        Cluster(join="127.0.0.1:5555", found=True),
        Cluster(listen="127.0.0.1:5555", new=True),
        Cluster(cluster_name="lab", listen="127.0.0.1:0"),
    ],
    ids=["joins", "joins or founds", "is to be joined", "looks for others"],
)
def test_who_was_told_of_the_others_or_they_of_it_is_told_nothing(cluster):
    assert alone_among_many(node_settings(cluster), BY_TORCHRUN) == ""


def test_a_trainer_prints_it_before_it_founds(monkeypatch, capsys):
    for name, value in BY_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    model = torch.nn.Linear(4, 2)
    Trainer(model, torch.optim.SGD(model.parameters(), 0.1), cluster=ALONE).close()
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("[chaosnet] RANK=1 and WORLD_SIZE=4 are set")
    assert "founds a cluster; join it with" in second
