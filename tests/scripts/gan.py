"""A GAN: two models, two optimizers, in turn."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 6
torch.manual_seed(0)
real_all = torch.randn(512, 2) * 0.5 + torch.tensor([2.0, -1.0])
loader = DataLoader(TensorDataset(real_all), 16, shuffle=True)

D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
G = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer_D = torch.optim.Adam(D.parameters(), 1e-3, (0.5, 0.999))
optimizer_G = torch.optim.Adam(G.parameters(), 1e-3, (0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()

for epoch in range(EPOCHS):
    for (real,) in loader:
        fake = G(torch.randn(len(real), 4))

        optimizer_D.zero_grad()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        (criterion(D(real), ones) + criterion(D(fake.detach()), zeros)).backward()
        optimizer_D.step()

        optimizer_G.zero_grad()
        criterion(D(fake), ones).backward()
        optimizer_G.step()
    with torch.no_grad():
        print("epoch", epoch, "mean", G(torch.randn(512, 4)).mean(0).tolist())
