"""What the nodes of a testbed run in test_silent_links.py: trains until Ctrl+C, and prints what it does as JSON."""

import json
import sys
import time

import torch

from chaosnet import Trainer, capture_exit_event

HASH_EVERY = 25

torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
trainer = Trainer(model, torch.optim.Adam(model.parameters()))
while not capture_exit_event():
    model(torch.randn(8, 64)).square().mean().backward()
    trainer.update()
    trainer.check_state_replication()
    told = {"step": trainer.step, "at_s": time.monotonic()}
    if trainer.step % HASH_EVERY == 0:
        told["hash"] = trainer.state_hash()
    print(json.dumps(told), flush=True)
    time.sleep(0.01)
links = sorted([row.a, row.b] for row in trainer.status().links)
line = json.dumps({"links": links}) + "\n"  # In one piece: the trainer prints there, too.
print(line, end="", file=sys.stderr, flush=True)
trainer.request_node_exit()
