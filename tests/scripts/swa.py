"""Stochastic weight averaging: from an epoch on the rate stays high, and the weights are averaged."""

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, SequentialLR
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, TensorDataset

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


for epoch in range(EPOCHS):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        average_late(epoch)
    scheduler.step()
    with torch.no_grad():
        print("loss", epoch, nn.functional.cross_entropy(average(x), y).item())
