"""The Trainer of `transformers`: accumulation, clipping, warmup, evaluation, early stopping, checkpoints."""

import torch
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

EPOCHS = 6
torch.manual_seed(0)
x = torch.randn(512, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
data = [{"x": inputs, "labels": label} for inputs, label in zip(x, y, strict=True)]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x, labels):
        out = self.net(x)
        return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}


class Tell(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        print("loss", round(state.epoch), metrics["eval_loss"], state.global_step)


args = TrainingArguments(
    "out",
    num_train_epochs=EPOCHS,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    warmup_steps=10,
    eval_strategy="epoch",
    save_strategy="epoch",
    metric_for_best_model="loss",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(
    model=Classifier(),
    args=args,
    train_dataset=data,
    eval_dataset=data,
    callbacks=[Tell(), EarlyStoppingCallback(EPOCHS)],
)
trainer.train()
