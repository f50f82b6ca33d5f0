"""`chaosnet.launching.launcher`: what comes over ssh, line by line."""

import asyncio
import sys

import pytest

from chaosnet.launching.hosts import parse_hosts
from chaosnet.launching.launcher import Job, Remote
from chaosnet.launching.orders import MARK, MAX_LINE, VERSION, LaunchReady, encoded

pytestmark = pytest.mark.realtime

LONG = 3 * MAX_LINE


def connected(tmp_path, script):
    """To a host whose ssh is this script. Returns: why it is left out, and what was told of it."""
    ssh, told = tmp_path / "ssh.py", []
    ssh.write_text(f"import sys, os\n{script}")
    host = parse_hosts("n1 address=10.0.0.1\n", "hosts")[0]
    job = Job((sys.executable, str(ssh)), "python", "/tmp", ("train.py",), {}, "", 1.0)

    async def run():
        remote = Remote(host, job, lambda who, line, to: told.append(line))
        try:
            return await remote.connect()
        finally:
            await remote.close()

    return asyncio.run(run()), told


def test_a_line_of_ssh_that_is_too_long_keeps_nobody_from_reading_the_next(tmp_path):
    """Nobody read on, so ssh, which went on writing, never ended."""
    why, _ = connected(tmp_path, f"sys.stderr.write('x' * {LONG} + '\\nno route to host\\n'); sys.exit(7)")
    assert why == "no route to host"


def test_a_line_of_a_login_that_is_too_long_is_passed_on_and_the_answer_behind_it_heard(tmp_path):
    """It was taken for the end of the connection."""
    answer = MARK + encoded(LaunchReady(VERSION, key="k"))
    why, told = connected(
        tmp_path,
        f"sys.stdout.write('x' * {LONG} + '\\n'); sys.stdout.flush()\n"
        f"os.write(1, {answer!r}); sys.stdin.read()",
    )
    assert why == ""
    assert sum(map(len, told)) == LONG + 1
