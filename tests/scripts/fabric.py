"""Lightning Fabric moves and wraps the model; the loop is one's own."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 6
torch.manual_seed(0)
x = torch.randn(512, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
fabric = Fabric(accelerator="cpu", devices=1)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
model, optimizer = fabric.setup(model, optimizer)

for epoch in range(EPOCHS):
    for inputs, labels in loader:
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
    with torch.no_grad():
        print("loss", epoch, nn.functional.cross_entropy(model(x), y).item())
