"""Lightning's own loop: accumulation, clipping, a schedule by steps, validation, early stopping, a checkpoint."""

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 6
torch.manual_seed(0)
x = torch.randn(512, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), 8, shuffle=True)
held_out = DataLoader(TensorDataset(x, y), 128)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, number):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, number):
        inputs, labels = batch
        self.log("loss", nn.functional.cross_entropy(self.net(inputs), labels))

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            print("loss", self.current_epoch, self.trainer.callback_metrics["loss"].item(), self.global_step)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


trainer = lightning.Trainer(
    accelerator="cpu",
    max_epochs=EPOCHS,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    callbacks=[EarlyStopping("loss", patience=EPOCHS), ModelCheckpoint("last", save_last=True)],
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(Classifier(), loader, held_out)
