"""Peers that a call does not get through: streams that they break off, and messages too large for them.

Proxies and servers that stop end HTTP/2 streams as no gRPC server would.
"""

from __future__ import annotations

import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import numpy as np
import pytest
from tests.client.both import BOTH, WAYS, Looped, Make, call_once, caught
from tests.client.fake_service import UNARY, Context, abort_with, fake_service, group_norm
from tests.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    literal,
)
from tests.operators import GROUP_NORM

from npugrad.errors import UNARY_LIMIT_HINT, NpugradError
from npugrad_client import CallTooLarge, Client, ConnectError, RetryPolicy

_STATUS_200 = b"\x88"
"""``:status: 200``, from HPACK's own table."""
_REPLY = _STATUS_200 + literal(b"content-type", b"application/grpc")
NO_STATUS = [frame(HEADERS, END_HEADERS | END_STREAM, 0, _REPLY)]
"""A stream that ends well, but without a word of gRPC's."""
GONE = [frame(GOAWAY, 0, 0, struct.pack(">II", 2**31 - 1, 0)), b""]
"""The end of the connection, with every stream named as taken."""


def reset(code: int, *, has_begun: bool = False) -> list[bytes]:
    """A stream that is broken off, before or after its reply has begun."""
    begin = [frame(HEADERS, END_HEADERS, 0, _REPLY)] if has_begun else []
    return [*begin, frame(RST_STREAM, 0, 0, struct.pack(">I", code))]


class Peer(socketserver.ThreadingTCPServer):
    """Answers every stream in one way: once its headers have come, or at its end with what begins a reply.

    Frames of streams get their numbers, and an empty one closes the connection.
    """

    daemon_threads = True

    def __init__(self, answer: list[bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self.answer = answer
        self.stream_count = 0


class _Connection(socketserver.StreamRequestHandler):
    server: Peer

    def handle(self) -> None:
        is_reply = self.server.answer[0][3] == HEADERS
        with suppress(OSError):  # the client may leave
            if self.rfile.read(len(PREFACE)) != PREFACE:
                return
            self.wfile.write(frame(SETTINGS, 0, 0))
            while len(head := self.rfile.read(9)) == 9:
                kind, flags = head[3], head[4]
                payload = self.rfile.read(int.from_bytes(head[:3], "big"))
                if kind in (SETTINGS, PING) and not flags & ACK:
                    self.wfile.write(frame(kind, ACK, 0, payload if kind == PING else b""))
                is_time = flags & END_STREAM if is_reply else kind == HEADERS
                if kind in (HEADERS, DATA) and is_time and not self._end_stream(head[5:]):
                    return

    def _end_stream(self, number: bytes) -> bool:
        """Whether the connection goes on."""
        self.server.stream_count += 1
        for piece in self.server.answer:
            if not piece:
                return False
            self.wfile.write(piece if piece[3] == GOAWAY else piece[:5] + number + piece[9:])
        return True


@contextmanager
def peer(answer: list[bytes]) -> Iterator[Peer]:
    with Peer(answer) as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield made
        finally:
            made.shutdown()


BROKEN_OFF = {
    **{f"reset {code}": reset(code) for code in (0, 2, 7, 8)},
    **{f"reset {code} of a reply": reset(code, has_begun=True) for code in (0, 2, 7, 8)},
    "no status": NO_STATUS,
    "goaway": GONE,
}


def outcomes(targets: list[str], policy: RetryPolicy | None, way: int, hxw: int = 4_000) -> list[Any]:
    """Results or errors of one call from each client, and of one from a future, which can be cancelled.

    By default of one whose upload takes more than a window of HTTP/2, which is 64 KiB.
    """
    call = group_norm(hxw=hxw)
    options: Any = {"timeout_s": 30, "retry": policy, "stream_from_bytes": way}
    with Client(targets, **options) as client:
        return [
            caught(lambda: client.group_norm_backward(**call)),
            caught(lambda: client.submit.group_norm_backward(**call).result(60)),
            caught(lambda: call_once(Looped, targets, call, **options)),
        ]


@WAYS
@pytest.mark.parametrize("answer", BROKEN_OFF.values(), ids=BROKEN_OFF)
def test_a_call_that_a_proxy_breaks_off_is_sent_to_another_server(answer: list[bytes], way: int) -> None:
    hxw = 500 if answer[0][3] == HEADERS else 4_000  # a reply begins when the upload is over
    with peer(answer) as proxy, fake_service() as good:
        for error in outcomes([proxy.address], None, way, hxw):
            assert type(error) is ConnectError
            is_refused = answer in (reset(7), reset(7, has_begun=True))
            told = "the call was refused by" if is_refused else "cannot reach"
            assert str(error).startswith(f"group_norm_backward: {told} {proxy.address}: ")
            assert (error.is_misconfigured, error.was_connected) == (False, True)
        for grads in outcomes([proxy.address, good.address], RetryPolicy(), way, hxw):
            assert not isinstance(grads, NpugradError), repr(grads)
            assert grads.info.tries <= 2
        assert proxy.stream_count > 3


def test_a_reset_that_blames_what_was_sent_is_not_tried_again() -> None:
    with peer(reset(1)) as proxy:
        for error in outcomes([proxy.address], RetryPolicy(), UNARY):
            assert type(error) is NpugradError
            assert error.tries == 1


@pytest.mark.parametrize("said", ["CANCELLED", "Channel closed!", "Locally cancelled by application!"])
@WAYS
def test_a_cancellation_that_is_not_ours_is_a_lost_server_whatever_it_says(said: str, way: int) -> None:
    """A server that stops cancels what it has not taken yet."""

    def end(context: Context) -> None:
        context.abort(grpc.StatusCode.CANCELLED, said)

    with fake_service(before=end) as ending, fake_service() as good:
        for error in outcomes([ending.address], None, way):
            assert type(error) is ConnectError
        for grads in outcomes([ending.address, good.address], RetryPolicy(), way):
            assert not isinstance(grads, NpugradError), repr(grads)
            assert grads.info.tries <= 2


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
