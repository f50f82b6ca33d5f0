"""Lightning's Trainer as a node of a cluster: two lines, `import` and `strategy`.

    pip install '.[lightning,demo]'
    chaosnet run --listen 127.0.0.1:5555 examples/lightning_digits.py
    chaosnet run --join 127.0.0.1:5555 examples/lightning_digits.py       # as often as you like, at any time

Each node prints the held-out loss after each epoch of the cluster: the same on all, as they hold the same weights. A
node that comes late begins with the present epoch. The one that has been there for the longest writes the
checkpoints; kill it, and the next one does.
"""

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chaosnet.integrations.lightning import ChaosnetStrategy

scans = load_digits()
images, digits = torch.tensor(scans.data, dtype=torch.float32) / 16, torch.tensor(scans.target)
train = DataLoader(TensorDataset(images[:1500], digits[:1500]), batch_size=8, shuffle=True)
held_out = DataLoader(TensorDataset(images[1500:], digits[1500:]), batch_size=297)


class Reader(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, number):
        images, digits = batch
        return nn.functional.cross_entropy(self.net(images), digits)

    def validation_step(self, batch, number):
        images, digits = batch
        self.log("held_out", nn.functional.cross_entropy(self.net(images), digits))

    def on_validation_epoch_end(self):
        loss = self.trainer.callback_metrics["held_out"]
        print(f"epoch {self.current_epoch}, step {self.global_step}: held-out loss {loss:.4f}", flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


trainer = lightning.Trainer(
    strategy=ChaosnetStrategy(),
    max_epochs=200,
    gradient_clip_val=1.0,
    callbacks=[EarlyStopping("held_out", patience=20), ModelCheckpoint("runs/lightning", monitor="held_out")],
    num_sanity_val_steps=0,
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(Reader(), train, held_out)
