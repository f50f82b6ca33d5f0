"""A net learns what another one answers, on several processes by DistributedDataParallel.

    torchrun --standalone --nproc-per-node 2 examples/from_ddp/ddp.py

cluster.py, beside this, is the same for a cluster that may change: docs/from_ddp.md goes through the differences.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--in-order", action="store_true", help="do not shuffle, to compare two runs")
options = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(5120, 20)
targets = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))(inputs).argmax(1)
train = TensorDataset(inputs[:4096], targets[:4096])
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

dist.init_process_group("gloo")
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)
sampler = DistributedSampler(train, shuffle=not options.in_order)
loader = DataLoader(train, batch_size=64 // dist.get_world_size(), sampler=sampler)

first = 0
if os.path.exists("ddp.pt"):
    saved = torch.load("ddp.pt", weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    first = saved["epoch"]

for epoch in range(first, options.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    with torch.no_grad():
        held_out = nn.functional.cross_entropy(model(inputs[4096:]), targets[4096:])
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: held-out loss {held_out:.7f}", flush=True)
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"scheduler": scheduler.state_dict(), "epoch": epoch + 1}, "ddp.pt")
dist.destroy_process_group()
