"""All at once: DataLoader workers, GradScaler, clipping, validation, a cosine by epochs, and resume."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from chaosnet import Checkpoints, Trainer

EPOCHS = 6
torch.manual_seed(0)
scans = load_digits()
digits = TensorDataset(torch.tensor(scans.data, dtype=torch.float32) / 16, torch.tensor(scans.target))
train, valid, _ = random_split(digits, [512, 512, len(digits) - 1024])
loader = DataLoader(train, 16, shuffle=True, num_workers=2)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
scaler = torch.amp.GradScaler("cpu")
last = Checkpoints("last", resume=True)
trainer = Trainer(model, optimizer, scheduler, lr_scheduler_every="epoch", checkpoints=last)

for epoch in trainer.epochs(EPOCHS):
    for x, y in trainer.batches(loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    scheduler.step()

    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in DataLoader(valid, 64)]
        print("loss", epoch, sum(losses).item() / len(valid))
