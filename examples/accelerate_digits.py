"""A loop by `accelerate` on a cluster: two lines, the import and `accelerator.epochs`.

    pip install '.[accelerate,demo]'
    chaosnet run --listen 127.0.0.1:5555 examples/accelerate_digits.py
    chaosnet run --join 127.0.0.1:5555 examples/accelerate_digits.py       # as often as you like, at any time

Each node prints how many of the held-out digits are wrong after each epoch of the cluster: the same on all, as they
hold the same weights. `accumulate` ends a step where the cluster does: the last one of an epoch has fewer batches.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chaosnet.integrations.accelerate import Accelerator

EPOCHS = 200
scans = load_digits()
images, digits = torch.tensor(scans.data, dtype=torch.float32) / 16, torch.tensor(scans.target)
train = DataLoader(TensorDataset(images[:1500], digits[:1500]), batch_size=4, shuffle=True)

accelerator = Accelerator(gradient_accumulation_steps=4)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train) // 4)
model, optimizer, train, schedule = accelerator.prepare(model, optimizer, train, schedule)

for epoch in accelerator.epochs(EPOCHS):
    for inputs, targets in train:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    with torch.no_grad():
        wrong = (model(images[1500:].to(accelerator.device)).argmax(1).cpu() != digits[1500:]).sum()
    print(f"epoch {epoch}, step {accelerator.cluster.step}: wrong digits {wrong} of 297", flush=True)
