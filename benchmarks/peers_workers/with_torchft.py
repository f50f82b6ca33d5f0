"""A worker of `chaosnet bench peers`: torchft's fault-tolerant DDP, with the settings of its example train_ddp.py.

Those are: Gloo with a timeout of 5 s, the state over the process group (10 s), 30 s for all else. The lighthouse
runs as its README says: --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000. One process is a replica
group, which torchrun would start (and start again); its store is made here.
"""

from datetime import timedelta
from typing import Any

import torch
from peer import Bench, Layers
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport

bench = Bench()
address = bench.told["address"]
layers = Layers(bench.told["mb"])
inner = torch.optim.Adam(layers.parameters(), 1e-4)
x = torch.ones(1, 1)


def state_dict() -> dict[str, Any]:
    return {"model": layers.state_dict(), "optim": inner.state_dict()}


def load_state_dict(state: dict[str, Any]) -> None:
    layers.load_state_dict(state["model"])
    inner.load_state_dict(state["optim"])


lighthouse = bench.begin()
store = TCPStore(host_name=address, port=0, is_master=True, wait_for_workers=False)
group = ProcessGroupGloo(timeout=timedelta(seconds=5))
manager = Manager(
    pg=group,
    min_replica_size=1,
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    replica_id=bench.told["name"],
    timeout=timedelta(seconds=30),
    checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device=torch.device("cpu")),
    lighthouse_addr=lighthouse,
    store_addr=address,
    store_port=store.port,
    rank=0,
    world_size=1,
    hostname=address,
)
model = DistributedDataParallel(manager, layers)
optimizer = Optimizer(manager, inner)
bench.say(address=lighthouse, leads=False)
while True:
    optimizer.zero_grad()  # Asks for a quorum, which is formed meanwhile.
    bench.compute()
    loss = model(x)
    loss.backward()
    before = manager.current_step()
    optimizer.step()
    if manager.current_step() > before:
        bench.step(manager.current_step(), manager.num_participants())
