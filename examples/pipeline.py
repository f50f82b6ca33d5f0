"""Pipelines on scikit-learn's digits: members that come and go compute the layers of one model, one after the other.

    chaosnet run --listen 127.0.0.1:5555 examples/pipeline.py
    chaosnet run --join 127.0.0.1:5555 examples/pipeline.py       # as often as you like, at any time

Each prints the pipelines whenever they change, and the loss. Kill any of them: the loss of the next step is what it
would have been, to the bit.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from chaosnet import PipelineTrainer

scans = load_digits()
data = TensorDataset(torch.tensor(scans.data, dtype=torch.float32) / 16, torch.tensor(scans.target))
torch.manual_seed(0)
hidden = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(8)]
model = nn.Sequential(*hidden, nn.Linear(64, 10))  # Each child is a layer.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with PipelineTrainer(
    model, optimizer, nn.functional.cross_entropy, batch=64, micro_batch=8, stages=2
) as trainer:
    for step in trainer.steps(data, epochs=20):
        if step.step % 20 == 0:
            print(f"step {step.step}, epoch {step.epoch}: loss {step.metrics['loss']:.6f}", flush=True)
