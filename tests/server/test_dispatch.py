"""Dispatch above a real pool: what a message becomes, and that every way out gives the memory back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.calls import Sample, named_sample, sample
from tests.worker_forks import forked_workers

from npugrad.call import ExecutionInfo
from npugrad.codec import CHUNK_BYTES, decode_response
from npugrad.errors import (
    CallTooLarge,
    DeadlineExceeded,
    InvalidOperand,
    MalformedRequest,
    MalformedTensor,
    NpugradError,
    UnsupportedOperator,
)
from npugrad.frames import encode_frame
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad.registry import REGISTRY
from npugrad_server import dispatch
from npugrad_server.dispatch import Dispatcher, _nothing_follows
from npugrad_server.plans import Request
from npugrad_server.pool import DevicePool, Outcome, PoolSettings
from npugrad_server.rpc.streaming import _reply

A2 = Product.ATLAS_A2
MIB = 2**20
SETTINGS = PoolSettings(
    devices=("test:0?compute=1",),
    product=Product.ATLAS_A2,
    input_arena_bytes=32 * MIB,
    output_arena_bytes=32 * MIB,
    prefault_bytes=0,
    max_queue_depth=8,
    streams_per_device=1,
    hang_grace_s=10,
    worker_start_timeout_s=60,
    respawn_backoff_s=0.01,
    respawn_backoff_max_s=1,
    max_respawns=3,
)


@asynccontextmanager
async def dispatching(**changes: Any) -> AsyncIterator[Dispatcher]:
    """A dispatcher whose pool has nothing in use when the block ends."""
    with forked_workers():
        pool = await DevicePool.open(SETTINGS)
        try:
            await pool.wait_ready(60)
            yield Dispatcher(pool, Product.ATLAS_A2, **changes)
            stats = pool.stats()
            assert (stats.input_arena_used_bytes, stats.output_arena_used_bytes, stats.uploads) == (0, 0, 0)
        finally:
            await pool.close()


def planned(dispatcher: Dispatcher, made: Sample, message: Any = None, **kwargs: Any) -> Request:
    options = {"request_id": "r9", "timeout_s": None, "chunked": False, **kwargs}
    message = message or made.message()
    data = message.SerializeToString()
    return dispatcher.planner.plan(made.record, data, lambda: type(message).FromString(data), **options)


async def called(dispatcher: Dispatcher, request: Request) -> tuple[Any, ExecutionInfo]:
    data, info = await dispatcher.call_whole(request)
    return REGISTRY.responses[request.plan.record.name].FromString(data), info


def is_reference(made: Sample, response: Any) -> bool:
    contents = decode_response(made.record, response).contents
    return {name: content.data for name, content in contents.items()} == made.reference()


LONG: dict[str, Any] = {"n": 1, "c": 4, "hxw": 300_000, "group": 2}
"""Sizes of a call whose operands are written in pieces."""


async def test_a_call_comes_back_with_results_info_and_request_id_and_so_does_a_known_one() -> None:
    made = sample(**LONG)
    async with dispatching() as dispatcher:
        for _ in range(2):
            request = planned(dispatcher, made)
            assert request.known.content_bytes == sum(content.nbytes for content in made.contents.values())
            response, info = await called(dispatcher, request)
            assert is_reference(made, response)
            assert (info.request_id, info.product, info.device) == ("r9", Product.ATLAS_A2, "test:0")
        assert request.known.reply is not None, "its reply is made of a template"
        assert request.plan.is_kept


async def test_calls_of_one_plan_are_computed_from_their_own_contents() -> None:
    first, second = sample(seed=1), sample(seed=2)
    async with dispatching() as dispatcher:
        for made in (first, second, first):
            response, info = await called(dispatcher, planned(dispatcher, made, request_id=str(id(made))))
            assert is_reference(made, response)
            assert info.request_id == response.info.request_id == str(id(made))
        assert dispatcher.planner.plans == 1


async def test_the_reply_to_a_known_call_is_that_to_a_new_one() -> None:
    """Of every sample, with what is masked out or empty as it was."""

    async def reply(made: Sample) -> bytes:
        response, _ = await called(dispatcher, planned(dispatcher, made))
        response.ClearField("info")
        return bytes(response.SerializeToString())

    async with dispatching() as dispatcher:
        for record in OPERATORS.values():
            for each in record.samples(A2):
                made = named_sample(record.name, each.name)
                replies = [await reply(made) for _ in range(3)]
                assert replies[0] == replies[1] == replies[2], (record.name, each.name)


async def test_other_work_gets_its_turn_while_large_operands_are_written() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with dispatching() as dispatcher:
        request = planned(dispatcher, sample(n=1, c=4, hxw=500_000, group=2))  # 8 MB twice: 16 pieces
        counting = asyncio.ensure_future(count())
        await called(dispatcher, request)
        counting.cancel()
        assert turns >= 16


async def test_a_content_that_does_not_fill_its_operand_is_never_written() -> None:
    async with dispatching() as dispatcher:
        request = planned(dispatcher, sample(**LONG))
        short = {**request.inline, "input": bytes(request.inline["input"])[:-CHUNK_BYTES]}
        with pytest.raises(ValueError, match=r"input: found \d+ bytes of content; expected 4800000"):
            await dispatcher.call_whole(replace(request, inline=short))


@pytest.mark.parametrize("hxw", [16, 2**14], ids=["carried", "in chunks"])
async def test_the_streamed_reply_to_a_known_call_is_what_protobuf_writes(
    hxw: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, replies = sample(n=2, c=4, hxw=hxw, group=2), []
    monkeypatch.setattr(dispatch, "encode_marks", lambda marks, message: None)  # the times differ
    async with dispatching() as dispatcher:
        for _ in range(2):
            request = planned(dispatcher, made, chunked=True)

            async def sink(outcome: Outcome, request: Request = request) -> None:
                known = request.known
                for template in (known.reply, None):
                    known.reply = template
                    replies.append([encode_frame(each) for each in _reply(dispatcher, request, outcome)])

            await dispatcher.call(request, _nothing_follows, sink)
    first, _, by_template, by_protobuf = replies
    assert by_template == by_protobuf
    assert len(first) == len(by_template) == (1 if hxw == 16 else 2)


async def test_wire_comes_before_constraints_and_constraints_before_content() -> None:
    made = sample()
    async with dispatching() as dispatcher:
        message = made.message()
        message.mean.ClearField("data")
        with pytest.raises(MalformedTensor, match="mean: found no content"):
            planned(dispatcher, made, message)
        message.group = 0
        with pytest.raises(InvalidOperand) as caught:
            planned(dispatcher, made, message)
        assert caught.value.constraint == "group.positive"
        message.ClearField("n")
        with pytest.raises(MalformedRequest, match="n: found nothing"):
            planned(dispatcher, made, message)
        lacking = sample("multi_scale_deformable_attention_grad")
        dispatcher.planner.product = Product.ATLAS_TRAINING
        with pytest.raises(UnsupportedOperator) as unsupported:
            planned(dispatcher, lacking)
        assert unsupported.value.row.grpc_status == "UNIMPLEMENTED"
        assert dispatcher.pool.stats().accepted_calls == 0


async def test_what_never_fits_is_refused_before_it_is_admitted() -> None:
    """A reply beyond a message, operands beyond the arena."""
    async with dispatching(max_message_bytes=65536 + 100) as dispatcher:
        with pytest.raises(CallTooLarge, match="found a reply of 65776 bytes; expected at most 65636"):
            await called(dispatcher, planned(dispatcher, sample()))
        with pytest.raises(NpugradError) as caught:
            await called(dispatcher, planned(dispatcher, sample(n=1, c=4, hxw=1_100_000, group=2)))
        assert caught.value.reason == "CALL_TOO_LARGE"
        assert dispatcher.pool.stats().accepted_calls == 0


async def test_timeout_becomes_a_deadline_of_the_monotonic_clock() -> None:
    made = sample()
    async with dispatching() as dispatcher:
        before = time.monotonic()
        request = planned(dispatcher, made, timeout_s=30.0)
        assert request.deadline_s is not None
        assert before + 30 <= request.deadline_s <= time.monotonic() + 30
        with pytest.raises(DeadlineExceeded):
            await called(dispatcher, planned(dispatcher, made, timeout_s=0.0))


async def test_cancelled_task_gives_everything_back() -> None:
    made = sample()
    async with dispatching() as dispatcher:
        task = asyncio.ensure_future(called(dispatcher, planned(dispatcher, made)))
        await asyncio.sleep(0)
        assert dispatcher.pool.stats().accepted_calls == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The worker may still have the region of a call that was cancelled; the next one shows it let go.
        response, _ = await called(dispatcher, planned(dispatcher, made))
        assert decode_response(made.record, response).contents
