"""What the client costs: calls through it against the generated stub alone, and its import.

Calls
    A small call of each operator that has one, to a server that answers at once with bytes it has ready. The
    peer is the stub that grpcio's tools generate, with a request that was built before the clock started,
    and results as views of the answer; it checks nothing and builds nothing. `Client` makes the request
    from arrays, checks operands and attributes, decodes and checks the answer, and fills arrays of its own.

    Limits: the interpreter. A bare call of grpcio takes some 300 microseconds here, most of it threads of
    gRPC waking each other; what the client adds is Python between two of them.

    Expected before the first run: 0.5 to 0.7 with one call at a time.

In flight
    `AsyncClient` with 1, 64 and 1,000 calls in flight on one loop, against the stub of grpc.aio.

    Expected before the first run: 0.4 to 0.6: nothing is waited for any more, only the work counts.

Import
    A fresh interpreter that imports `npugrad_client`, against one that imports grpc, grpc.aio, NumPy and
    protobuf's runtime, which no client could do without.

    Expected before the first run: 0.6 to 0.8.

Found, alone on two cores: 0.8 one at a time, 0.78 with one and 0.62 with 64 and 1,000 in flight; the import
takes some 75 ms beyond that of the libraries (0.65).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import grpc
import grpc.aio
import numpy as np
from tests.benchmarks.canned import SMALL, small_call
from tests.benchmarks.contestant import difference
from tests.benchmarks.goals import Figure, Goal, at_least, promised
from tests.benchmarks.harness import Effort, Result, compare
from tests.benchmarks.operands import Array, Call
from tests.benchmarks.processes import ROOT, Entry, Field, LineProcess

from npugrad.call import CallOptions
from npugrad.operator import OpRecord
from npugrad.ops import get_operator
from npugrad.v1 import backward_pb2_grpc
from npugrad_client import AsyncClient, Client
from npugrad_client._call import prepare
from npugrad_client._frames import unary_request

TITLE = "Client: what it adds to a bare gRPC call"
SUBTITLE = "smallest calls to a server that answers at once; bursts on one event loop; importing it"
OURS, STUB, IMPORTS = "npugrad", "generated stub", "grpc, NumPy and protobuf alone"
IN_FLIGHT = (1, 64, 1000)
GOALS: Mapping[str, Mapping[str, Goal]] = {
    **{f"{operator}, one at a time": {STUB: at_least(0.85, 0.95)} for operator in SMALL},
    "asyncio, 1000 in flight": {STUB: at_least(0.7, 0.9)},
}
"""What was promised of a case, by peer."""
_LIBRARIES = "import grpc, grpc.aio, numpy, google.protobuf.message, google.protobuf.descriptor_pool"


def _operands(record: OpRecord) -> tuple[dict[str, Array | None], Mapping[str, Any]]:
    call = small_call(record)
    return record.make_inputs(call, np.random.default_rng(5)), call.attrs


def _outputs(record: OpRecord) -> list[str]:
    return [name for name, meta in record.infer(small_call(record)).items() if meta is not None]


def _request(record: OpRecord) -> Any:
    operands, attrs = _operands(record)
    return unary_request(prepare(record, operands, attrs, None, CallOptions()))


def _views(record: OpRecord, response: Any) -> dict[str, Array]:
    metas = record.infer(small_call(record))
    return {
        name: np.frombuffer(getattr(response, name).data, meta.dtype.numpy).reshape(meta.shape)
        for name, meta in metas.items()
        if meta is not None
    }


class ClientCall:
    def __init__(self, address: str) -> None:
        self._client = Client(address)

    def prepare(self, case: Mapping[str, Any]) -> Call:
        record = get_operator(case["operator"])
        (operands, attrs), names = _operands(record), _outputs(record)
        method = getattr(self._client, record.name)

        def call() -> Mapping[str, Array]:
            grads = method(**operands, **attrs)
            return {name: getattr(grads, name) for name in names}

        return call


class StubCall:
    def __init__(self, address: str) -> None:
        self._stub = backward_pb2_grpc.BackwardServiceStub(grpc.insecure_channel(address))

    def prepare(self, case: Mapping[str, Any]) -> Call:
        record = get_operator(case["operator"])
        method, request = getattr(self._stub, record.rpc), _request(record)
        return lambda: _views(record, method(request))


class _Burst:
    """So many calls at once on an event loop; the results are those of the last one."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._loop = asyncio.new_event_loop()

    def _burst(self, count: int, once: Callable[[], Awaitable[Mapping[str, Array]]]) -> Call:
        async def burst() -> Mapping[str, Array]:
            return (await asyncio.gather(*(once() for _ in range(count))))[-1]

        return lambda: self._loop.run_until_complete(burst())


class AsyncClientBurst(_Burst):
    def prepare(self, case: Mapping[str, Any]) -> Call:
        record = get_operator(case["operator"])
        (operands, attrs), names = _operands(record), _outputs(record)
        client = AsyncClient(self._address)
        method = getattr(client, record.name)

        async def once() -> Mapping[str, Array]:
            grads = await method(**operands, **attrs)
            return {name: getattr(grads, name) for name in names}

        return self._burst(case["in_flight"], once)


class AsyncStubBurst(_Burst):
    def prepare(self, case: Mapping[str, Any]) -> Call:
        record = get_operator(case["operator"])
        request = _request(record)

        async def opened() -> Any:
            return backward_pb2_grpc.BackwardServiceStub(grpc.aio.insecure_channel(self._address))

        method = getattr(self._loop.run_until_complete(opened()), record.rpc)

        async def once() -> Mapping[str, Array]:
            return _views(record, await method(request))

        return self._burst(case["in_flight"], once)


class Imports:
    """A fresh interpreter that imports something and ends."""

    def __init__(self, program: str) -> None:
        self._program = program

    def prepare(self, case: Mapping[str, Any]) -> Call:
        command = [sys.executable, "-c", self._program]

        def call() -> Mapping[str, Array]:
            subprocess.run(command, cwd=ROOT, env=dict(os.environ), check=True)
            return {}

        return call


def run(effort: Effort) -> Iterator[Result | Figure]:
    with LineProcess("tests.benchmarks.canned") as server:
        address = server.read()["address"]
        pair = _entries({OURS: "ClientCall", STUB: "StubCall"}, address=address)
        for name in effort.first(SMALL):
            yield from _measured(f"{name}, one at a time", {"operator": name}, pair, effort)
        bursts = _entries({OURS: "AsyncClientBurst", STUB: "AsyncStubBurst"}, address=address)
        for count in effort.first(IN_FLIGHT):
            burst = {"operator": "group_norm_backward", "in_flight": count}
            yield from _measured(f"asyncio, {count} in flight", burst, bursts, effort)
    programs = {OURS: "import npugrad_client", IMPORTS: _LIBRARIES}
    imports = {name: Entry(f"{__name__}:Imports", {"program": text}) for name, text in programs.items()}
    yield from _measured("import", {}, imports, effort)


def _entries(subjects: Mapping[str, str], **arguments: str) -> dict[str, Entry]:
    return {who: Entry(f"{__name__}:{what}", arguments) for who, what in subjects.items()}


def _measured(
    name: str, case: Mapping[str, Any], entries: Mapping[str, Entry], effort: Effort
) -> Iterator[Result | Figure]:
    dtype = ""
    if case:
        record = get_operator(case["operator"])
        dtype = str(small_call(record).tensor(record.inputs[0].name).dtype)
    with Field(effort, entries) as field:
        contestants = field.prepared(case)
        ours, *peers = (contestant.fingerprint for contestant in contestants.values())
        if any(difference(ours, peer) > 0 for peer in peers if ours):
            raise RuntimeError(f"{name}: the results of the two differ")
        slots = {who: contestant.median_s for who, contestant in contestants.items()}
        result = compare(name, dtype, slots, effort)
    yield result
    yield from promised(result, GOALS.get(name, {}))
