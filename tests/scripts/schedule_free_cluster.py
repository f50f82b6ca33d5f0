"""An optimizer of its own, without a schedule: eval() and train() swap the weights for their average and back."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chaosnet import Trainer

EPOCHS = 6
torch.manual_seed(0)
x = torch.randn(512, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)


class ScheduleFree(torch.optim.Optimizer):
    """SGD of Defazio et al., The Road Less Scheduled. In train() a parameter is y, in eval() x."""

    def __init__(self, params, lr=0.5, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0, "train_mode": True})

    @torch.no_grad()
    def _swap(self, group, weight):
        group["train_mode"] = not group["train_mode"]
        for p in group["params"]:
            if "z" in self.state[p]:
                p.lerp_(self.state[p]["z"], weight)

    def train(self):
        for group in self.param_groups:
            if not group["train_mode"]:
                self._swap(group, 1 - group["beta"])

    def eval(self):
        for group in self.param_groups:
            if group["train_mode"]:
                self._swap(group, 1 - 1 / group["beta"])

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert group["train_mode"]
            group["steps"] += 1
            share, lr, beta = 1 / group["steps"], group["lr"], group["beta"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share).sub_(p.grad, alpha=lr * (1 - beta * (1 - share)))
                z.sub_(p.grad, alpha=lr)


model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = ScheduleFree(model.parameters())
trainer = Trainer(model, optimizer)

for epoch in trainer.epochs(EPOCHS):
    optimizer.train()
    for inputs, labels in trainer.batches(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    optimizer.eval()
    with torch.no_grad():
        print("loss", epoch, nn.functional.cross_entropy(model(x), y).item())
