"""A member has joined through a forwarded port, as of `ssh -L`: an end of the tunnel that dies is no node's death."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lan import Machines, needs_namespaces

pytestmark = [pytest.mark.realtime, needs_namespaces]

SCRIPT = Path(__file__).parents[2] / "examples" / "endless.py"
FORWARD = """
import asyncio, sys
async def pump(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
async def link(reader, writer):
    there = sys.argv[2]
    if "/" in there:
        their_reader, their_writer = await asyncio.open_unix_connection(there)
    else:
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", int(there))
    await asyncio.gather(pump(reader, their_writer), pump(their_reader, writer))
async def main():
    here = sys.argv[1]
    if "/" in here:
        server = await asyncio.start_unix_server(link, here)
    else:
        server = await asyncio.start_server(link, "127.0.0.1", int(here))
    await server.serve_forever()
asyncio.run(main())
"""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Two that have nothing in common but a file, which the tunnel goes through."""
    machines = Machines(tmp_path)
    try:
        machines.add("a")
        machines.add("b")
        yield machines
    finally:
        machines.down()


def forward(machines: Machines, machine: str, here: str, there: str) -> subprocess.Popen[bytes]:
    """What connects to `here` on a machine gets to `there`: a port, or a socket's file."""
    log = machines.log(f"forward-{machine}").open("wb")
    return subprocess.Popen(machines.inside(machine, sys.executable, "-c", FORWARD, here, there), stderr=log)


@pytest.mark.slow
def test_an_end_of_a_tunnel_that_refuses_is_no_proof_and_its_return_heals(
    machines: Machines, tmp_path: Path
) -> None:
    tunnel = str(tmp_path / "tunnel")
    forward(machines, "a", tunnel, "5555")
    near = forward(machines, "b", "5555", tunnel)
    machines.node("a", "--listen", "127.0.0.1:5555", script=SCRIPT)
    machines.says("a", "a founds a cluster")
    machines.node("b", "--listen", "127.0.0.1:5556", "--join", "127.0.0.1:5555", script=SCRIPT)
    machines.says("a", "b joins: now 2 members")
    near.kill()
    near.wait()
    machines.says("a", "b is lost")  # The senior of two goes on; the junior waits.
    machines.says("b", "waiting: only 1 of 2 members can be reached")
    forward(machines, "b", "5555", tunnel)
    machines.says("b", "b is in again at step")
    machines.until(
        lambda: machines.log("a").read_text().count("b joins: now 2 members") == 2, "a has b again"
    )
    machines.says("b", "going on")
    assert "elected" not in machines.log("b").read_text(), machines.story()
