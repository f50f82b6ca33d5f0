"""What a cluster computes: whatever the nodes bring to a step, it is the step of one process on all of it.

The scripts run in processes of their own (worker.py). `check_losses` repeats what they did in one process.
"""

from __future__ import annotations

import copy
import itertools
import time

import pytest
import torch
import worker
from cluster import Cluster, cluster_of
from torch import nn

from chaosnet import capture_exit_event

pytestmark = pytest.mark.realtime


FOREVER = 10**6  # Epochs: the test says when to leave.


def values(cluster: Cluster, what: str, field: str) -> list[object]:
    """What each node told of itself at its end."""
    return [node.last(what)[field] for node in cluster.nodes]


def train_together(cluster: Cluster, steps: int = 40) -> None:
    """All are members by now; long enough to see a difference, short enough for float32 to follow."""
    cluster.nodes[-1].advance(steps)
    cluster.leave()
    cluster.check_steps()


# --- samples and weights ---


def test_unequal_batches_weigh_by_their_samples(tmp_path):
    with cluster_of(0, tmp_path) as cluster:
        for batch_size in (2, 5, 9):
            cluster.grow(1, batch_size=batch_size)
        cluster.nodes[-1].advance(40)
        cluster.finish()
        assert 16 in [step["weight"] for step in cluster.steps().values()]


def accumulating(w: worker.Worker) -> None:
    model = worker.make_model()
    trainer = w.trainer(model, worker.make_optimizer(model))
    for batch in trainer.batches(worker.Numbered(), batch_size=2, epochs=FOREVER, accumulate=3):
        x, y, indices = batch
        w.tell_batch(trainer, indices)
        loss = worker.loss_of(model, x, y)
        (loss * batch.share).backward()
        trainer.mean(loss)
        if batch.last:
            trainer.update()
            if w.obey():
                break
            time.sleep(0.002)
    trainer.close()


def test_accumulated_batches_are_one_large_batch(tmp_path):
    with cluster_of(3, tmp_path, script=accumulating) as cluster:
        train_together(cluster)
        cluster.check()
        full = [step for step in cluster.steps().values() if step["weight"] == 18]
        assert full, "three nodes, three batches of two"


def own_loader(w: worker.Worker) -> None:
    """Several backwards of unequal parts, and other samples at every step."""
    data, model = worker.Numbered(), worker.make_model()
    trainer = w.trainer(model, worker.make_optimizer(model))
    generator = torch.Generator().manual_seed(ord(w.name))
    while not w.obey():
        order = torch.randperm(len(data), generator=generator)
        parts = order[:3], order[3 : 5 + int(order[0]) % 4]
        samples = sum(map(len, parts))
        w.tell_batch(trainer, torch.cat(parts))
        for part in parts:
            loss = worker.loss_of(model, data.x[part], data.y[part])
            (loss * len(part) / samples).backward()
            trainer.mean(loss, weight=len(part))
        trainer.update(samples=samples)
        time.sleep(0.002)
    trainer.close()


def test_own_loaders_say_how_many_samples_there_were(tmp_path):
    with cluster_of(3, tmp_path, script=own_loader) as cluster:
        train_together(cluster)
        cluster.check_losses()
        assert len({step["weight"] for step in cluster.steps().values()}) > 3


def averaging(w: worker.Worker) -> None:
    """Means of three values; what is told is what the handle says after the update."""
    model = worker.make_model()
    trainer = w.trainer(model, worker.make_optimizer(model))
    me = float(ord(w.name) - ord("a"))
    for x, y, _ in trainer.batches(worker.Numbered(10**4), batch_size=w.settings["share"]):
        worker.loss_of(model, x, y).backward()
        mine = trainer.mean(torch.tensor(me), "me"), trainer.mean(me, "unweighted", weight=1)
        if w.name == "b":
            trainer.mean(7, "only b")
        trainer.update()
        w.tell("means", step=trainer.step, values=[float(mean) for mean in mine], metrics=trainer.metrics)
        if w.obey():
            break
        time.sleep(0.002)
    trainer.close()


def test_means_are_over_the_cluster_and_weighted_by_samples(tmp_path):
    with cluster_of(0, tmp_path, script=averaging) as cluster:
        for share in (1, 3):
            cluster.start(share=share).last("joined")
        cluster.nodes[-1].advance(20)
        for node in cluster.nodes:
            told = node.last("means")
            assert told["values"] == [0.75, 0.5]
            assert told["metrics"] == {"me": 0.75, "unweighted": 0.5, "only b": 7.0}
        cluster.leave()
        cluster.check_steps()


# --- gradients ---


def clipping(w: worker.Worker) -> None:
    model = worker.make_model()
    trainer = w.trainer(model, torch.optim.SGD(model.parameters(), 0.5), max_grad_norm=0.1)
    for x, y, indices in trainer.batches(worker.Numbered(), batch_size=4, epochs=FOREVER):
        w.tell_batch(trainer, indices)
        loss = worker.loss_of(model, x, y)
        loss.backward()
        trainer.mean(loss)
        trainer.update()
        if w.obey():
            break
        time.sleep(0.002)
    trainer.close()


def test_the_averaged_gradient_is_clipped_not_each_nodes_own(tmp_path):
    with cluster_of(3, tmp_path, script=clipping) as cluster:
        train_together(cluster)
        model = worker.make_model()
        norms = []
        cluster.check_losses(
            model,
            torch.optim.SGD(model.parameters(), 0.5),
            before_step=lambda: norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1)),
        )
        assert max(norms) > 0.1, "some were too long"


class Branches(nn.Module):
    """A branch for each of a and b, and one that nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = worker.make_model(0)
        self.branch = nn.ModuleDict({name: worker.make_model(n) for n, name in enumerate("abz", start=1)})

    def forward(self, x: torch.Tensor, node: str) -> torch.Tensor:
        return self.stem(x) + self.branch[node](x) if node in self.branch else self.stem(x)


def branch_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, node: str) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x, node), y)


def branching(w: worker.Worker) -> None:
    model = Branches()
    trainer = w.trainer(model, torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=0.1))
    for x, y, indices in trainer.batches(worker.Numbered(), batch_size=4, epochs=FOREVER):
        w.tell_batch(trainer, indices)
        loss = branch_loss(model, x, y, w.name)
        loss.backward()
        trainer.mean(loss)
        trainer.update()
        if w.obey():
            break
        time.sleep(0.002)
    unused = Branches().branch["z"].state_dict()
    w.tell("unused", same=all(torch.equal(unused[k], v) for k, v in model.branch["z"].state_dict().items()))
    trainer.close()


def test_parameters_that_only_some_or_no_nodes_use_are_trained_by_who_uses_them(tmp_path):
    with cluster_of(3, tmp_path, script=branching) as cluster:
        train_together(cluster)
        model = Branches()
        optimizer = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=0.1)
        cluster.check_losses(model, optimizer, branch_loss)
        assert values(cluster, "unused", "same") == [True] * 3, "without a gradient there is no weight decay"


# --- buffers ---


def normed_model() -> nn.Module:
    torch.manual_seed(0)
    # No bias: Adam would make steps of a gradient that is only noise.
    first = nn.Linear(worker.FEATURES, 16, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def norming(w: worker.Worker) -> None:
    data, model = worker.Numbered(), normed_model()
    trainer = w.trainer(model, worker.make_optimizer(model))
    generator = torch.Generator().manual_seed(ord(w.name))
    while not w.obey():
        indices = torch.randperm(len(data), generator=generator)[: w.settings["share"]]
        w.tell_batch(trainer, indices)
        loss = worker.loss_of(model, data.x[indices], data.y[indices])
        loss.backward()
        trainer.mean(loss, weight=len(indices))
        trainer.update(samples=len(indices))
        time.sleep(0.002)
        mean, batches = model[1].running_mean.tolist(), int(model[1].num_batches_tracked)
        w.tell("statistics", step=trainer.step, mean=mean, batches=batches)
    trainer.close()


def test_running_statistics_are_averaged_and_stay_identical(tmp_path):
    with cluster_of(0, tmp_path, script=norming) as cluster:
        for share in (4, 8, 4):
            cluster.start(share=share).last("joined")
        train_together(cluster)  # The hashes that it compares cover buffers.
        average_in_one_process(cluster)


def average_in_one_process(cluster: Cluster) -> None:
    """Repeat the run: every node's forward starts from the common statistics, and then they are averaged."""
    model = normed_model()
    common = copy.deepcopy(dict(model.named_buffers()))
    parts: list[tuple[int, dict[str, torch.Tensor]]] = []

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, node: str) -> torch.Tensor:
        for name, buffer in model.named_buffers():
            buffer.copy_(common[name])
        result = worker.loss_of(model, x, y)
        parts.append((len(x), copy.deepcopy(dict(model.named_buffers()))))
        return result

    def average() -> None:
        total = sum(samples for samples, _ in parts)
        for name, buffer in common.items():
            if buffer.is_floating_point():
                buffer.copy_(sum(samples * theirs[name] for samples, theirs in parts) / total)
            else:
                buffer.copy_(max(theirs[name] for _, theirs in parts))
        parts.clear()

    cluster.check_losses(model, worker.make_optimizer(model), loss, before_step=average)
    told = max((node.last("statistics") for node in cluster.nodes), key=lambda record: record["step"])
    assert torch.allclose(common["1.running_mean"], torch.tensor(told["mean"]), atol=1e-3)
    assert common["1.num_batches_tracked"] == told["batches"] == told["step"]


# --- learning rates ---


def scheduling(w: worker.Worker) -> None:
    model = worker.make_model()
    optimizer = worker.make_optimizer(model)
    scheduler = SCHEDULERS[w.settings["scheduler"]](optimizer)
    trainer = w.trainer(model, optimizer, scheduler)
    for x, y, indices in trainer.batches(worker.Numbered(), batch_size=4, epochs=FOREVER):
        w.tell_batch(trainer, indices)
        loss = worker.loss_of(model, x, y)
        loss.backward()
        trainer.mean(loss)
        trainer.update()
        w.tell("rate", step=trainer.step, value=optimizer.param_groups[0]["lr"])
        if w.obey():
            break
        time.sleep(0.002)
    trainer.close()


SCHEDULERS = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 50),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rates_are_those_of_one_process_also_on_a_joiner(tmp_path, name):
    with cluster_of(2, tmp_path, script=scheduling, scheduler=name) as cluster:
        cluster.grow(1)
        train_together(cluster)
        model = worker.make_model()
        optimizer = worker.make_optimizer(model)
        scheduler = SCHEDULERS[name](optimizer)
        rates: list[float] = []

        def after_step(mean: float) -> None:
            scheduler.step(*([mean] if name == "plateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])

        cluster.check_losses(model, optimizer, after_step=after_step)
        for record in itertools.chain.from_iterable(node.told("rate") for node in cluster.nodes):
            assert record["value"] == pytest.approx(rates[record["step"] - 1])
        assert len(set(rates)) > 1


# --- joining, epochs, the end ---


def with_extra_state(w: worker.Worker) -> None:
    """The paper's Listing 1: a trainer first, a model later. The founder has something to tell."""
    trainer = w.trainer()
    model = worker.make_model()
    best, notes = torch.zeros(3), []
    extra = {"best": best, "notes": notes, "runs": 0}
    if w.name == "a":
        best += 5
        notes += ["by a", {"at": 0.5}]
        extra["runs"] = 3
    trainer.attach(model, worker.make_optimizer(model), extra_state=extra)
    same_objects = extra["best"] is best and extra["notes"] is notes
    w.tell("extra", best=best.tolist(), notes=notes, runs=extra["runs"], same_objects=same_objects)
    while not capture_exit_event() and not w.obey():
        worker.loss_of(model, torch.ones(2, worker.FEATURES), torch.zeros(2, dtype=torch.long)).backward()
        trainer.update()
    trainer.request_node_exit()


def test_extra_state_reaches_a_joiner_in_the_objects_that_it_gave(tmp_path):
    with cluster_of(2, tmp_path, script=with_extra_state) as cluster:
        told = cluster.nodes[1].last("extra")
        assert (told["best"], told["notes"], told["runs"]) == ([5, 5, 5], ["by a", {"at": 0.5}], 3)
        assert told["same_objects"]
        train_together(cluster, steps=5)


def in_epochs(w: worker.Worker) -> None:
    """Evaluate after every epoch."""
    model = worker.make_model()
    trainer = w.trainer(model, worker.make_optimizer(model))
    for epoch in trainer.epochs(12):
        for x, y, indices in trainer.batches(worker.Numbered(), batch_size=4):
            w.tell_batch(trainer, indices)
            loss = worker.loss_of(model, x, y)
            loss.backward()
            trainer.mean(loss)
            trainer.update()
            time.sleep(0.005)
        w.tell("epoch", epoch=epoch, step=trainer.step, hash=trainer.state_hash())
    w.tell("end", step=trainer.step, epoch=trainer.epoch, samples=trainer.samples)
    trainer.close()


def test_a_late_joiner_begins_in_the_present_epoch_and_stops_with_the_others(tmp_path):
    with cluster_of(2, tmp_path, script=in_epochs) as cluster:
        cluster.until(lambda: len(cluster.nodes[0].told("epoch")) >= 2, "two epochs")
        late = cluster.start()
        for node in cluster.nodes:
            assert node.exit_code() == 0
        assert values(cluster, "end", "epoch") == [12, 12, 12]
        assert values(cluster, "end", "samples") == [12 * 96] * 3
        assert len(set(values(cluster, "end", "step"))) == 1
        assert [record["epoch"] for record in cluster.nodes[0].told("epoch")] == list(range(12))
        begun = [record["epoch"] for record in late.told("epoch")]
        assert begun == list(range(begun[0], 12)) and begun[0] >= 2
        cluster.check()


def test_who_comes_when_all_have_finished_is_told_so(tmp_path):
    with cluster_of(2, tmp_path, epochs=8) as cluster:
        address = cluster.nodes[0].last("joined")["address"]
        for node in cluster.nodes:
            assert node.exit_code() == 0
        late = cluster.start(join=address, join_patience_s=1.0)
        ended = late.ended()
        assert ended["how"] == "ScaleOutFailed" and address in ended["reason"]
        cluster.check()


# --- mistakes ---


def another_model(w: worker.Worker) -> None:
    model = nn.Sequential(nn.Linear(worker.FEATURES, 17), nn.ReLU(), nn.Linear(17, worker.CLASSES))
    w.trainer(model, worker.make_optimizer(model))


def more_data(w: worker.Worker) -> None:
    model = worker.make_model()
    trainer = w.trainer(model, worker.make_optimizer(model))
    next(trainer.batches(worker.Numbered(100), batch_size=4))


def sparse(w: worker.Worker) -> None:
    """Uses its parameters in another way than the others, who have the same ones."""
    model = worker.make_model()
    trainer = w.trainer(model, worker.make_optimizer(model))
    nn.functional.embedding(torch.tensor([1]), model[0].weight, sparse=True).sum().backward()
    trainer.update()


MISTAKES = {
    another_model: ("ScaleOutFailed", "'0.weight' is float32 [17, 8] here, float32 [16, 8] there"),
    more_data: ("ConfigError", "the data set has 100 samples here, 96 in the cluster"),
    sparse: ("ConfigError", "parameter '0.weight' has a sparse gradient"),
}


def test_a_node_with_a_mistake_gets_a_clear_error_and_the_cluster_goes_on(tmp_path):
    with cluster_of(2, tmp_path) as cluster:
        for script, (error, reason) in MISTAKES.items():
            ended = cluster.start(script).ended()
            assert (ended["how"], reason in ended["reason"]) == (error, True), ended
            cluster.nodes[0].advance(10)
        cluster.finish()
