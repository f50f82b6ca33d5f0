"""An LSTM, with clipping and a schedule by steps."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chaosnet import Trainer

EPOCHS = 6
torch.manual_seed(0)
x = torch.randn(512, 6, 4)
y = (x[:, :, 0].sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(inputs)[0][:, -1])


model = Recurrent()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
trainer = Trainer(model, optimizer, scheduler)

for epoch in trainer.epochs(EPOCHS):
    for inputs, labels in trainer.batches(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        print("loss", epoch, nn.functional.cross_entropy(model(x), y).item())
