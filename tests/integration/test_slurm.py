"""examples/slurm/train.sbatch, over a `srun` and a `scontrol` that stand for Slurm's: two nodes, three tasks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lan import PATIENCE_S, Machines, needs_namespaces

pytestmark = [pytest.mark.realtime, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
HOSTS = {"a": "10.97.0.1", "b": "10.97.0.2"}
TASKS = ("a", "a", "b")
SCONTROL = """#!{python}
import sys
assert sys.argv[1:] == ["show", "hostnames", "node[a-b]"], sys.argv
print("10.97.0.1\\n10.97.0.2")
"""
# Starts tasks with what srun adds to the environment, each the leader of a group that signals go to.
SRUN = """#!{python}
import os, signal, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
tasks = []
def pass_on(number, frame):
    for task in tasks:
        if task.poll() is None:
            os.killpg(task.pid, number)
signal.signal(signal.SIGINT, pass_on)
for rank, node in enumerate({tasks}):
    local = {tasks}[:rank].count(node)
    env = {{"SLURM_PROCID": rank, "SLURM_LOCALID": local, "SLURM_STEP_NUM_TASKS": {count}, "SLURMD_NODENAME": node}}
    with open(f"task-{{rank}}", "wb") as out:
        tasks.append(subprocess.Popen(
            ["ip", "netns", "exec", "{prefix}" + node, *words], stdout=out, stderr=out, start_new_session=True,
            env={{**os.environ, **{{key: str(value) for key, value in env.items()}}}},
        ))
    open(f"pid-{{rank}}", "w").write(str(tasks[-1].pid))
sys.exit(max(abs(task.wait()) for task in tasks))
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path)
    try:
        machines.switch("sw")
        for name, address in HOSTS.items():
            machines.add(name)
            machines.wire(name, "sw", f"{address}/24")
        programs = tmp_path / "bin"
        programs.mkdir()
        here = {"python": sys.executable, "tasks": TASKS, "count": len(TASKS), "prefix": machines.prefix}
        for program, text in (("scontrol", SCONTROL), ("srun", SRUN)):
            (programs / program).write_text(text.format(**here))
            (programs / program).chmod(0o755)
        yield machines
    finally:
        machines.down()


@needs_namespaces
def test_tasks_of_a_job_are_members_that_outlive_each_other_and_leave_before_the_time_is_over(
    nodes: Machines,
) -> None:
    folder, script = nodes.folder, ROOT / "examples" / "endless.py"
    paths = (folder / "bin", Path(sys.executable).parent, os.environ["PATH"])
    env = {
        **os.environ, "PATH": os.pathsep.join(map(str, paths)), "SLURM_JOB_NODELIST": "node[a-b]",
        "CHAOSNET_INSECURE": "1", "CHAOSNET_STATE_DIR": str(folder), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = ["bash", str(ROOT / "examples" / "slurm" / "train.sbatch"), str(script)]
    with nodes.log("job").open("wb") as out:
        job = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out, start_new_session=True)
    nodes.processes["job"] = job
    logs = [folder / f"task-{rank}" for rank in range(len(TASKS))]

    def all_say(text: str, *ranks: int) -> None:
        for rank in ranks:
            nodes.until(
                lambda log=logs[rank]: log.exists() and text in log.read_text(), f"task {rank} says {text!r}"
            )

    try:
        all_say("joined at step", 0, 1, 2)
        assert "a-0 founds a cluster" in logs[0].read_text(), "the first one that is there founds"
        all_say("now 3 members", 0)
        all_say("step    100", 0, 1, 2)
        os.kill(int((folder / "pid-0").read_text()), signal.SIGKILL)
        all_say("a-0 is lost", 1, 2)
        assert job.poll() is None, "the others go on"
        os.killpg(job.pid, signal.SIGINT)  # To bash, too, which waits for srun all the same.
        assert job.wait(PATIENCE_S) != 0, "one was killed"
        all_say("leaves after step", 1, 2)
        all_say("newest checkpoint: step", 1, 2)
    finally:
        job.kill()
        job.wait()
