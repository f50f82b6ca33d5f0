"""The Trainer of `transformers` as a node of a cluster, by another import. GPT-2 learns to write this project's docs.

    pip install '.[transformers]'
    chaosnet run --listen 127.0.0.1:5555 examples/transformers_gpt2.py
    chaosnet run --join 127.0.0.1:5555 examples/transformers_gpt2.py       # as often as you like, at any time

Each node prints the loss of held-out text after each epoch of the cluster: the same on all, as they hold the same
weights. The learning rate comes to 0 with the last epoch, however many nodes there were. Weights are random at first:
nothing is downloaded.
"""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from chaosnet.integrations.transformers import Trainer

LENGTH = 64  # Bytes that it sees at once.
SIZE = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 48, "n_layer": 2, "n_head": 4}

text = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.parent.glob("docs/*.md")))
pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, LENGTH, LENGTH)
items = [{"input_ids": piece, "labels": piece} for piece in pieces[:1280]]


class Tell(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        told = f"epoch {state.epoch:.0f}, step {state.global_step}: held-out loss {metrics['eval_loss']:.4f}"
        print(told, flush=True)


torch.manual_seed(0)
trainer = Trainer(
    model=GPT2LMHeadModel(GPT2Config(**SIZE, bos_token_id=0, eos_token_id=0)),
    args=TrainingArguments(
        "runs/transformers",
        num_train_epochs=20,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=50,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=items[:1152],
    eval_dataset=items[1152:],
    callbacks=[Tell()],
)
trainer.train()
