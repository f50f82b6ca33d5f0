"""Options from the table of settings. They reach a Trainer, and clients, through the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

from ..settings.options import PeerName, PeerNames, Switch
from ..settings.table import SETTINGS, Setting

Command = Callable[..., None]

# Clients open no port, of which the setting's own help speaks.
WITHOUT_KEY = "Ask without a key, even if `chaosnet keygen` has made one."


def help_of(setting: Setting) -> str:
    """What `--help` says; with the default, if the option takes one value."""
    text = setting.option_help or setting.help
    if isinstance(setting.check, Switch | PeerNames) or not setting.shown_default:
        return text
    return f"{text} Default: {setting.shown_default}."


def option_of(setting: Setting, **how: Any) -> Callable[[Command], Command]:
    """The option of a setting, with its name for the parameter. `how`: more arguments of click.option."""
    several, flag = isinstance(setting.check, PeerNames), isinstance(setting.check, Switch)
    return click.option(
        setting.option,
        setting.name,
        type=None if flag else PeerName() if several else setting.check,
        is_flag=flag or None,  # False: a value that begins with "-" would be taken for an option.
        multiple=several,
        metavar=setting.metavar,
        **{"help": help_of(setting)} | how,
    )


def node_options(command: Command) -> Command:
    """Adds an option for each setting that has one."""
    return node_options_but()(command)


def keyed(command: Command) -> Command:
    """Adds --key and --insecure, which go into the environment and not to the command's function."""

    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        into_environment({str(param.name): value})

    how: dict[str, Any] = {"expose_value": False, "callback": keep}
    both = option_of(SETTINGS["key"], **how), option_of(SETTINGS["insecure"], help=WITHOUT_KEY, **how)
    return _with(command, both)


def node_options_but(*names: str) -> Callable[[Command], Command]:
    """Adds an option for each setting that has one, but for these."""
    settings = [each for each in SETTINGS.values() if each.option and each.name not in names]
    return lambda command: _with(command, map(option_of, settings))


def into_environment(given: Mapping[str, Any]) -> None:
    """Set the environment variables of these settings, which are given by name."""
    os.environ.update(as_environment(given))


def as_environment(given: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables, with text, that say the same as these settings, without those that are not set."""
    found = {}
    for name, value in given.items():
        setting = SETTINGS[name]
        if value is None or value is False or value in ("", ()):
            continue
        if value is True:
            text = "0" if setting.turns_off else "1"
        else:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
        found[setting.variable] = text
    return found


def _with(command: Command, options: Iterable[Callable[[Command], Command]]) -> Command:
    """Add options so that --help lists them in this order: click lists the one added last first."""
    for add in reversed([*options]):
        command = add(command)
    return command
