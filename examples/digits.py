"""Nodes that come and go learn to read scanned digits; each sample of an epoch is used exactly once.

On one machine, each line in a terminal of its own, the second as often and as late as you like:

    chaosnet run --listen 127.0.0.1:5555 examples/digits.py
    chaosnet run --join 127.0.0.1:5555 examples/digits.py

Then look at them (`chaosnet status 127.0.0.1:5555`, or `chaosnet top`, live), and end some with Ctrl+C or kill -9.
On several machines, --listen on every one with an address that the others can reach.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from chaosnet import Trainer, capture_exit_event

# Data: the same on every node.
scans = load_digits()
order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
images = torch.tensor(scans.images, dtype=torch.float32)[order, None] / 16
labels = torch.tensor(scans.target)[order]
train = TensorDataset(images[:1437], labels[:1437])

# Model and optimizer, as ever. A node that joins gets the cluster's state instead.
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

trainer = Trainer(model, optimizer)

for batch in trainer.batches(train, batch_size=16, epochs=100):
    loss = nn.functional.cross_entropy(model(batch.x), batch.y)
    loss.backward()
    mean = trainer.mean(loss)  # Over the cluster; known after the update.
    trainer.update()
    trainer.check_state_replication()
    if trainer.step % 100 == 0:
        print(f"epoch {trainer.epoch:3}  step {trainer.step:5}  loss {mean:.4f}", flush=True)
    if capture_exit_event():
        break

with torch.no_grad():
    right = (model.eval()(images[1437:]).argmax(1) == labels[1437:]).float().mean()
print(f"held-out accuracy {right:.2%} after {trainer.step} steps of the cluster")
trainer.request_node_exit()
