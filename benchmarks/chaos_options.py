"""Options that the Chaos paper's commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from ..settings.options import Amount, OneOf, Several, Whole
from .chaos_models import PARAMETERS, STATES_BY_OPTIMIZER
from .figures import outputs

Option = Callable[[Any], Any]

shown = partial(click.option, show_default=True)
SEED = shown("--seed", type=Whole(0, 2**31), default=0, help="Of what is random, e.g. the (first) overlay.")
SCALE = shown("--scale", type=Amount(0.001, 100), default=1.0, help="Times all rates.")
MBIT = shown("--mbit", type=Amount(1, 10_000), default=200.0, help="Of the (fastest) link to the new node.")


def models(default: str) -> Option:
    """Several."""
    return shown(
        "--models", type=Several(OneOf(tuple(PARAMETERS))), default=default, help="Whose size states have."
    )


def model() -> Option:
    """One."""
    return shown(
        "--model", type=OneOf(tuple(PARAMETERS)), default="ResNet101", help="Whose size the state has."
    )


def optimizer(default: str) -> Option:
    """What is moved beside the weights."""
    kinds = tuple(STATES_BY_OPTIMIZER)
    return shown("--optimizer", type=OneOf(kinds), default=default, help="Whose numbers are moved, too.")


def members(least: int, default: str) -> Option:
    """Several sizes of the cluster."""
    return shown("--members", type=Several(Whole(least, 15)), default=default, help="Before the join.")


def repeat(default: int, of: str) -> Option:
    """How often."""
    return shown("--repeat", type=Whole(1, 100), default=default, help=of)


def step_s(default: float) -> Option:
    """Computing is a sleep."""
    return shown(
        "--step-s", type=Amount(0.001, 100), default=default, help="Of sleep in each step, for computing."
    )


def quick(text: str) -> Option:
    """Bytes may shrink only here, which is said."""
    return click.option("--quick", is_flag=True, help=f"{text}: only to see it run.")


def add(*options: Option) -> Option:
    """All of these, --json and --plot."""

    def to(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return outputs(command)

    return to
