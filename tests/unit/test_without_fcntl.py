"""The command line where there is no `fcntl`, as on Windows."""

import subprocess
import sys

SCRIPT = """
import signal, sys
import chaosnet.cli, chaosnet.netem.relay  # What is not ours takes this system for what it is.
for name in [name for name in sys.modules if name.partition(".")[0] == "chaosnet"]:
    del sys.modules[name]
sys.modules["fcntl"] = None  # Importing it fails.
sys.platform = "win32"
del signal.SIGHUP
from chaosnet.cli import cli, main
import chaosnet.netem.relay
for command in cli.commands.values():
    command.get_help(command.make_context(command.name, ["x"], resilient_parsing=True))
sys.argv = ["chaosnet", "testbed", "status"]
main()
"""


def test_all_commands_tell_what_they_are_for_and_a_testbed_says_what_it_lacks():
    """It ended with a traceback of an import."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error: testbed: Windows has no locks that end with their process"), (
        ended.stderr
    )
