"""What `torch.distributed.pipelining` makes of the model of pipeline_worker.py: two pipelines of two, over gloo."""

from __future__ import annotations

import os
from pathlib import Path

import pipeline_worker
import torch
import torch.distributed as dist
from torch import nn

from chaosnet.data.share import EpochOrder

STAGES, PIPELINES, CUT = 2, 2, 3  # Of seven layers.


class Contiguous(nn.Module):
    """Gloo sends no other tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous()


def run(rank: int, folder: str, samples: int, steps: int) -> None:
    """One of four processes. The last stage of the first pipeline saves losses; the first pipeline saves weights."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    number, stage = divmod(rank, STAGES)
    along = [dist.new_group([p * STAGES, p * STAGES + 1]) for p in range(PIPELINES)][number]
    across = [dist.new_group([s, STAGES + s]) for s in range(STAGES)][stage]
    layers = pipeline_worker.make_layers(dropout=0.0)
    words = layers[0].words.weight  # Of both ends: each has its own copy.
    mine = nn.Sequential(*(layers[:CUT] if stage == 0 else layers[CUT:]))
    if stage == 0:
        mine.append(Contiguous())
    optimizer = pipeline_worker.make_plain(list(mine))
    count = pipeline_worker.BATCH // pipeline_worker.MICRO_BATCH // PIPELINES
    schedule = Schedule1F1B(
        PipelineStage(mine, stage, STAGES, torch.device("cpu"), group=along), count, pipeline_worker.next_word
    )
    data, order, losses = pipeline_worker.make_data(samples), EpochOrder(samples, seed=0), []
    half = pipeline_worker.BATCH // PIPELINES
    for step in range(steps):
        epoch, at = divmod(step * pipeline_worker.BATCH, samples)
        start = at + number * half
        x, y = data[order.indices(epoch, [(start, start + half)])]
        optimizer.zero_grad()
        told: list[torch.Tensor] = []
        if stage == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=told)
        dist.all_reduce(words.grad, group=along)
        for parameter in mine.parameters():
            dist.all_reduce(parameter.grad, group=across)
            parameter.grad /= PIPELINES
        optimizer.step()
        if stage == 1:
            loss = torch.stack(told).mean().double()
            dist.all_reduce(loss, group=across)
            losses.append(float(loss) / PIPELINES)
    if number == 0:
        base = 0 if stage == 0 else CUT
        named = {}
        for name, value in mine.state_dict().items():
            layer, _, rest = name.partition(".")
            named[f"{int(layer) + base}.{rest}"] = value
        torch.save((named, losses), Path(folder) / f"torch-{stage}.pt")
    dist.destroy_process_group()
