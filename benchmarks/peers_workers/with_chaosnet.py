"""A worker of `chaosnet bench peers`: chaosnet, all settings as they come. Without keys, as torchft is."""

import torch
from peer import Bench, Layers

from chaosnet import Cluster, Trainer

bench = Bench()
model = Layers(bench.told["mb"])
optimizer = torch.optim.Adam(model.parameters(), 1e-4)
x = torch.ones(1, 1)
cluster = Cluster(
    join=bench.begin() or "", listen=f"{bench.told['address']}:0", name=bench.told["name"], insecure=True
)
trainer = Trainer(model, optimizer, cluster=cluster)
status = trainer.status()
(own,) = (each for each in status.members if each.node == trainer.name)
bench.say(address=own.addresses[0], leads=status.scheduler == trainer.name)
while True:
    bench.compute()
    model(x).backward()
    before, samples = trainer.step, trainer.samples
    trainer.update(samples=1)
    if trainer.step > before:
        bench.step(trainer.step, round(trainer.samples - samples))  # One of each member.
