"""What the front process holds: the sums, the bound, and who has to give way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from npugrad.codec import CHUNK_BYTES
from npugrad.errors import DeadlineExceeded, NpugradError, ServerBusy
from npugrad_server.config import LEAST_MESSAGE_BYTES
from npugrad_server.metrics import Metrics
from npugrad_server.pool.tenant import NOBODY, Tenant
from npugrad_server.rpc.front_memory import FrontLimits, FrontMemory
from npugrad_server.rpc.front_metrics import FrontCollector
from npugrad_server.rpc.rpc_call import RpcCall

MESSAGE = LEAST_MESSAGE_BYTES
LATER_S = 1e9


class Context:
    def time_remaining(self) -> float | None:
        return None

    def peer(self) -> str:
        return PEER


def call_of(memory: FrontMemory, *, stream: bool = False, tenant: Tenant = NOBODY) -> RpcCall:
    context: Any = Context()
    call = RpcCall(context, "Execute" if stream else "Unary", "1", tenant, memory=memory)
    if stream:
        call.is_slow = lambda: False
    return call


def room_for(messages: float) -> FrontMemory:
    return FrontMemory(FrontLimits(memory_bytes=int(messages * MESSAGE)))


def test_a_message_counts_as_the_largest_until_it_is_there_and_a_reply_twice_until_it_was_taken() -> None:
    memory = room_for(3)
    call = call_of(memory)
    assert memory.arrive(call, MESSAGE)
    assert (memory.requests_bytes, memory.replies_bytes) == (MESSAGE, 0)
    memory.arrived(call, bytes(100))
    memory.hold_reply(call, 50_000)
    assert memory.requests_bytes == 100
    assert 100_000 <= memory.replies_bytes < 150_000
    memory.answered(call, bytes(50_000))
    assert memory.requests_bytes == 0
    assert call.answered_s is not None
    assert memory.replies_bytes >= 100_000
    memory.release(call)
    assert memory.used_bytes == 0


def test_a_reply_without_room_is_refused_before_its_call_runs() -> None:
    memory = room_for(3)
    for _ in range(2):
        memory.hold_reply(call_of(memory), MESSAGE // 2)
    with pytest.raises(ServerBusy, match=r"no memory for a reply of .* in use.*front_memory_bytes") as caught:
        memory.hold_reply(call_of(memory), MESSAGE // 2)
    assert caught.value.row.reason == "QUEUE_FULL"
    assert memory.refused == {"request": 0, "reply": 1, "slot": 0}


def test_a_stream_holds_no_more_for_its_reply_than_for_its_upload() -> None:
    memory = room_for(3)
    calls = [call_of(memory, stream=True) for _ in range(3)]
    assert [memory.arrive(call, MESSAGE) for call in calls] == [True] * 3
    for call in calls:
        memory.uploaded(call, 2**40)
    assert 3 * 2 * CHUNK_BYTES <= memory.used_bytes <= 3 * MESSAGE
    assert memory.requests_bytes == 0


def test_results_that_left_an_arena_have_half() -> None:
    memory = room_for(4)
    first, second = call_of(memory), call_of(memory, tenant=Tenant("another"))
    assert memory.move(first, 2 * MESSAGE)
    assert not memory.move(second, 1)
    assert memory.arrive(second, MESSAGE)
    assert (memory.held_bytes(first.tenant), memory.held_bytes(second.tenant)) == (2 * MESSAGE, MESSAGE)
    memory.forget_moved(first, 2 * MESSAGE)
    assert memory.used_bytes == MESSAGE


async def test_messages_without_room_wait_for_it_first_come_first_served() -> None:
    memory = room_for(1)
    first, second, third = (call_of(memory) for _ in range(3))
    assert memory.arrive(first, MESSAGE)
    came: list[RpcCall] = []

    async def wait(call: RpcCall) -> None:
        await memory.wait_for_room(call, MESSAGE)
        came.append(call)

    tasks = [asyncio.create_task(wait(call)) for call in (second, third)]
    await asyncio.sleep(0)
    assert not memory.arrive(call_of(memory), 1)  # not before those that wait
    memory.release(first)
    await tasks[0]
    assert came == [second]
    memory.release(second)
    await tasks[1]
    memory.release(third)
    assert memory.used_bytes == 0


async def test_a_tenant_has_three_quarters_at_most() -> None:
    memory = room_for(8)
    hog, other = Tenant("hog"), Tenant("other")
    calls = [call_of(memory, tenant=hog) for _ in range(7)]
    assert [memory.arrive(call, MESSAGE) for call in calls] == [True] * 6 + [False]
    waiting = asyncio.create_task(memory.wait_for_room(calls[-1], MESSAGE))
    await asyncio.sleep(0)
    await memory.wait_for_room(call_of(memory, tenant=other), MESSAGE)
    assert not waiting.done()
    memory.release(calls[0])
    await waiting


@pytest.mark.parametrize(("weight", "expected"), [(1, "light"), (10, "heavy")])
async def test_room_goes_to_the_tenant_that_holds_least_by_its_weight(weight: float, expected: str) -> None:
    memory = room_for(4)
    heavy, light = Tenant("heavy", weight), Tenant("light")
    calls = [call_of(memory, tenant=tenant) for tenant in (heavy, heavy, heavy, light, heavy, light)]
    assert all(memory.arrive(call, MESSAGE) for call in calls[:4])
    tasks = [asyncio.create_task(memory.wait_for_room(call, MESSAGE)) for call in calls[4:]]
    await asyncio.sleep(0)
    memory.release(calls[0])
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert [calls[4 + tasks.index(task)].tenant.name for task in done] == [expected]
    for task in others:
        task.cancel()


@pytest.mark.parametrize("how", ["cancelled", "refused"])
async def test_who_gave_up_waiting_holds_nothing(how: str) -> None:
    memory = room_for(1)
    first, second = call_of(memory), call_of(memory)
    assert memory.arrive(first, MESSAGE)
    waiting = asyncio.create_task(memory.wait_for_room(second, MESSAGE))
    await asyncio.sleep(0)
    if how == "cancelled":
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        memory.tick([], LATER_S)
        with pytest.raises(ServerBusy, match=r"no memory for a request of"):
            await waiting
    memory.release(second)
    memory.release(first)
    assert memory.used_bytes == 0
    assert memory.arrive(second, MESSAGE)


# ------------------------------------------------------------------------------------------ who is too slow

PEER = "ipv4:10.0.0.7:41234"


def ended(memory: FrontMemory, call: RpcCall, after_s: float) -> tuple[set[str], NpugradError | None]:
    """Peers whose connections end, and why a call was ended, so long after what it waits for began."""
    return memory.tick(
        [call], after_s + (call.answered_s or call.reading_s or call.marks[0][1])
    ), call.failure


def answered(memory: FrontMemory, *, stream: bool = False) -> RpcCall:
    call = call_of(memory, stream=stream)
    if stream:
        assert memory.arrive(call, MESSAGE)
        memory.uploaded(call, CHUNK_BYTES)
        memory.failed(call)
    else:
        memory.hold_reply(call, 1000)
        memory.answered(call, bytes(1000))
    return call


def test_a_reply_that_is_not_taken_costs_its_caller_the_connection_and_sooner_while_memory_is_short() -> None:
    memory = FrontMemory(FrontLimits(memory_bytes=4 * MESSAGE, reply_timeout_s=50))
    call = answered(memory)
    assert ended(memory, call, 49) == (set(), None)
    with structlog.testing.capture_logs() as lines:
        for after_s in (51, 52, 53):
            assert ended(memory, call, after_s) == ({PEER}, None)
            assert ended(memory, answered(memory), 51)[0]
    assert [line["event"] for line in lines] == ["reply too slow"]  # one a minute
    assert memory.dropped == {"request": 0, "reply": 4}
    another = answered(memory)
    assert not ended(memory, another, 6)[0]
    assert memory.arrive(call_of(memory), int(3.1 * MESSAGE))
    assert ended(memory, another, 6)[0]


def test_a_stream_that_was_given_up_with_a_frame_on_its_way_is_ended_soon() -> None:
    """A call that failed holds nothing else."""
    memory = room_for(10)
    for stream in (False, True):
        call = call_of(memory, stream=stream)
        assert memory.arrive(call, MESSAGE)
        memory.failed(call)
        assert memory.used_bytes == 0
    call = answered(memory, stream=True)
    assert memory.replies_bytes > 0
    assert not ended(memory, call, 4)[0]
    assert ended(memory, call, 6)[0]


def test_a_message_that_does_not_come_is_given_up() -> None:
    memory = FrontMemory(FrontLimits(memory_bytes=4 * MESSAGE, upload_timeout_s=60))
    call = call_of(memory)
    assert memory.arrive(call, MESSAGE)
    call.reading_s = call.marks[0][1]
    assert ended(memory, call, 59) == (set(), None)
    assert isinstance(ended(memory, call, 61)[1], DeadlineExceeded)
    call.failure = None
    assert memory.arrive(call_of(memory), int(2.1 * MESSAGE))
    assert isinstance(ended(memory, call, 3)[1], ServerBusy)
    assert memory.dropped == {"request": 2, "reply": 0}


@pytest.mark.parametrize("is_slow", [False, True])
def test_while_memory_is_short_slow_streams_give_way(is_slow: bool) -> None:
    memory = room_for(4)
    call = call_of(memory, stream=True)
    assert memory.arrive(call, MESSAGE)
    call.is_slow = lambda: is_slow
    assert ended(memory, call, 1) == (set(), None)
    assert memory.arrive(call_of(memory), int(2.1 * MESSAGE))
    for _ in range(2):
        assert (ended(memory, call, 1)[1] is not None) == is_slow
    assert memory.dropped["request"] == is_slow  # once


# -------------------------------------------------------------------------------------------- any history


STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 2 * MESSAGE)), max_size=60)


@given(STEPS)
def test_in_any_history_the_sums_are_right_and_within_the_bound(steps: list[tuple[int, int, int]]) -> None:
    memory = room_for(3)
    calls = [call_of(memory, stream=index % 2 == 1) for index in range(6)]
    for index, what, nbytes in steps:
        call = calls[index]
        if what == 0 and not call.request_bytes:
            memory.arrive(call, MESSAGE)
        elif what == 1 and call.request_bytes == MESSAGE:
            memory.arrived(call, bytes(min(nbytes, MESSAGE)))
        elif what == 2 and call.is_slow is None and not call.reply_bytes:
            try:
                memory.hold_reply(call, nbytes)
            except ServerBusy:
                assert memory.used_bytes + 2 * nbytes > memory.limits.memory_bytes - MESSAGE
        elif what == 3 and call.is_slow is not None and call.request_bytes == MESSAGE:
            memory.uploaded(call, nbytes)
        elif what == 4:
            memory.failed(call)
        elif what == 5:
            memory.release(call)
        assert memory.requests_bytes == sum(call.request_bytes for call in calls)
        assert memory.replies_bytes == sum(call.reply_bytes for call in calls)
        assert 0 <= memory.used_bytes <= memory.limits.memory_bytes
    for call in calls:
        memory.release(call)
    assert memory.used_bytes == 0


def test_metrics_show_what_is_held_and_what_was_refused() -> None:
    memory = room_for(2)
    metrics = Metrics("0", "atlas-a2")
    metrics.registry.register(FrontCollector(memory))
    call = call_of(memory)
    assert memory.arrive(call, MESSAGE)
    memory.refused["slot"] += 1
    found = metrics.registry.get_sample_value
    assert found("npugrad_front_memory_used_bytes", {"what": "requests"}) == MESSAGE
    assert found("npugrad_front_memory_used_bytes", {"what": "replies"}) == 0
    assert found("npugrad_front_memory_bytes") == 2 * MESSAGE
    assert found("npugrad_front_refused_calls_total", {"what": "slot"}) == 1
    assert found("npugrad_front_slow_callers_total", {"what": "reply"}) == 0
