"""The demo's net, trained until somebody ends it: something to watch while links and nodes come and go.

    chaosnet run --listen 127.0.0.1:5555 examples/endless.py
    chaosnet run --join 127.0.0.1:5555 examples/endless.py

Now and then each node prints a line with the loss and a hash of its state: for one step, they are the same on all.
With --log it writes down every step as JSON, as the demo's nodes do; once the file --until exists on one of them,
all stop after the same step.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

from chaosnet import Trainer, capture_exit_event
from chaosnet.trials.demo_digits import digits, small_net

parser = argparse.ArgumentParser()
parser.add_argument("--pause", type=float, default=0.05, help="seconds per step, to watch")
parser.add_argument("--every", type=int, default=100, help="steps from one line to the next")
parser.add_argument("--log", type=Path, default=Path("/dev/null"))
parser.add_argument("--until", type=Path)
options = parser.parse_args()
log = options.log.open("w", buffering=1)

torch.set_num_threads(1)
torch.manual_seed(0)
train, _ = digits(seed=0)
device = torch.accelerator.current_accelerator() or torch.device("cpu")
model = small_net().to(device)
trainer = Trainer(model, torch.optim.Adam(model.parameters(), lr=5e-4), seed=0)
print(f"joined at step {trainer.joined_step} in {trainer.join_seconds:.2f} s", flush=True)

for batch in trainer.batches(train, batch_size=16, epochs=1_000_000):
    # A mean over the cluster is the same on all members: they stop after the same step.
    if trainer.metrics.get("enough"):
        break
    loss = nn.functional.cross_entropy(model(batch.x.to(device)), batch.y.to(device))
    loss.backward()
    trainer.mean(loss)
    trainer.mean(float(options.until is not None and options.until.exists()), name="enough")
    time.sleep(options.pause)
    before = trainer.updates_here
    trainer.update()
    if trainer.updates_here > before:
        mean = trainer.metrics["loss"]
        step = {"step": trainer.step, "loss": mean, "samples": trainer.samples, "time_s": time.time()}
        print(json.dumps(step), file=log)
        if trainer.step % options.every == 0:
            print(f"step {trainer.step:6}  loss {mean:.4f}  state {trainer.state_hash()}", flush=True)
    trainer.check_state_replication()
    if capture_exit_event():
        break

print(json.dumps({"final_step": trainer.step, "hash": trainer.state_hash()}), file=log)
print(f"leaves after step {trainer.step}", flush=True)
trainer.request_node_exit()
