"""Two versions that do not fit: who calls learns so, with the server's version.

A server that lacks an operator of its clients, and clients or servers of another major version, whose methods
have another package. How versions that fit talk is what `tests/proofs/skew.py` tries.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from allpairspy import AllPairs
from tests.client.both import BOTH, Looped, Make
from tests.fix_server import ServerProcess, run_server
from tests.operators import GRID_SAMPLER, GROUP_NORM

from npugrad.errors import UnsupportedOperator
from npugrad.operator import OpRecord
from npugrad_client import Client, RetryPolicy

STREAMED, UNARY = 0, 2**30
MISSED = "^group_norm_backward runs locally because the server lacks it: .*(its|of) version "


@pytest.fixture(scope="module", params=["1", "0"], ids=["now", "before"])
def older(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server without GroupNorm, which tells a call that it does not know from none, or does not."""
    log_path = tmp_path_factory.mktemp("older") / "server.log"
    program = (str(Path(__file__).with_name("older_server.py")), GROUP_NORM.name, request.param)
    with run_server(log_path, program=program) as running:
        yield running


def call_of(record: OpRecord) -> dict[str, Any]:
    call = record.build()
    return {**record.make_inputs(call, np.random.default_rng(0)), **call.attrs}


@contextmanager
def serves_nothing() -> Iterator[str]:
    """A gRPC server without a method, as one is for a client of another major version."""
    bare = grpc.server(ThreadPoolExecutor(1))
    port = bare.add_insecure_port("127.0.0.1:0")
    bare.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        bare.stop(None).wait()


def validation_of(record: OpRecord) -> dict[str, Any]:
    call = record.build()
    return {"inputs": call.inputs, "attrs": call.attrs}


def ask(make: Make, address: str, name: str, call: dict[str, Any], **options: Any) -> Any:
    with make(address, **options) as client:
        return getattr(client, name)(**call)


@pytest.mark.parametrize(
    ("make", "retry", "stream_from_bytes"),
    [*AllPairs([[Client, Looped], [RetryPolicy(), RetryPolicy(hedge_after_s=60)], [STREAMED, UNARY]])],
)
def test_a_call_is_refused_with_operator_and_version(
    older: ServerProcess, make: Make, retry: RetryPolicy, stream_from_bytes: int
) -> None:
    options = {"retry": retry, "stream_from_bytes": stream_from_bytes}
    with pytest.raises(UnsupportedOperator) as caught:
        ask(make, older.address, GROUP_NORM.name, call_of(GROUP_NORM), **options)
    error = caught.value
    assert (error.reason, error.operator, error.tries) == ("OPERATOR_UNSUPPORTED", GROUP_NORM.name, 1)
    assert str(error) == (
        f"group_norm_backward: {older.address}: this server, of version {version('npugrad')}, does "
        "not have this operator; a newer one may"
    )
    assert isinstance(error.cause, grpc.RpcError)
    assert bool(error.request_id) is (stream_from_bytes == STREAMED)
    grads = ask(make, older.address, GRID_SAMPLER.name, call_of(GRID_SAMPLER), **options)
    assert grads.info.device == "cpu:0"


@BOTH
def test_so_is_a_question_about_it(older: ServerProcess, make: Make) -> None:
    with pytest.raises(
        UnsupportedOperator, match=r"group_norm_backward: .* of version .* not have this operator"
    ):
        ask(make, older.address, "validate", {"operator": GROUP_NORM.name, **validation_of(GROUP_NORM)})
    found = ask(
        make, older.address, "validate", {"operator": GRID_SAMPLER.name, **validation_of(GRID_SAMPLER)}
    )
    assert found.status == 0


@pytest.mark.torch
@pytest.mark.parametrize("newer_first", [False, True], ids=["alone", "behind a newer one"])
def test_remote_keeps_it_at_home_with_one_warning(
    older: ServerProcess, server: ServerProcess, newer_first: bool
) -> None:
    """Also where the server that said what it has was another one than the server that gets the call."""
    torch = pytest.importorskip("torch")
    from npugrad_client.torch import RemoteWarning, remote

    with Client(older.address) as client, Client(server.address) as newer:
        mode = remote(client, min_bytes=0, on_refused="raise")
        if newer_first:
            mode._policies._servers[client] = newer.server_info()
        x = torch.randn(2, 8, 5, requires_grad=True)
        grid = torch.zeros(1, 2, 2, 2, requires_grad=True)
        lacking = torch.nn.functional.group_norm(x, 4).square().sum()
        known = torch.nn.functional.grid_sample(torch.randn(1, 1, 4, 4), grid, align_corners=False).sum()
        (expected,) = torch.autograd.grad(lacking, x, retain_graph=True)
        with mode, pytest.warns(RemoteWarning, match=MISSED) as said:
            [loss.backward(retain_graph=True) for loss in (lacking, known, lacking)]
    assert len(said) == 1
    assert torch.equal(x.grad, 2 * expected)
    assert [(row.operator, row.is_sent, row.why, row.calls) for row in mode.summary().rows] == [
        (GRID_SAMPLER.name, True, "", 1),
        (GROUP_NORM.name, False, "the server lacks it", 2),
    ]


@pytest.mark.parametrize("kind", ["unary_unary", "stream_stream"])
def test_a_client_of_another_major_version_is_told_what_is_spoken_here(
    server: ServerProcess, kind: str
) -> None:
    with server.channel() as channel:
        call: Any = getattr(channel, kind)("/npugrad.v2.BackwardService/GroupNormBackward")
        request = b"\xff" if kind == "unary_unary" else iter([b"\xff"])
        with pytest.raises(grpc.RpcError) as caught:
            list(call(request, timeout=60))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.details() == (
        "found a call of /npugrad.v2.BackwardService/GroupNormBackward; expected npugrad.v1, which this "
        f"server of version {version('npugrad')} speaks"
    )


@BOTH
@pytest.mark.parametrize("stream_from_bytes", [STREAMED, UNARY], ids=["streamed", "unary"])
def test_a_server_of_another_major_version_is_told_apart_from_one_that_lacks_an_operator(
    make: Make, stream_from_bytes: int
) -> None:
    asked: dict[str, dict[str, Any]] = {GROUP_NORM.name: call_of(GROUP_NORM), "server_info": {}}
    with serves_nothing() as address:
        for name, call in asked.items():
            with pytest.raises(UnsupportedOperator) as caught:
                ask(make, address, name, call, stream_from_bytes=stream_from_bytes)
            assert str(caught.value).startswith(
                f"{name}: {address}: the server does not know this method of npugrad.v1; "
                f"it must speak npugrad.v1, as this client of version {version('npugrad')} does"
            )
            assert (caught.value.tries, caught.value.retryable) == (1, False)
            assert isinstance(caught.value.cause, grpc.RpcError)
