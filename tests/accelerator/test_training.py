"""Trainer on a device: joins from and to CPUs, mixed precision, checkpoints, random numbers."""

import pytest
import sham
import torch
from members import CPU, Member, alone, assert_same, cluster_of_two, data, loss_of, net, parameters
from torch import nn
from torch.utils.data import DataLoader

from chaosnet import Checkpoints, Trainer

STEPS = 12


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize("founder", ["cpu", "device"])
def test_a_node_joins_those_of_another_kind(device, founder):
    kinds = [CPU, device] if founder == "cpu" else [device, CPU]
    first, second = (Member(name, each, STEPS, adam) for name, each in zip("ab", kinds, strict=True))
    with cluster_of_two(first, second):
        step, state = second.loaded
        for mine, theirs in zip(state, first.states[step], strict=True):
            assert torch.equal(mine, theirs)
        common = sorted({*first.states} & {*second.states})
        assert len(common) >= STEPS - 2  # Of those of two, one may be another's first.
        assert_same(second.states[common[-1]], first.states[common[-1]], device)


def test_a_script_may_have_tensors_made_on_the_device_by_default(device, tmp_path):
    found, samples = [], data()
    for number, default in enumerate((CPU, device)):
        model, settings = net(device), Checkpoints(tmp_path / str(number), every=2)
        with default, Trainer(model, adam(model.parameters()), checkpoints=settings, **alone()) as trainer:
            for batch in trainer.batches(DataLoader(samples, 4), epochs=2):
                loss_of(model, batch).backward()
                trainer.update()
            for batch in trainer.evaluate(samples, 8):
                trainer.mean(loss_of(model, batch), "loss")
        found.append(parameters(model))
        assert [*(tmp_path / str(number)).glob("step-*")]
    assert_same(*found, device)


def test_mixed_precision_with_a_scaler_leaves_out_what_overflows(device):
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, scales = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=1000), []
    with Trainer(model, optimizer, **alone()) as trainer:
        for number, batch in enumerate(trainer.batches(data(), 4, epochs=1)):
            before = [p.detach().cpu().clone() for p in model.parameters()]
            with torch.autocast(device.type, dtype=torch.float16):
                loss = loss_of(model, batch)
            scaler.scale(loss * (1e30 if number == 2 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            same = all(
                torch.equal(p.detach().cpu(), was) for p, was in zip(model.parameters(), before, strict=True)
            )
            assert same == (number == 2)
        assert trainer.step == 5
    assert scales == [2.0**10] * 2 + [2.0**9] * 4


def test_unscaling_by_hand_before_update_trains_as_plain_torch_does(device):
    losses = {}
    for way in ("plain", "trainer"):
        model = net(device)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(device.type)
        losses[way] = []
        trainer = Trainer(model, optimizer, guard="skip", **alone()) if way == "trainer" else None
        for start in range(0, 24, 8):
            loss = loss_of(model, data()[start : start + 8])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if trainer is not None:
                trainer.update()
            else:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            losses[way].append(loss.item())
        if trainer is not None:
            trainer.close()
    assert losses["trainer"] == pytest.approx(losses["plain"], rel=1e-5)


@pytest.mark.parametrize("way", ["from the device to a CPU", "from a CPU to the device"])
def test_a_run_goes_on_from_a_checkpoint_on_another_kind_of_node(device, tmp_path, way):
    kinds = [device, CPU] if way.startswith("from the device") else [CPU, device]
    hashes = []
    for each in kinds:
        model = net(each, seed=len(hashes))
        checkpoints = Checkpoints(tmp_path, every=2, resume=bool(hashes))
        with Trainer(model, adam(model.parameters()), **alone(checkpoints=checkpoints)) as trainer:
            if not hashes:
                for batch in trainer.batches(data(), 4, epochs=1):
                    loss_of(model, batch).backward()
                    trainer.update()
            assert trainer.step == 6
            hashes.append(trainer.state_hash())
            for batch in trainer.batches(data(), 4, epochs=2) if len(hashes) > 1 else ():
                loss_of(model, batch).backward()
                trainer.update()
    assert hashes[0] == hashes[1]


def test_a_run_that_draws_on_a_device_goes_on_from_its_checkpoint_to_the_bit(last_device, tmp_path):
    """Dropout draws there. The device of now may be another."""
    losses = {}
    for run in ("whole", "first half", "second half"):
        torch.manual_seed(9)
        model, told = net(last_device, dropout=0.5), []
        halves = run != "whole"
        checkpoints = Checkpoints(tmp_path, every=3, resume=run == "second half") if halves else None
        torch.manual_seed(4 if run != "second half" else 5)
        with Trainer(model, adam(model.parameters()), **alone(checkpoints=checkpoints)) as trainer:
            for batch in trainer.batches(data(), 4, epochs=1):
                loss = loss_of(model, batch)
                loss.backward()
                trainer.update()
                told.append(loss.item())
                if run == "first half" and trainer.step == 3:
                    break
        losses[run] = told
    assert losses["first half"] + losses["second half"] == losses["whole"]


def test_a_mean_is_read_with_the_step_and_is_what_it_was(device):
    model = net(device)
    with Trainer(model, adam(model.parameters()), **alone()) as trainer:
        for batch in trainer.batches(data(), 12, epochs=1):
            loss = loss_of(model, batch)
            before = sham.traffic().to_host if device.type == sham.NAME else 0
            mean = trainer.mean(loss)
            after = sham.traffic().to_host if device.type == sham.NAME else 0
            assert after == before  # Nobody has waited for it.
            wanted = loss.item()
            loss.backward()
            loss.data.zero_()
            trainer.update()
            assert float(mean) == wanted


def test_two_device_members_train_as_one_does(device, last_device):
    """With gradients that leave during backward: `update` is told nothing."""
    first, second = Member("a", device, STEPS, adam), Member("b", last_device, STEPS, adam)
    with cluster_of_two(first, second, max_grad_norm=1.0):
        common = sorted({*first.states} & {*second.states})
        for step in common[-3:]:
            for mine, theirs in zip(second.states[step], first.states[step], strict=True):
                assert torch.equal(mine, theirs)


def test_a_frozen_part_and_a_shared_weight_come_along(device):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words, self.out = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
            self.out.weight = self.words.weight
            self.body = nn.Linear(6, 6).requires_grad_(False)

        def forward(self, ids):
            return self.out(self.body(self.words(ids)).tanh())

    model = Tied().to(device)
    with Trainer(model, adam(p for p in model.parameters() if p.requires_grad), **alone()) as trainer:
        losses = []
        for _ in range(4):
            ids = torch.arange(11, device=device)
            loss = nn.functional.cross_entropy(model(ids), ids)
            loss.backward()
            trainer.update()
            losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
