"""examples/slurm/train.sbatch under Slurm itself: a controller and three nodes, each a namespace with its own name.

Needs root, and what `make testbed-slurm` installs.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from lan import Machines, needs_namespaces

ROOT = Path(__file__).parents[2]
NODES = {"gpu1": "10.97.0.1", "gpu2": "10.97.0.2", "gpu3": "10.97.0.3"}
HEAD = "10.97.0.254"
PATIENCE_S = 300.0
missing = [each for each in ("slurmctld", "slurmd", "munged") if shutil.which(each) is None]
pytestmark = [
    pytest.mark.realtime,
    pytest.mark.slow,
    needs_namespaces,
    pytest.mark.skipif(
        bool(missing), reason=f"no {', '.join(missing)} here (make testbed-slurm installs it)"
    ),
]

# Processes of a job are found by their parents, since namespaces have no cgroups of their own.
CONF = """
ClusterName=trial
SlurmctldHost=head({head})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ReturnToService=2
SchedulerParameters=sched_interval=5
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster of it. Commands are given on the head."""

    def __init__(self, machines: Machines) -> None:
        self.machines, self.folder = machines, machines.folder
        self.env = {
            **os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "CHAOSNET_INSECURE": "1",
            "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip
        hosts = [f"{address} {name}\n" for name, address in {**NODES, "head": HEAD}.items()]
        (self.folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *hosts]))
        nodes = "\n".join(f"NodeName={name} NodeAddr={address} CPUs=2" for name, address in NODES.items())
        (self.folder / "slurm.conf").write_text(CONF.format(head=HEAD, folder=self.folder, nodes=nodes))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        (self.folder / "state").mkdir()
        for name in NODES:
            (self.folder / f"spool-{name}").mkdir()

    def start(self) -> None:
        at = self.folder
        files = [f"--{what}-file={at / f'munge.{what}'}" for what in ("key", "log", "pid", "seed")]
        self._daemon("head", "munged", "--foreground", "--force", f"--socket={at / 'munge.sock'}", *files)
        self.until(lambda: (at / "munge.sock").exists(), "munge is there")
        self._daemon("head", "slurmctld", "-D")
        for name in NODES:
            self._daemon(name, "slurmd", "-D")
        self.until(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == "3", "three nodes are idle")

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            self._there("head", *command), env=self.env, cwd=self.folder, capture_output=True, text=True, check=False
        )  # fmt: skip
        return done.stdout.strip()

    def submit(self, *words: str) -> str:
        """Returns: the job's number."""
        return self.ask("sbatch", "--parsable", "--output=job-%j.txt", *words)

    def printed(self, job: str) -> str:
        file = self.folder / f"job-{job}.txt"
        return file.read_text() if file.exists() else ""

    def says(self, job: str, text: str, times: int = 1) -> None:
        self.until(lambda: self.printed(job).count(text) >= times, f"job {job} says {text!r} {times} times")

    def until(self, happened: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not happened():
            files = [*self.folder.glob("job-*.txt"), *self.folder.glob("*.log")]
            story = "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in files)
            assert time.monotonic() < deadline_s, f"not in {PATIENCE_S:g} s: {what}\n{story}"
            time.sleep(0.2)

    def _daemon(self, machine: str, *command: str) -> None:
        name = f"{machine}-{command[0]}"
        with (self.folder / f"{name}.log").open("wb") as out:
            self.machines.processes[name] = subprocess.Popen(
                self._there(machine, *command), env=self.env, cwd=self.folder, stdout=out, stderr=out
            )

    def _there(self, machine: str, *command: str) -> list[str]:
        inside = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
        words = ("unshare", "--uts", "sh", "-c", inside, str(self.folder / "hosts"), machine, *command)
        return self.machines.inside(machine, *words)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    machines = Machines(tmp_path)
    try:
        machines.switch("sw")
        for name, address in {**NODES, "head": HEAD}.items():
            machines.add(name)
            machines.wire(name, "sw", f"{address}/24")
        slurm = Slurm(machines)
        slurm.start()
        yield slurm
    finally:
        machines.down()


def members(name: str) -> list[psutil.Process]:
    """Processes of that member, the first of them the one that trains."""

    def is_one(process: psutil.Process) -> bool:
        try:
            return process.environ().get("CHAOSNET_NAME") == name and "endless.py" in " ".join(
                process.cmdline()
            )
        except psutil.Error:
            return False

    return sorted(filter(is_one, psutil.process_iter()), key=lambda process: process.pid)


def test_members_of_a_job_outlive_one_leave_before_the_time_is_over_and_the_next_job_goes_on(slurm):
    script = ROOT / "examples" / "slurm" / "train.sbatch"
    words = ["--nodes=3", str(script), str(ROOT / "examples" / "endless.py")]
    # Slurm signals up to a minute earlier than asked.
    first = slurm.submit("--time=3", "--signal=INT@60", *words)
    slurm.says(first, "joined at step", 3)
    slurm.says(first, "now 3 members")
    assert slurm.printed(first).count("founds a cluster; join") == 1
    members("gpu2-0")[0].send_signal(signal.SIGKILL)
    slurm.says(first, "gpu2-0 is lost")
    slurm.until(lambda: slurm.ask("squeue", "-h", "-j", first) == "", "it ends before its time is over")
    assert slurm.printed(first).count("leaves after step") == 2, slurm.printed(first)
    written = re.findall(r"newest checkpoint: step ([\d,]+)", slurm.printed(first))
    assert written, slurm.printed(first)
    second = slurm.submit("--time=5", *words)
    slurm.says(second, "joined at step", 3)
    began = {int(step) for step in re.findall(r"joined at step (\d+)", slurm.printed(second))}
    assert min(began) >= int(written[-1].replace(",", "")), slurm.printed(second)
    slurm.ask("scancel", second)
