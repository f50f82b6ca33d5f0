"""What nodes of tests at real size run: parameters that are all trained by Adam, until Ctrl+C.

A layer's parameters and what Adam keeps of them are 6 MB; there are CHAOSNET_TEST_LAYERS, or 6.
"""

import json
import os
import time
from pathlib import Path

import torch

from chaosnet import Trainer, capture_exit_event

LAYERS = int(os.environ.get("CHAOSNET_TEST_LAYERS", "6"))
torch.set_num_threads(1)
model = torch.nn.ModuleList([torch.nn.Linear(1, 250_000) for _ in range(LAYERS)])
optimizer = torch.optim.Adam(model.parameters(), 1e-4)
print(json.dumps({"ready": os.getpid()}), flush=True)
while not Path("go").exists():
    time.sleep(0.01)
called_s = time.monotonic()
trainer = Trainer(model, optimizer)
joined = {
    "took_s": time.monotonic() - called_s,
    "bytes": trainer.join_bytes,
    "from": trainer.join_bytes_by_source,
}
print(json.dumps(joined), flush=True)
while not capture_exit_event():
    began_s = time.monotonic()
    time.sleep(0.1)
    sum(layer(torch.ones(1, 1)).square().mean() for layer in model).backward()
    trainer.update()
    told = {"step": trainer.step, "step_s": time.monotonic() - began_s}
    if trainer.step % 5 == 0:
        told["hash"] = trainer.state_hash()
    print(json.dumps(told), flush=True)
trainer.request_node_exit()
