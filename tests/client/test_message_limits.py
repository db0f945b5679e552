"""What a client does when one message is too large for a server, or for something on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.client.fake_service import UNARY, abort_with, fake_service, group_norm
from tests.client.raw_http2 import peer
from tests.http2 import END_HEADERS, HEADERS, frame, literal
from tests.operators import GROUP_NORM

from npugrad.errors import UNARY_LIMIT_HINT
from npugrad_client import AsyncClient, CallTooLarge, Client, RetryPolicy
from npugrad_client._channels import LARGEST_UNARY_BYTES

END_STREAM = 1


def sync_call(address: str, call: dict[str, Any], **options: Any) -> Any:
    with Client(address, timeout_s=20, **options) as client:
        return client.group_norm_backward(**call)


def async_call(address: str, call: dict[str, Any], **options: Any) -> Any:
    async def main() -> Any:
        async with AsyncClient(address, timeout_s=20, **options) as client:
            return await client.group_norm_backward(**call)

    return asyncio.run(main())


ACTS = pytest.mark.parametrize("act", [sync_call, async_call])
RETRIES = pytest.mark.parametrize("retry", [None, RetryPolicy(), RetryPolicy(hedge_after_s=60)], ids=str)


@ACTS
@RETRIES
def test_a_reply_too_large_for_one_message_comes_as_a_stream(
    act: Callable[..., Any], retry: RetryPolicy | None
) -> None:
    def refuse(record: Any, request: Any, context: Any) -> Any:
        text = f"{record.name}: found a reply of 9 bytes; expected at most 8 {UNARY_LIMIT_HINT}"
        abort_with(context, CallTooLarge(text, operator=record.name))

    with fake_service(unary=refuse) as seen:
        grads = act(seen.address, group_norm(), retry=retry)
    assert seen.methods == [GROUP_NORM.rpc, "Execute"]
    assert grads.info.tries == 2
    assert not np.any(grads.grad_input)


@ACTS
def test_a_call_too_large_for_the_memory_of_the_server_is_not_sent_again(act: Callable[..., Any]) -> None:
    def refuse(record: Any, request: Any, context: Any) -> Any:
        abort_with(context, CallTooLarge(f"{record.name}: found 9 bytes of operands; expected at most 8"))

    with (
        fake_service(unary=refuse) as seen,
        pytest.raises(CallTooLarge, match="9 bytes of operands") as caught,
    ):
        act(seen.address, group_norm())
    assert (seen.methods, caught.value.tries, caught.value.is_message) == ([GROUP_NORM.rpc], 1, False)


@ACTS
def test_a_request_that_grpc_refuses_is_streamed(act: Callable[..., Any]) -> None:
    """Once; where its chunks are refused as well, that is told."""
    call = group_norm(hxw=2**13)
    with fake_service(max_message_bytes=2**19) as seen:
        assert act(seen.address, call).info.tries == 2
    assert seen.methods == ["Execute"]
    with (
        fake_service(max_message_bytes=2**15) as seen,
        pytest.raises(CallTooLarge, match="larger than max") as e,
    ):
        act(seen.address, call)
    assert (e.value.tries, e.value.is_message) == (2, False)


@ACTS
@pytest.mark.parametrize("said", [b"", b"Payload Too Large"], ids=["nginx", "Envoy"])
def test_so_is_what_a_proxy_calls_too_large(act: Callable[..., Any], said: bytes) -> None:
    """This one limits whole bodies, and so refuses the stream too."""
    headers = literal(b":status", b"413")
    if said:
        headers = b"\x88" + literal(b"content-type", b"application/grpc") + literal(b"grpc-status", b"2")
        headers += literal(b"grpc-message", said)
    with peer([frame(HEADERS, END_HEADERS | END_STREAM, 0, headers)]) as proxy:
        with pytest.raises(CallTooLarge, match=r"413|Payload Too Large") as caught:
            act(proxy.address, group_norm())
        assert proxy.stream_count == 2
    assert caught.value.tries == 2


def test_no_setting_makes_a_message_of_three_mebibytes() -> None:
    call = group_norm(n=1, c=4, hxw=LARGEST_UNARY_BYTES // 32)
    with fake_service() as seen, Client(seen.address, timeout_s=30, stream_from_bytes=UNARY) as client:
        client.group_norm_backward(**call)
        smaller = group_norm(n=1, c=4, hxw=LARGEST_UNARY_BYTES // 32 - 8)
        client.group_norm_backward(**smaller)
    assert seen.methods == ["Execute", GROUP_NORM.rpc]
    assert seen.headers[0].ByteSize() < 4 * 2**20
