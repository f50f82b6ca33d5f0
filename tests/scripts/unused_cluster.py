"""A model that uses one of its branches in each batch: the others' parameters have no gradient."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chaosnet import Trainer

EPOCHS = 6
torch.manual_seed(0)
x = torch.randn(512, 8)
y = (x[:, 0] > 0).long()
loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)

model = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)) for _ in range(3))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
trainer = Trainer(model, optimizer)

for epoch in trainer.epochs(EPOCHS):
    for inputs, labels in trainer.batches(loader):
        branch = random.choice(model)
        optimizer.zero_grad()
        nn.functional.cross_entropy(branch(inputs), labels).backward()
        optimizer.step()
    with torch.no_grad():
        print("loss", epoch, sum(nn.functional.cross_entropy(branch(x), y).item() for branch in model))
