"""`chaosnet dashboard`: the cluster as a page in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..extras import demand
from ..node.endpoint import Endpoint
from ..protocols.errors import CannotListen, ConfigError
from ..settings.options import Address, File, ListenAt
from .addresses import member_here
from .node_options import keyed

if TYPE_CHECKING:
    from ..page.feed import Feed
    from ..page.server import PageServer

USUAL_PORT = 8088  # Of the page without --listen; if it is taken, any free one.


@click.command(short_help="Show a running cluster in a browser.")
@click.argument("address", type=Address(), required=False)
@keyed
@click.option("--listen", type=ListenAt(), help=f"Where to serve the page. Default: 127.0.0.1:{USUAL_PORT}.")
@click.option(
    "--allow-actions", is_flag=True,
    help="The page may have nodes leave, change links and invite, for who has the address that is printed.",
)  # fmt: skip
@click.option("--file", type=File(), help="Show what `chaosnet status --json --history` has printed instead.")
@click.pass_context
def dashboard(
    ctx: click.Context, address: str | None, listen: str | None, allow_actions: bool, file: str | None
) -> None:
    """Serve a page that shows the cluster of the node at ADDRESS, until Ctrl+C; /metrics is for Prometheus.

    Default: the node of yours that runs on this machine. If that node dies, other members are asked. The page changes
    nothing in the cluster, unless --allow-actions says that it may; then it is served on this machine only.
    """
    demand("dashboard", "chaosnet dashboard")
    if address is not None and file is not None:
        raise click.UsageError("ADDRESS and --file: both (expected one)")
    if allow_actions and file is not None:
        raise click.UsageError(
            "--allow-actions beside --file, in which nothing can be changed (expected one)"
        )
    from ..page.of_node import opened_to

    if file is None:
        address = address or member_here(ctx)
    server = _server(_of_file(file) if file else _of_cluster(str(address)), listen, allow_actions)
    try:
        click.echo(f"{file or f'the cluster of {address}'}: {server.url_with_token} (Ctrl+C ends the page)")
        if allow_actions:
            click.echo(
                "note: whoever has this address can have nodes leave, change links and invite, "
                "until this page ends"
            )
        if warning := opened_to(Endpoint.parse(listen or "127.0.0.1:0")):
            click.echo(f"note: {warning}")
        server.run()
    except KeyboardInterrupt:
        return  # That is how it ends.


def _of_cluster(address: str) -> Feed:
    from ..identity import identity
    from ..page.feed import of_cluster

    identity()  # A key that cannot be used is told here, too, and not only on the page.
    return of_cluster(lambda: address)


def _of_file(file: str) -> Feed:
    from ..page.feed import of_status
    from ..protocols.errors import MalformedMessage, VersionMismatch
    from ..protocols.status import from_json

    try:
        return of_status(from_json(Path(file).read_bytes()), file)
    except OSError as error:
        raise ConfigError(f"--file: {file!r} cannot be read: {error.strerror}") from None
    except (MalformedMessage, VersionMismatch) as error:
        raise ConfigError(
            f"--file: {file!r}: {error} (expected what `chaosnet status --json --history` prints)"
        ) from None


def _server(feed: Feed, listen: str | None, with_actions: bool) -> PageServer:
    from ..page.of_node import server_of

    if listen is not None:
        place = Endpoint.parse(listen)
        return server_of(feed, place.host, place.port, "--listen", with_actions)
    try:
        return server_of(feed, "127.0.0.1", USUAL_PORT, "--listen", with_actions)
    except CannotListen:
        return server_of(feed, "127.0.0.1", 0, "--listen", with_actions)
