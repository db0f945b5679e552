"""What a client does when one message is too large for a server, or for something on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.client.both import BOTH, Make, call_once
from tests.client.fake_service import abort_with, fake_service, group_norm
from tests.client.raw_http2 import peer
from tests.http2 import END_HEADERS, END_STREAM, HEADERS, frame, literal
from tests.operators import GROUP_NORM

from npugrad.errors import UNARY_LIMIT_HINT
from npugrad_client import CallTooLarge, RetryPolicy

RETRIES = pytest.mark.parametrize("retry", [None, RetryPolicy(), RetryPolicy(hedge_after_s=60)], ids=str)


@BOTH
@RETRIES
def test_a_reply_too_large_for_one_message_comes_as_a_stream(make: Make, retry: RetryPolicy | None) -> None:
    def refuse(record: Any, request: Any, context: Any) -> Any:
        text = f"{record.name}: found a reply of 9 bytes; expected at most 8 {UNARY_LIMIT_HINT}"
        abort_with(context, CallTooLarge(text, operator=record.name))

    with fake_service(unary=refuse) as seen:
        grads = call_once(make, seen.address, group_norm(), retry=retry)
    assert seen.methods == [GROUP_NORM.rpc, "Execute"]
    assert grads.info.tries == 2
    assert not np.any(grads.grad_input)


@BOTH
def test_a_call_too_large_for_the_memory_of_the_server_is_not_sent_again(make: Make) -> None:
    def refuse(record: Any, request: Any, context: Any) -> Any:
        abort_with(context, CallTooLarge(f"{record.name}: found 9 bytes of operands; expected at most 8"))

    with (
        fake_service(unary=refuse) as seen,
        pytest.raises(CallTooLarge, match="9 bytes of operands") as caught,
    ):
        call_once(make, seen.address, group_norm())
    assert (seen.methods, caught.value.tries, caught.value.is_message) == ([GROUP_NORM.rpc], 1, False)


@BOTH
def test_a_request_that_grpc_refuses_is_streamed(make: Make) -> None:
    """Once; where its chunks are refused as well, that is told."""
    call = group_norm(hxw=2**13)
    with fake_service(max_message_bytes=2**19) as seen:
        assert call_once(make, seen.address, call).info.tries == 2
    assert seen.methods == ["Execute"]
    with (
        fake_service(max_message_bytes=2**15) as seen,
        pytest.raises(CallTooLarge, match="larger than max") as e,
    ):
        call_once(make, seen.address, call)
    assert (e.value.tries, e.value.is_message) == (2, False)


@BOTH
@pytest.mark.parametrize("said", [b"", b"Payload Too Large"], ids=["nginx", "Envoy"])
def test_so_is_what_a_proxy_calls_too_large(make: Make, said: bytes) -> None:
    """This one limits whole bodies, and so refuses the stream too."""
    headers = literal(b":status", b"413")
    if said:
        headers = b"\x88" + literal(b"content-type", b"application/grpc") + literal(b"grpc-status", b"2")
        headers += literal(b"grpc-message", said)
    with peer([frame(HEADERS, END_HEADERS | END_STREAM, 0, headers)]) as proxy:
        with pytest.raises(CallTooLarge, match=r"413|Payload Too Large") as caught:
            call_once(make, proxy.address, group_norm())
        assert proxy.stream_count == 2
    assert caught.value.tries == 2
