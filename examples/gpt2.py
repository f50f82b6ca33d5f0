"""GPT-2 in layers: members that come and go compute its blocks as pipelines. It learns to write this project's docs.

    pip install transformers
    chaosnet run --listen 127.0.0.1:5555 examples/gpt2.py
    chaosnet run --join 127.0.0.1:5555 examples/gpt2.py       # as often as you like, at any time

Each prints the pipelines whenever they change, and the loss of a byte of text. The embedding is the first layer,
the head is the last and has the same weights, and between them each block is one. Kill any of the members: losses
are those of one process, to the bit.
"""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from chaosnet import PipelineTrainer

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    raise SystemExit("examples/gpt2.py: transformers is not installed (pip install transformers)") from None

LENGTH = 64  # Bytes that it sees at once.
SIZE = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 96, "n_layer": 6, "n_head": 4}
CONFIG = GPT2Config(**SIZE, bos_token_id=0, eos_token_id=0)


class First(nn.Module):
    def __init__(self, gpt2):
        super().__init__()
        self.words, self.places, self.drop = gpt2.transformer.wte, gpt2.transformer.wpe, gpt2.transformer.drop

    def forward(self, ids):
        return self.drop(self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))


class Middle(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        out = self.block(x)
        return out[0] if isinstance(out, tuple) else out  # Of some versions it is a tuple.


class Last(nn.Module):
    def __init__(self, gpt2):
        super().__init__()
        self.norm, self.head = gpt2.transformer.ln_f, gpt2.lm_head  # Its weights are those of First.words.

    def forward(self, x):
        return self.head(self.norm(x))


def next_byte(out, targets):
    return nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten())


text = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.parent.glob("docs/*.md")))
pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, LENGTH + 1, LENGTH)
data = TensorDataset(pieces[:, :-1], pieces[:, 1:])  # What comes one byte later is to be learnt.

torch.manual_seed(0)
gpt2 = GPT2LMHeadModel(CONFIG)  # Random weights.
layers = [First(gpt2), *map(Middle, gpt2.transformer.h), Last(gpt2)]
optimizer = torch.optim.AdamW(gpt2.parameters(), lr=1e-3)
with PipelineTrainer(
    layers, optimizer, next_byte, batch=32, micro_batch=4, stages=2, max_grad_norm=1.0
) as trainer:
    for step in trainer.steps(data, epochs=5):
        if step.step % 10 == 0:
            print(f"step {step.step}, epoch {step.epoch}: loss {step.metrics['loss']:.6f}", flush=True)
