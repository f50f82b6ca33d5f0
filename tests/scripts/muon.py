"""Muon for matrices, AdamW for everything else: two optimizers, each with a schedule, step together."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 6
torch.manual_seed(0)
x = torch.randn(512, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
matrices = [p for p in model.parameters() if p.ndim == 2]
rest = [p for p in model.parameters() if p.ndim != 2]
optimizers = [torch.optim.Muon(matrices, 0.02), torch.optim.AdamW(rest, 1e-2)]
schedules = [LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20)) for optimizer in optimizers]

for epoch in range(EPOCHS):
    for inputs, labels in loader:
        nn.functional.cross_entropy(model(inputs), labels).backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    with torch.no_grad():
        print("loss", epoch, nn.functional.cross_entropy(model(x), y).item())
