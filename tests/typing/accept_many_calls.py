# pyright: strict
"""Uses of many calls and servers that must type-check as they stand, strictly; never run."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import assert_type

from npugrad_client import (
    AsyncClient,
    Client,
    GroupNormBackwardResult,
    RetryPolicy,
    ServerInfo,
    Tls,
    TlsError,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

x = np.zeros((2, 3, 4), np.float32)
call: dict[str, Any] = {"grad_out": x, "n": 2, "c": 3, "hxw": 4, "group": 1, "output_mask": (True,) * 3}


def calls() -> Iterator[dict[str, Any]]:
    for _ in range(100):
        yield call


with Client(
    ["host1:50051", "host2:50051"],
    retry=RetryPolicy(max_tries=3, hedge_after_s=0.2),
    tls=Tls(ca="ca.pem", certificate=Path("client.pem"), key=b"-----BEGIN PRIVATE KEY-----"),
    threads=8,
) as client:
    future = client.submit.group_norm_backward(
        grad_out=x, input=x, n=2, c=3, hxw=4, group=1, output_mask=(True, True, True)
    )
    assert_type(future, Future[GroupNormBackwardResult])
    client.submit.group_norm_backward(grad_out=x, n=2, c=3, hxw=4, group=1, output_mask=None, copy=True)
    assert_type(future.result().info.tries, int)
    assert_type(client.submit(client.server_info, timeout_s=1.0), Future[ServerInfo])
    assert_type(client.run_many(client.group_norm_backward, calls()), list[GroupNormBackwardResult])
    assert_type(
        client.run_many(client.group_norm_backward, calls(), on_error="return", progress=True, copy=True),
        list[GroupNormBackwardResult | Exception],
    )

try:
    Client("host:443", tls=True, retry=None).server_info()
except TlsError as error:
    assert_type(error.tries, int)


async def main() -> None:
    async with AsyncClient("dns:///npugrad.example.org:50051", timeout_s=30.0) as client:
        grads = await client.group_norm_backward(**call)
        assert_type(grads, GroupNormBackwardResult)
        verdict, info = await asyncio.gather(
            client.validate("group_norm_backward", inputs={}, attrs={}), client.server_info()
        )
        assert_type(verdict, Verdict)
        assert_type(info, ServerInfo)
        assert_type(
            await client.run_many(client.group_norm_backward, calls(), concurrency=100),
            list[GroupNormBackwardResult],
        )
