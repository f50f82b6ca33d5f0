"""An exponential moving average of the weights beside the model."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from chaosnet import Trainer

EPOCHS = 6
torch.manual_seed(0)
x = torch.randn(512, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
state = average.state_dict(keep_vars=True)
trainer = Trainer(model, optimizer, None, state, after_step=lambda: average.update_parameters(model))

for epoch in trainer.epochs(EPOCHS):
    for inputs, labels in trainer.batches(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    with torch.no_grad():
        print("loss", epoch, nn.functional.cross_entropy(average(x), y).item())
