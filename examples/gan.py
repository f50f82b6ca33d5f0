"""A GAN: two models, two optimizers, and updates that have names, so that a node may join at any time.

    chaosnet run --listen 127.0.0.1:5555 examples/gan.py
    chaosnet run --join 127.0.0.1:5555 examples/gan.py

G learns to draw points of a ring from noise, D to tell them from real ones. A round is update(name="D"), then
update(name="G"), in this order on all nodes; a node that joins begins with "D". Each node draws noise of its own.
"""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

from chaosnet import Trainer, capture_exit_event

angles = torch.rand(2048, generator=torch.Generator().manual_seed(0)) * 2 * math.pi
ring = TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))

d = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
g = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizers = {
    "D": torch.optim.Adam(d.parameters(), 1e-3, betas=(0.5, 0.9)),
    "G": torch.optim.Adam(g.parameters(), 1e-3, betas=(0.5, 0.9)),
}
judge = nn.BCEWithLogitsLoss()

trainer = Trainer({"D": d, "G": g}, optimizers)

for (real,) in trainer.batches(ring, batch_size=64, epochs=200, min_samples=2):
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

    fake = g(torch.randn(len(real), 8))
    loss_d = judge(d(real), ones) + judge(d(fake.detach()), zeros)
    loss_d.backward()
    trainer.mean(loss_d, "D")
    trainer.update(name="D")

    fake = g(torch.randn(len(real), 8))
    judge(d(fake), ones).backward()  # Leaves gradients in D, too; update(name="G") does not step it.
    off = trainer.mean((fake.norm(dim=1) - 1).abs().mean(), "off the ring")
    trainer.update(name="G")

    if trainer.step % 1000 == 0:
        print(f"step {trainer.step:5}  points are off the ring by {off:.3f}", flush=True)
    if capture_exit_event():
        break
trainer.request_node_exit()
