"""A loop by `accelerate`: accumulation, clipping, a schedule with warmup, validation."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 6
torch.manual_seed(0)
x = torch.randn(512, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
train = DataLoader(TensorDataset(x, y), 8, shuffle=True)
held_out = DataLoader(TensorDataset(x, y), 128)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
model, optimizer, train, held_out, warmup = accelerator.prepare(model, optimizer, train, held_out, warmup)

for epoch in range(EPOCHS):
    model.train()
    for inputs, labels in train:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(inputs), labels) for inputs, labels in held_out]
    accelerator.print("loss", epoch, torch.stack(losses).mean().item())
    if accelerator.is_main_process:
        accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
