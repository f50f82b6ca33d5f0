"""Files that commands write when they end."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import click

from ..extras import demand

Command = TypeVar("Command", bound=Callable[..., Any])


class OutputFile(click.Path):
    """A file that a command writes at its end, perhaps after hours: whether it can is checked before it begins.

    Folders that lead to the file are made.
    """

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        try:
            if path.is_dir():  # As "" is: the folder that one is in. Raises for a name that is too long.
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path.parent))
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            self.fail(
                f"{os.fsdecode(value)!r} cannot be written: {why} (expected a file in a folder that is open to you)"
            )
        return path


class PictureFile(OutputFile):
    """A picture to be written; the ending of its name says of what kind."""

    ENDINGS: ClassVar = (".png", ".pdf", ".svg")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if Path(os.fsdecode(value)).suffix.lower() not in self.ENDINGS:
            self.fail(f"{os.fsdecode(value)!r} (expected a file that ends with {', '.join(self.ENDINGS)})")
        return super().convert(value, param, ctx)


def plot_option(name: str, help: str) -> Callable[[Command], Command]:
    """The option --plot FILE, as parameter `name`. Without the extra for plots, the command ends before it begins."""

    def look(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
        if value is not None:
            demand("plot", "--plot")
        return value

    return click.option("--plot", name, type=PictureFile(), callback=look, help=help)


json_option = click.option("--json", "json_file", type=OutputFile(), help="Write what was found.")


def write_json(file: Path | None, found: Any) -> None:
    """Write `found` as JSON; does nothing without a file."""
    if file is not None:
        file.write_text(json.dumps(found, indent=2) + "\n")
