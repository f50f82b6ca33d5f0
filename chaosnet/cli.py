"""`chaosnet`: run a script as a node, look at a cluster, change it.

Nothing here imports torch before a script does. Errors are one line: exit code 2 for wrong usage (of `run`
also for whatever the same command would end with again), 1 for what failed, 130 for Ctrl+C.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from importlib import metadata
from typing import NoReturn

import click

from .commands.bench import bench
from .commands.checkpoints import checkpoints
from .commands.dashboard import dashboard
from .commands.groups import Unsorted
from .commands.keys import allow, invite, keygen, revoke
from .commands.launch import launch
from .commands.members import go_on, leave, link, relayout
from .commands.plan import plan, simulate_training
from .commands.run import run
from .commands.simulate import simulate
from .commands.status import status
from .commands.top import top
from .commands.trials import demo, soak, testbed
from .protocols.errors import ChaosnetError
from .script.exit_event import obey_as_first_process
from .settings.options import Expecting

COMMON = {"help_option_names": ["-h", "--help"]}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main() -> NoReturn:
    """Entry point of the `chaosnet` command."""
    obey_as_first_process()
    try:
        cli.main(prog_name="chaosnet", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message())
        sys.exit(2)
    except click.UsageError as error:
        _fail(_usage_line(error), 2)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except ChaosnetError as error:
        _fail(str(error), 1)
    except click.exceptions.Exit as ending:
        sys.exit(ending.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _drop_what_is_not_printed()
        _fail(f"cannot write {error.filename or 'the output'}: {error.strerror}", 1)
    sys.exit(0)


def _drop_what_is_not_printed() -> None:
    """Else Python tries once more when it ends, and shows a traceback."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _fail(line: str, code: int) -> NoReturn:
    click.echo(f"error: {line}", err=True)
    sys.exit(code)


def _usage_line(error: click.UsageError) -> str:
    """Name the option, the value given, what was expected."""
    match error:
        case click.MissingParameter(param=click.Parameter() as param):
            return f"{_name_of(param)}: missing (expected {_expected(param)})"
        case click.BadParameter(param=click.Parameter() as param):
            return f"{_name_of(param)}: {error.message}"
        case click.NoSuchOption():
            return f"{error.option_name}: no such option{_did_you_mean(error)}"
        case click.BadOptionUsage():
            return f"{error.option_name}: {_without_name(error)}"
    where = f"{error.ctx.command_path}: " if error.ctx else ""
    return f"{where}{error.format_message().rstrip('.')}"


def _without_name(error: click.BadOptionUsage) -> str:
    """Click's own text repeats the option."""
    return error.message.replace(f"Option {error.option_name!r} ", "").rstrip(".")


def _name_of(param: click.Parameter) -> str:
    return (
        max(param.opts, key=len)
        if isinstance(param, click.Option)
        else str(param.make_metavar(_context())).strip("[]")
    )


def _expected(param: click.Parameter) -> str:
    kind = param.type
    return kind.expected if isinstance(kind, Expecting) else kind.name


def _did_you_mean(error: click.NoSuchOption) -> str:
    return f" (did you mean {', '.join(sorted(error.possibilities))}?)" if error.possibilities else ""


def _context() -> click.Context:
    return click.get_current_context(silent=True) or click.Context(cli)


@click.group(cls=Unsorted, context_settings=COMMON)
@click.version_option(metadata.version("chaosnet"), "-V", "--version", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train a PyTorch model on machines that come and go.

    \b
    chaosnet demo                                                       see it work, here and now
    chaosnet keygen                                                     once; copy its file to the others
    chaosnet run --listen 10.0.0.1:5555 train.py                        first node: starts a cluster
    chaosnet run --listen 10.0.0.2:5555 --join 10.0.0.1:5555 train.py   every other node, at any time
    chaosnet run --cluster lab train.py                                 or so, on each machine of a local network
    chaosnet launch --hosts hosts.txt train.py                          or on all machines of a file, over ssh
    chaosnet status                                                     ask this machine's node, or any: HOST:PORT
    chaosnet top 10.0.0.1:5555                                          watch
    """
    if ctx.invoked_subcommand != run.name:  # Scripts print as they would without us.
        _print_what_can_be_printed()


def _print_what_can_be_printed() -> None:
    """A terminal's encoding may lack what a node's name has: then "?" is shown. The standard error does the like."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and (out.errors == "strict" or out.encoding.lower() != "utf-8"):
        out.reconfigure(errors="replace")  # By the locale "C" Python has ASCII and "surrogateescape".


for command in (
    run, launch, status, top, dashboard, leave, go_on, relayout, link, checkpoints, keygen, invite, allow, revoke,
    demo, soak, testbed, bench, plan, simulate_training, simulate,
):  # fmt: skip
    cli.add_command(command)
