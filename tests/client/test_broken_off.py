"""Streams that end without an answer, as a proxy or a server that stops leaves them: they count as lost."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from tests.client.both import WAYS, Looped, call_once, caught
from tests.client.fake_service import UNARY, Context, fake_service, group_norm
from tests.client.raw_http2 import GONE, NO_STATUS, peer, reset
from tests.http2 import HEADERS

from npugrad.errors import NpugradError
from npugrad_client import Client, ConnectError, RetryPolicy

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
            assert not error.is_misconfigured
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
