"""`chaosnet.client`, asked where nobody answers."""

import asyncio

import pytest

from chaosnet import client
from chaosnet.protocols.errors import PeerUnreachable


def test_it_can_be_asked_where_a_loop_runs_already():
    """As in a notebook."""

    async def cell():
        with pytest.raises(PeerUnreachable):
            client.status("127.0.0.1:1", 0.3, keys=None)

    asyncio.run(cell())
