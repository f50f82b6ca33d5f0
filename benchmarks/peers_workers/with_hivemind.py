"""A worker of `chaosnet bench peers`: hivemind.Optimizer, synchronous, as it is by default.

Settings are those of its quick start, for peers near each other: matchmaking_time 3 s, averaging_timeout 10 s. No
compression. A step is one of its epochs, of SAMPLES of each member: with one of each, an epoch is shorter than the
search for its group and than a download of the state, so that who comes late is late again (its guide, too, advises
large batches).
"""

import logging
import re

import hivemind
import torch
from peer import Bench, Layers

SAMPLES = 10
bench = Bench()
model = Layers(bench.told["mb"])
x = torch.ones(1, 1)


class GroupSize(logging.Handler):
    """hivemind says only in its log with how many peers it has averaged."""

    members = 1

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.match(r"Averaged gradients with (\d+) peers", record.getMessage()):
            self.members = int(found[1])


def main() -> None:
    """Trains until it is killed."""
    group = GroupSize()
    initial_peers = bench.begin() or []
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{bench.told['address']}/tcp/0"], initial_peers=initial_peers, start=True
    )
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="bench",
        batch_size_per_step=1,
        target_batch_size=SAMPLES * bench.told["members"],
        params=model.parameters(),
        optimizer=lambda params: torch.optim.Adam(params, 1e-4),
        matchmaking_time=3.0,
        averaging_timeout=10.0,
        verbose=True,
    )
    logging.getLogger("hivemind.optim.optimizer").addHandler(group)
    bench.say(address=[str(each) for each in dht.get_visible_maddrs()], leads=not initial_peers)
    if initial_peers:
        optimizer.load_state_from_peers()
    while True:
        optimizer.zero_grad()
        bench.compute()
        model(x).backward()
        before, group.members = optimizer.local_epoch, 1
        optimizer.step()
        if optimizer.local_epoch > before:
            bench.step(optimizer.local_epoch, group.members)


if __name__ == "__main__":
    main()
