"""`remote(policy="faster")` against devices of known speed: what is slower there stays here, and is told."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from collections.abc import Iterator

import torch.nn.functional as F
from tests.fix_server import StartServer
from torch.utils._python_dispatch import TorchDispatchMode

from npugrad_client import Client, RetryPolicy
from npugrad_client._costs import FASTER_HERE, MEASURED_HERE, TRIALS
from npugrad_client.torch import RemoteWarning, Summary, remote

pytestmark = pytest.mark.torch
Tensor = Any
_SLOW_S = 0.4
_NORM_BACKWARD = torch.ops.aten.native_group_norm_backward.default


class SlowHost(TorchDispatchMode):
    """A host on which the backward of a norm takes its time; enter it outside of a `remote`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _NORM_BACKWARD:
            time.sleep(_SLOW_S)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def slow_client(start_server: StartServer) -> Iterator[Client]:
    """A client of a device that takes 0.4 s for whatever it computes."""
    server = start_server(devices=f"test:1?compute=1&ms={_SLOW_S * 1e3:.0f}")
    with Client(server.address, timeout_s=60) as client:
        yield client


def step(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    F.group_norm(x, 4).square().sum().backward()
    return x.grad


def calls(summary: Summary) -> dict[tuple[bool, str], int]:
    return {(row.is_sent, row.why): row.calls for row in summary.rows}


def test_what_is_slower_there_is_tried_and_then_stays_here(slow_client: Client) -> None:
    mode, x = remote(slow_client, min_bytes=0, policy="faster"), torch.randn(2, 8, 5)
    expected = step(x)
    with mode:
        for _ in range(20):
            torch.testing.assert_close(step(x), expected, rtol=1e-4, atol=1e-5)
    summary = mode.summary()
    assert 2 <= summary.sent <= TRIALS
    assert calls(summary)[False, FASTER_HERE] >= 20 - 2 * TRIALS
    (row,) = summary.costs
    assert (row.operator, row.kind) == ("group_norm_backward", "float32[2,8,5]")
    assert (row.sent, row.local) == (summary.sent, summary.local)
    assert row.sent_s is not None
    assert row.local_s is not None
    assert row.sent_s >= _SLOW_S > row.local_s
    assert row.won_s is not None
    assert row.won_s < 0
    assert str(summary).splitlines()[-1] == f"Sending cost {-row.won_s:.3f} s."


def test_what_is_faster_there_is_sent(client: Client) -> None:
    mode, x = remote(client, min_bytes=0, policy="faster"), torch.randn(2, 8, 5)
    with SlowHost(), mode:
        for _ in range(2 * TRIALS + 5):
            step(x)
    assert calls(mode.summary()) == {(True, ""): TRIALS + 5, (False, MEASURED_HERE): TRIALS}
    won_s = mode.summary().won_s
    assert won_s is not None
    assert won_s > 0
    assert "\nSending saved " in str(mode.summary())


def test_always_is_the_default_and_says_what_it_does_not_know(client: Client) -> None:
    with remote(client, min_bytes=0) as mode:
        for _ in range(2 * TRIALS):
            step(torch.randn(2, 8, 5))
    assert calls(mode.summary()) == {(True, ""): 2 * TRIALS}
    (row,) = mode.summary().costs
    assert (row.sent, row.local, row.local_s, row.won_s) == (2 * TRIALS, 0, None, None)
    assert "How long 6 sent calls would have taken here is unknown" in str(mode.summary())


def test_small_calls_are_neither_sent_nor_learned(client: Client) -> None:
    with remote(client, policy="faster") as mode:
        step(torch.randn(2, 8, 5))
    assert calls(mode.summary()) == {(False, "smaller than min_bytes"): 1}
    assert mode.summary().costs == ()


def test_what_the_documents_refuse_is_no_cost(client: Client) -> None:
    x = torch.randn(2, 8, 5, dtype=torch.float64)
    with remote(client, min_bytes=0, policy="faster") as mode, pytest.warns(RemoteWarning, match="float64"):
        [step(x) for _ in range(3)]
    assert [(row.sent, row.local) for row in mode.summary().costs] == [(0, 1)]


def test_a_service_that_fails_takes_the_time_of_both_ways() -> None:
    nowhere = Client("127.0.0.1:1", retry=RetryPolicy(retry_for_s=0))
    mode = remote(nowhere, min_bytes=0, on_error="local", policy="faster")
    with nowhere, SlowHost(), mode, pytest.warns(RemoteWarning, match="the service failed"):
        [step(torch.randn(2, 8, 5)) for _ in range(4)]
    assert mode.summary().failed == 2
    (row,) = mode.summary().costs
    assert (row.sent, row.local) == (2, 2)
    assert row.sent_s is not None
    assert row.sent_s >= _SLOW_S


def test_threads_share_what_is_learned(slow_client: Client) -> None:
    mode, x = remote(slow_client, min_bytes=0, policy="faster"), torch.randn(2, 8, 5)
    found: list[Tensor] = []

    def work() -> None:
        with mode:
            found.extend(step(x) for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work) for _ in range(4)]:
            future.result()
    assert len(found) == 40
    assert mode.summary().sent <= TRIALS + 4  # each thread may have one on its way while another learns
    assert mode.summary().sent + mode.summary().local == 40
