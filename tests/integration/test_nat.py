"""Members behind two routers that translate addresses (NAT) can only dial out. They train with one that all reach."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lan import CHAOSNET, Machines, needs_namespaces

from chaosnet.netem.netns import run

pytestmark = [pytest.mark.realtime, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "examples" / "endless.py"
PUBLIC, HOMES = "203.0.113.1", ("x", "y")


@pytest.fixture
def internet(tmp_path: Path) -> Iterator[Machines]:
    """A public machine p, and two homes whose machines have the same address behind routers that masquerade."""
    machines = Machines(tmp_path)
    try:
        machines.switch("net")
        machines.add("p")
        machines.wire("p", "net", f"{PUBLIC}/24")
        for number, home in enumerate(HOMES, 2):
            router = f"r{home}"
            machines.switch(f"lan{home}")
            for each in (home, router):
                machines.add(each)
            machines.wire(home, f"lan{home}", "192.168.1.2/24")
            machines.wire(router, f"lan{home}", "192.168.1.1/24")
            outside = machines.wire(router, "net", f"203.0.113.{number}/24")
            run(tuple(machines.inside(home, "ip", "route", "add", "default", "via", "192.168.1.1")))
            for words in (
                "sysctl -qw net.ipv4.ip_forward=1",
                f"iptables -t nat -A POSTROUTING -o {outside} -j MASQUERADE",
                f"iptables -A FORWARD -i {outside} -m conntrack --ctstate NEW -j DROP",
            ):
                run(tuple(machines.inside(router, *words.split())))
        yield machines
    finally:
        machines.down()


def of_the_page() -> tuple[list[str], list[str]]:
    """The options of the commands in docs/launch.md: of the public machine, and of one at home."""
    page = (SCRIPT.parents[1] / "docs" / "launch.md").read_text().split("## Networks behind routers")[1]
    commands = [
        shlex.split(line, comments=True)[2:-1]
        for line in page.split("\n## ")[0].splitlines()
        if line.startswith("    chaosnet run ")
    ]
    public, home = commands
    assert "--join" not in public and f"{PUBLIC}:5555" in home
    return public, home


@needs_namespaces
@pytest.mark.skipif(shutil.which("iptables") is None, reason="needs iptables")
def test_members_that_can_only_dial_train_with_each_other_by_way_of_one_that_all_reach(
    internet: Machines,
) -> None:
    public, home = of_the_page()
    users = {
        machine: {"XDG_CONFIG_HOME": str(internet.folder / f"user-{machine}")} for machine in ("p", *HOMES)
    }
    keygen = [*CHAOSNET, "keygen"]
    subprocess.run(keygen, env={**os.environ, **users["p"]}, check=True, capture_output=True)
    for machine in HOMES:  # "copy its file to your other machines"
        shutil.copytree(users["p"]["XDG_CONFIG_HOME"], users[machine]["XDG_CONFIG_HOME"])
    internet.node("p", *public, script=SCRIPT, env=users["p"])
    internet.says("p", "p founds a cluster; join")
    for machine in HOMES:
        internet.node(machine, *home, script=SCRIPT, env=users[machine])
    internet.says("p", "now 3 members, 2 links")
    status = internet.inside(HOMES[0], *CHAOSNET, "status", f"{PUBLIC}:5555")
    without_key = {"XDG_CONFIG_HOME": str(internet.folder / "nobody")}
    codes = [
        subprocess.run(status, env={**os.environ, **user}, check=False, capture_output=True).returncode
        for user in (users[HOMES[0]], without_key)
    ]
    assert codes == [0, 1], "who has the key is answered, also from a home"
    for machine in ("p", *HOMES):
        internet.until(lambda machine=machine: states(internet, machine), f"{machine} trains")
    internet.until(
        lambda: set.intersection(*({*states(internet, each)} for each in ("p", *HOMES))),
        "all have a step in common",
    )
    common = set.intersection(*({*states(internet, each).items()} for each in ("p", *HOMES)))
    assert common, f"for one step all hold the same state\n{internet.story()}"


def states(machines: Machines, machine: str) -> dict[str, str]:
    """By step, as its script prints them."""
    lines = [
        line.split() for line in machines.log(machine).read_text().splitlines() if line.startswith("step ")
    ]
    return {words[1]: words[-1] for words in lines if len(words) == 6}
