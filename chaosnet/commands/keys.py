"""Who may join: `chaosnet keygen`, `invite`, `allow`, `revoke`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from ..protocols.errors import ConfigError
from ..settings.options import Address, File, PublicKey, Whole
from .addresses import of_cluster, of_node_and
from .node_options import keyed


@click.command(short_help="Make a key for this machine's nodes.")
@click.option("--out", type=File(), help="Default: the user's own key file.")
@click.option("--force", is_flag=True, help="Replace a key that is there.")
def keygen(out: str | None, force: bool) -> None:
    """Make a key pair, keep it in a file that only this user can read, and print the public key."""
    from ..identity import default_file
    from ..node.keys import KeyPair, save

    pair, file = KeyPair.new(), Path(out) if out else default_file()
    save(pair, file, force)
    click.echo(f"kept in {file}; its public key:", err=True)
    click.echo(pair.public)


@click.command(short_help="Let one more node in, once.")
@of_cluster
@click.option("--minutes", type=Whole(1, 7 * 24 * 60), default=10, show_default=True, help="Then it expires.")
@click.option(
    "--at", type=Address(), help="Where the node is to look for the cluster. Default: as members say."
)
@keyed
def invite(address: str, minutes: int, at: str | None) -> None:
    """Print a token that lets one node into the cluster of the node at ADDRESS (default: that of this machine):

    \b
    chaosnet run --listen 0.0.0.0:5555 --join TOKEN train.py
    """
    from ..invite import make

    token = make(address, minutes * 60.0, at)
    use = "chaosnet run --listen HOST:PORT --join TOKEN SCRIPT"
    click.echo(f"good for one node, for {minutes} minutes: {use}", err=True)
    click.echo(token)


@click.command(short_help="Let a key in.")
@of_node_and("KEY", PublicKey())
@keyed
def allow(both: tuple[str, str]) -> None:
    """Let the holder of KEY, a public one, into the cluster of the node at ADDRESS (default: this machine's)."""
    _command_key("allow", *both)


@click.command(short_help="Throw a key out, for good.")
@of_node_and("KEY", PublicKey())
@keyed
def revoke(both: tuple[str, str]) -> None:
    """Shut KEY out of the cluster of the node at ADDRESS (default: this machine's).

    A member that uses it is expelled.
    """
    _command_key("revoke", *both)


def _command_key(verb: Literal["allow", "revoke"], address: str, key: str) -> None:
    from .. import client

    answer = client.command_key(address, verb, key)
    if not answer.ok:
        raise ConfigError(f"{verb} {key}: {answer.text}")
    click.echo(answer.text)
