"""Pipelines on scikit-learn's digits: members that come and go compute the layers of one model, one after the other.

    chaosnet run --listen 127.0.0.1:5555 examples/pipeline.py
    chaosnet run --join 127.0.0.1:5555 examples/pipeline.py       # as often as you like, at any time

Each prints the pipelines whenever they change, the loss, and after each epoch the accuracy on held-out digits. Kill
any of them: the loss of the next step is what it would have been, to the bit.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

from chaosnet import Callbacks, EpochDone, PipelineTrainer, Validation


def accuracy(outputs: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == digits).float().mean()


def tell(epoch: EpochDone) -> None:
    print(f"epoch {epoch.epoch}: held-out accuracy {epoch.metrics['val_accuracy']:.1%}", flush=True)


scans = load_digits()
data = TensorDataset(torch.tensor(scans.data, dtype=torch.float32) / 16, torch.tensor(scans.target))
training, held_out = Subset(data, range(1500)), Subset(data, range(1500, len(data)))
torch.manual_seed(0)
hidden = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(8)]
model = nn.Sequential(*hidden, nn.Linear(64, 10))  # Each child is a layer.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with PipelineTrainer(
    model,
    optimizer,
    nn.functional.cross_entropy,
    batch=64,
    micro_batch=8,
    stages=2,
    validation=Validation(held_out, {"accuracy": accuracy}),
    callbacks=Callbacks(on_epoch=tell),
) as trainer:
    for step in trainer.steps(training, epochs=100):
        if step.step % 100 == 0:
            print(f"step {step.step}, epoch {step.epoch}: loss {step.metrics['loss']:.6f}", flush=True)
