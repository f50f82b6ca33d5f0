"""A node of the Chaos paper's experiments: it trains with a sleep per step, and obeys its parent.

Each line of its input is a command, answered with a line of its output; first comes what it is told to be, then the
word to begin. The state's bytes are real; computing is a sleep.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import client
from ..node.agent.core import Agent
from ..node.node_settings import NodeSettings
from ..node.session import Hooks, Session
from ..protocols.status import Status, to_json
from ..settings.groups import Cluster
from ..trainer import Trainer

REST_S = 0.02  # Between two empty steps of a node that must not train.
JOIN_PATIENCE_S = 120.0  # Until the founder has loaded torch and its checkpoint, on a busy machine.


class Sized(nn.Module):
    """So many bytes that are not trained, so many that are (by SGD), and a small head that is.

    Args:
        base: Of the bytes that are not trained; it is never written, so that nodes of a machine may share it.
    """

    def __init__(self, base: torch.Tensor, trained_bytes: int) -> None:
        super().__init__()
        self.base = nn.Parameter(base, requires_grad=False)
        self.grown = nn.Parameter(torch.full((max(trained_bytes // 4, 1),), 0.5))
        self.head = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) + self.grown[0]


class PlannedSession(Session):
    """Whose agent plans, and pulls, as a scheme says: these are no settings of a user's."""

    def __init__(self, told: Mapping[str, Any], settings: NodeSettings, hooks: Hooks) -> None:
        self._plans = told
        super().__init__(settings, hooks)

    def make_agent(self, addresses: tuple[str, ...], least_life: int) -> Agent:
        agent = super().make_agent(addresses, least_life)
        agent.settings.strategy, agent.settings.steals = self._plans["strategy"], self._plans["steals"]
        return agent


class Planned(Trainer):
    """A trainer with such a session."""

    def __init__(self, plans: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        self._plans = plans
        super().__init__(*args, **kwargs)

    def make_session(self, hooks: Hooks) -> Session:
        return PlannedSession(self._plans, self.settings, hooks)

    def plan_by(self, strategy: str) -> None:
        """From now on, if this node is the scheduler, or becomes it."""
        loop = self.session.loop

        def change() -> None:
            loop.agent.settings.strategy = strategy
            if loop.agent.scheduler:
                loop.agent.scheduler.joins.strategy = strategy

        loop.ask(change)


class ChaosWorker:
    """One node, from its membership on."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.told = told
        kept = torch.load(told["checkpoint"], weights_only=True) if told["checkpoint"] else None
        self.base = kept["base"] if kept else _base(told)
        self.model = Sized(torch.zeros(1) if told["outside"] else self.base, told["trained_bytes"])
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, 1e-3)
        if kept:
            self.model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
        self.x, self.y = torch.randn(64, 256), torch.randn(64, 64)
        self.trains = True
        self.times_s: list[float] = []  # At which a step was complete that this node has trained in.

    def begin(self) -> dict[str, Any]:
        """Become a member. Returns: when this was asked for, when it was so, and what came."""
        called_s = time.monotonic()
        told = self.told
        cluster = Cluster(
            join=told["join"], links=tuple(told["links"]), blocking=told["blocking"],
            join_patience_s=JOIN_PATIENCE_S, new=not told["join"],
        )  # fmt: skip
        self.trainer = Planned(told, self.model, self.optimizer, cluster=cluster, quiet=True)
        came = sum(self.trainer.join_bytes_by_source.values())
        member_s, phases = time.monotonic(), dict(self.trainer.join_phases)
        return {"called_s": called_s, "member_s": member_s, "bytes": came, "phases_s": phases}

    def step(self) -> None:
        """One, with this node's part in it, or (held up by a barrier) without."""
        if not self.trains:
            self.trainer.update(samples=0)
            time.sleep(REST_S)
            return
        nn.functional.mse_loss(self.model(self.x), self.y).backward()
        time.sleep(self.told["step_s"])
        self.trainer.update()
        self.trainer.check_state_replication()
        self.times_s.append(time.monotonic())

    def obey(self, command: Mapping[str, Any]) -> dict[str, Any] | None:
        """Between two steps. Returns: what to answer; None if that will be said later."""
        match command:
            case {"do": "plan", "strategy": strategy}:
                self.trainer.plan_by(strategy)
            case {"do": "train", "on": on}:
                self.trains = on
            case {"do": "status"}:
                return dict(json.loads(to_json(self.trainer.status(history=True))))
            case {"do": "link", "peer": peer, "connect": connect}:
                arguments = (self.trainer.status(), peer, connect)  # Beside training, which it waits for.
                threading.Thread(target=_change_link, args=arguments, daemon=True).start()
                return None
            case {"do": "save", "file": file}:
                save(Path(file), self.model, self.optimizer, self.base)
            case {"do": "leave"}:
                asked_s = time.monotonic()
                self.trainer.close()
                return {"times_s": self.times_s, "asked_s": asked_s, "done_s": time.monotonic()}
        return {"times_s": self.times_s}


def _change_link(status: Status, peer: str, connect: bool) -> None:
    """As `chaosnet link` does, and say how it went."""
    address = next(each.addresses[0] for each in status.members if each.node == status.node)
    asked_s = time.monotonic()
    answer = client.change_link(address, peer, connect)
    _say({"ok": answer.ok, "text": answer.text, "asked_s": asked_s, "done_s": time.monotonic()})


def _base(told: Mapping[str, Any]) -> torch.Tensor:
    """Memory that is really there: what all members share, or a joiner's own."""
    elements = max((told["bytes"] - told["trained_bytes"]) // 4, 1)
    if told["shared"]:
        return torch.from_file(told["shared"], shared=False, size=elements)
    return torch.full((elements,), 0.5)


def save(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, base: torch.Tensor) -> None:
    """A checkpoint, as of a job that is about to be stopped: on the disk when this returns, and only there."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "base": base}
    torch.save(state, file)
    with file.open("rb+") as written:
        os.fsync(written.fileno())
        # So that it is read from there, too.
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _say(what: Mapping[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def _told_now() -> dict[str, Any] | None:
    """A command, if there is one; the parent's end is one to leave."""
    if not select.select([sys.stdin], [], [], 0)[0]:
        return None
    line = sys.stdin.readline()
    command: dict[str, Any] = json.loads(line) if line else {"do": "leave"}
    return command


def serve() -> None:
    """Until told to leave."""
    torch.set_num_threads(1)
    worker = ChaosWorker(json.loads(sys.stdin.readline()))
    _say({})
    sys.stdin.readline()
    _say(worker.begin())
    while True:
        command = _told_now()
        if command is None:
            worker.step()
            continue
        answer = worker.obey(command)
        if answer is not None:
            _say(answer)
        if command["do"] == "leave":
            return


if __name__ == "__main__":
    serve()
