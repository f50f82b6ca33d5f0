"""`chaosnet launch`: one script on several hosts, over ssh."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any, TextIO

import click

from ..protocols.errors import ConfigError
from ..settings.options import Amount, Expecting
from .node_lines import NodeLines
from .node_options import as_environment, node_options_but

# Settings without an option here: a launch decides them for each node, or hosts must not share them.
DECIDED = (
    "listen", "join", "cluster_name", "found", "new", "name", "links", "allowed_keys", "key", "dashboard",
    "resume_from",
)  # fmt: skip


class Environment(Expecting):
    """A variable for the script, as (name, value)."""

    name = "NAME[=VALUE]"
    expected = "NAME=VALUE; or NAME, with the value that it has here"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not name.isidentifier():
            self.refuse(value, "names no variable", param, ctx)
        if not equals and name not in os.environ:
            self.refuse(value, "is not set here", param, ctx)
        return name, text if equals else os.environ[name]


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Run a script on several machines, over ssh.",
)
@click.option(
    "--hosts", "hosts_file", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A host a line: [USER@]HOST [address=ADDRESS] [port=5555] [slots=1].",
)  # fmt: skip
@click.option("--ssh", default="ssh", show_default=True, help='With options, e.g. "ssh -p 2222 -i KEYFILE".')
@click.option(
    "--python",
    default=sys.executable,
    help="On the hosts, with chaosnet installed. Default: where it is here.",
)
@click.option("--workdir", help="On the hosts: the script is seen from it. Default: where you are here.")
@click.option("--env", type=Environment(), multiple=True, help="Of the script; may be repeated.")
@click.option(
    "--grace", "grace_s", type=Amount(0, 86400), default=60, show_default=True,
    help="Seconds that members have to leave once a host has lost this command; then they are killed.",
)  # fmt: skip
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as for `python -m`.")
@node_options_but(*DECIDED)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(
    hosts_file: Path, ssh: str, python: str, workdir: str | None, env: tuple[tuple[str, str], ...],
    grace_s: float, module: bool, script: str, args: tuple[str, ...], **given: Any,
) -> None:  # fmt: skip
    """Run SCRIPT, which is on all hosts, as the members of one cluster.

    \b
    chaosnet launch --hosts hosts.txt train.py
    chaosnet launch --hosts hosts.txt --ssh "ssh -p 2222" --python venv/bin/python --workdir job train.py --lr 0.1

    Ctrl+C once: all leave after their step. Twice: all are killed. The other options are those of `chaosnet run`.
    """
    from ..identity import identity
    from ..launching.hosts import parse_hosts
    from ..launching.launcher import ME, Job, workdir_here
    from ..launching.launcher import launch as start

    try:
        hosts = parse_hosts(hosts_file.read_text("utf-8-sig"), str(hosts_file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hosts: {hosts_file} cannot be read: {error}") from None
    keys = None if given["insecure"] else identity()
    job = Job(
        ssh=_words(ssh),
        python=python,
        workdir=workdir or workdir_here(),
        run=(*(("-m",) if module else ()), script, *args),
        env={**as_environment(given), **dict(env)},
        key=keys.public if keys else "",
        grace_s=grace_s,
    )
    lines = NodeLines([ME, *(member for host in hosts for member in host.members)])

    def tell(who: str, line: bytes, to: TextIO) -> None:
        with contextlib.suppress(OSError):  # The terminal may have gone.
            lines.tell(who, line, to)

    raise SystemExit(start(hosts, job, tell))


def _words(ssh: str) -> tuple[str, ...]:
    try:
        found = tuple(shlex.split(ssh))
    except ValueError:
        found = ()
    if not found:
        raise click.BadOptionUsage("--ssh", f"{ssh!r} is no command (expected e.g. 'ssh -p 2222')")
    return found
