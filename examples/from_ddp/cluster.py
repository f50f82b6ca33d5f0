"""A net learns what another one answers, on nodes that come and go.

    chaosnet run --listen 127.0.0.1:5555 examples/from_ddp/cluster.py --pause 0.05
    chaosnet run --join 127.0.0.1:5555 examples/from_ddp/cluster.py --pause 0.05

ddp.py, beside this, is the same by DistributedDataParallel: docs/from_ddp.md goes through the differences.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chaosnet import Checkpoints, Trainer

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--in-order", action="store_true", help="do not shuffle, to compare two runs")
parser.add_argument("--pause", type=float, default=0.0, help="seconds a step, to have time to watch")
options = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(5120, 20)
targets = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))(inputs).argmax(1)
train = TensorDataset(inputs[:4096], targets[:4096])
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)
loader = DataLoader(train, batch_size=64, shuffle=not options.in_order)

to_disk = Checkpoints("checkpoints", resume=True)
trainer = Trainer(model, optimizer, scheduler, lr_scheduler_every="epoch", checkpoints=to_disk)

for epoch in trainer.epochs(options.epochs):
    for x, y in trainer.batches(loader, global_batch=64):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(options.pause)
    scheduler.step()
    with torch.no_grad():
        held_out = nn.functional.cross_entropy(model(inputs[4096:]), targets[4096:])
    if trainer.is_main:
        print(f"epoch {epoch + 1}: held-out loss {held_out:.7f}", flush=True)
