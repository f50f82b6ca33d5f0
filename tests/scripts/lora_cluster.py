"""Low-rank adapters by `peft` on a model that is frozen."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chaosnet import Trainer

EPOCHS = 6
torch.manual_seed(0)
x = torch.randn(512, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)

base = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
model = get_peft_model(base, LoraConfig(r=4, target_modules=["0", "2"], modules_to_save=["4"]))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
trainer = Trainer(model, optimizer)

for epoch in trainer.epochs(EPOCHS):
    for inputs, labels in trainer.batches(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    with torch.no_grad():
        print("loss", epoch, nn.functional.cross_entropy(model(x), y).item())
