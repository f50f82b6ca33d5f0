"""GPT-2 of `transformers`, with batches that are dictionaries and a schedule with warmup."""

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

EPOCHS = 6
torch.manual_seed(0)
starts = torch.randint(16, (512,))
tokens = (starts[:, None] + torch.arange(12)) % 16  # Counts from anywhere, modulo 16.
loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], 16, shuffle=True)

model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=12, n_embd=16, n_layer=2, n_head=2))
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, 5, EPOCHS * len(loader))

for epoch in range(EPOCHS):
    model.train()
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        print("loss", epoch, model(input_ids=tokens, labels=tokens).loss.item())
