"""A crowd that comes at once is let in within few turns of the event loop."""

from __future__ import annotations

import asyncio
import socket

import uvloop

from taut_service.http.server import ACCEPTS, listen, watched_often

CROWD = 10 * ACCEPTS


class Door(asyncio.Protocol):
    """Counts who came in."""

    def __init__(self, entered: list[Door]) -> None:
        entered.append(self)


async def turns_until_all_are_in(listeners: list[socket.socket]) -> int:
    """Return how many turns the loop takes to accept everybody in the backlog."""
    loop = asyncio.get_running_loop()
    entered: list[Door] = []
    servers = [
        await loop.create_server(lambda: Door(entered), sock=listener) for listener in listeners
    ]
    turns = 0
    async with asyncio.timeout(20):
        while len(entered) < CROWD:
            turns += 1
            await asyncio.sleep(0)
    for server in servers:
        server.close()
    return turns


def test_a_crowd_is_let_in_sixteen_a_turn() -> None:
    listeners = watched_often([listen("127.0.0.1", 0)])
    address = listeners[0].getsockname()
    crowd = [socket.create_connection(address) for _ in range(CROWD)]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        turns = runner.run(turns_until_all_are_in(listeners))
    for visitor in crowd:
        visitor.close()
    # One a turn without the duplicates; a few turns go by before a connection is made.
    assert turns < CROWD / 4


def test_nothing_listens_once_all_are_closed() -> None:
    listeners = watched_often([listen("127.0.0.1", 0)])
    address = listeners[0].getsockname()
    assert len(listeners) == ACCEPTS
    for listener in listeners:
        listener.close()
    with socket.socket() as visitor:
        assert visitor.connect_ex(address) != 0
