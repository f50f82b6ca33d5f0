"""Mixed precision in bfloat16, which needs no GradScaler."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chaosnet import Trainer

EPOCHS = 6
torch.manual_seed(0)
x = torch.randn(512, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
trainer = Trainer(model, optimizer)

for epoch in trainer.epochs(EPOCHS):
    for inputs, labels in trainer.batches(loader):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        print("loss", epoch, nn.functional.cross_entropy(model(x), y).item())
