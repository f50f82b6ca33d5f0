"""Stochastic weight averaging: from an epoch on the rate stays high, and the weights are averaged."""

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, SequentialLR
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from chaosnet import Trainer

EPOCHS, START = 6, 3
torch.manual_seed(0)
x = torch.randn(512, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
average = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
falling, high = CosineAnnealingLR(optimizer, START), SWALR(optimizer, 0.05, anneal_epochs=1)
scheduler = SequentialLR(optimizer, [falling, high], [START])


def average_late(epoch):
    if epoch >= START:
        average.update_parameters(model)


told = {"lr_scheduler_every": "epoch", "after_step": lambda trainer: average_late(trainer.epoch)}
trainer = Trainer(model, optimizer, scheduler, average.state_dict(keep_vars=True), **told)

for epoch in trainer.epochs(EPOCHS):
    for inputs, labels in trainer.batches(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    scheduler.step()
    with torch.no_grad():
        print("loss", epoch, nn.functional.cross_entropy(average(x), y).item())
