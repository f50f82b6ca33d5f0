"""Each node trains on data of its own, with its own DataLoader, as in the paper.

    chaosnet run --listen 127.0.0.1:5555 examples/own_loader.py 0
    chaosnet run --join 127.0.0.1:5555 examples/own_loader.py 1

The number says which third of the digits this node has. `update(samples=...)` makes every sample count the
same in the cluster's gradient, however many each node brings; nodes may finish at different times.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chaosnet import Trainer, capture_exit_event

third = int(sys.argv[1]) if len(sys.argv) > 1 else 0
scans = load_digits()
images = torch.tensor(scans.data, dtype=torch.float32)[third::3] / 16
labels = torch.tensor(scans.target)[third::3]
loader = DataLoader(TensorDataset(images, labels), batch_size=20, shuffle=True)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with Trainer(model, optimizer) as trainer:  # Leaves the cluster at the end of the block.
    for epoch in range(1000):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            mean = trainer.mean(loss, weight=len(x))
            trainer.update(samples=len(x))
            trainer.check_state_replication()
            if capture_exit_event():
                break
        if capture_exit_event():
            break
        if epoch % 50 == 0:
            print(f"epoch {epoch:3} of this node  step {trainer.step:5}  loss {mean:.4f}", flush=True)
