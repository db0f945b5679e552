"""Replies whose room in the arena others wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from npugrad.errors import ServerBusy
from npugrad.frames import Chunk
from npugrad_server.rpc.front_memory import FrontLimits, FrontMemory
from npugrad_server.rpc.rpc_call import RpcCall
from npugrad_server.rpc.unsent import UnsentReply

CONTENT = bytes(range(256)) * 4


class Ticket:
    """As much of one as a reply needs: results that are gone once it is closed."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(CONTENT))
        self.give_way: Any = None
        self.planned = SimpleNamespace(plan=SimpleNamespace(record=SimpleNamespace(name="operator")))
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        self.memory.release()

    def frames(self) -> Iterator[Chunk]:
        for start in range(0, len(CONTENT), 256):
            yield Chunk(0, start, self.memory[start : start + 256])


def room_for(nbytes: int) -> FrontMemory:
    """Memory of which results that are not taken may have so much: half of it."""
    return FrontMemory(FrontLimits(memory_bytes=2 * nbytes))


def reply(ticket: Any, room: FrontMemory, slow: bool = False) -> UnsentReply:
    context: Any = SimpleNamespace(time_remaining=lambda: None)
    call = RpcCall(context, "Execute", "1", memory=room)
    return UnsentReply(ticket.frames(), len(CONTENT), ticket, call, lambda error: ended(error, slow))


def ended(error: ServerBusy, slow: bool) -> bool:
    assert "operator: found its results unread" in str(error)
    return slow


async def rest(unsent: UnsentReply) -> bytes:
    found = b""
    while (frame := await unsent.next()) is not None:
        found += bytes(frame.data)
    return found


@pytest.mark.parametrize("sent", [0, 1, 3])
async def test_what_is_not_sent_leaves_the_arena_when_its_room_is_wanted(sent: int) -> None:
    ticket, room = Ticket(), room_for(len(CONTENT))
    with reply(ticket, room) as unsent:
        first = b"".join([bytes((await unsent.next()).data) for _ in range(sent)])
        assert ticket.give_way()
        assert ticket.give_way()  # it is under way
        assert room.used_bytes == len(CONTENT) - 256 * sent
        assert first + await rest(unsent) == CONTENT
        assert ticket.is_closed
    assert (room.used_bytes, ticket.give_way) == (0, None)


def test_its_memory_goes_back_when_the_call_ends() -> None:
    async def act() -> memoryview:
        ticket, room = Ticket(), room_for(len(CONTENT))
        with reply(ticket, room) as unsent:
            assert ticket.give_way()
            frame = await unsent.next()
            assert bytes(frame.data) == CONTENT[:256]
        data: memoryview = frame.data
        return data

    data = asyncio.run(act())  # which waits for threads
    with pytest.raises(ValueError, match="released"):
        bytes(data)


async def test_there_is_a_limit_to_it_beyond_which_the_slow_are_ended() -> None:
    ticket, room = Ticket(), room_for(len(CONTENT) - 1)
    with reply(ticket, room) as unsent:
        assert not ticket.give_way()
        assert await rest(unsent) == CONTENT
    with reply(ticket, room, slow=True):
        assert ticket.give_way()
    assert not ticket.is_closed
    assert room.used_bytes == 0


async def test_a_call_may_end_while_its_reply_moves() -> None:
    ticket, room = Ticket(), room_for(len(CONTENT))
    with reply(ticket, room):
        assert ticket.give_way()
    assert room.used_bytes == 0
