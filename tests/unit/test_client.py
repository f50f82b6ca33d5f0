"""`chaosnet.client`, asked where nobody answers."""

import asyncio

import pytest

from chaosnet import client
from chaosnet.protocols.errors import ConfigError, PeerUnreachable


def test_it_can_be_asked_where_a_loop_runs_already():
    """As in a notebook."""

    async def cell():
        with pytest.raises(PeerUnreachable):
            client.status("127.0.0.1:1", 0.3, keys=None)

    asyncio.run(cell())


def test_a_layout_that_is_too_long_for_a_message_is_refused_before_anybody_is_asked():
    with pytest.raises(ConfigError, match="expected stages of each pipeline"):
        client.relayout("127.0.0.1:1", "+".join(["1"] * 101), 0.3)
