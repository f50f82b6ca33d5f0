"""Gradients of several small batches per step, clipped, with a learning rate schedule and state of your own.

    chaosnet run --listen 127.0.0.1:5555 examples/accumulate.py
    chaosnet run --join 127.0.0.1:5555 examples/accumulate.py

With accumulate=4 and batch_size=8 this node brings 32 samples to a step, in four goes (fewer at the end of an
epoch: `batch.last` says when the step is due). A node that joins receives the schedule and `seen` along with
the parameters. What changes `seen` at every step is `after_step`: a joiner runs it, too, for the steps that it
catches up with.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from chaosnet import Trainer, capture_exit_event

scans = load_digits()
train = TensorDataset(torch.tensor(scans.data, dtype=torch.float32) / 16, torch.tensor(scans.target))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5700)
seen = {"best_loss": float("inf")}  # Plain data and tensors; the same on every member.


def note_best(trainer: Trainer) -> None:
    seen["best_loss"] = min(seen["best_loss"], trainer.metrics["loss"])


trainer = Trainer(model, optimizer, schedule, extra_state=seen, max_grad_norm=1.0, after_step=note_best)

for batch in trainer.batches(train, batch_size=8, epochs=100, accumulate=4):
    loss = nn.functional.cross_entropy(model(batch.x), batch.y)
    (loss * batch.share).backward()
    trainer.mean(loss, weight=batch.samples)
    if not batch.last:
        continue
    trainer.update()
    if trainer.step % 500 == 0:
        print(
            f"step {trainer.step:5}  lr {schedule.get_last_lr()[0]:.2e}  best loss {seen['best_loss']:.4f}",
            flush=True,
        )
    if capture_exit_event():
        break
trainer.request_node_exit()
