"""Round trips of S bytes each way: our client, server and worker process against bare transports.

What is called
    `grid_sampler_2d_backward`, one output point: the image (S bytes) goes out, its gradient (S bytes) comes
    back, and the other tensors are 20 bytes. Without the gradient of the grid the image would not travel, for
    no result would depend on it; group_norm_backward would send two tensors for each that it returns. The
    device is ``test:1?ms=0``, which writes zeros: what is left is encoding, validation, admission, the copy
    into shared memory, the hop to the worker process, S bytes of zeros written there, and the way back into a
    new NumPy array. (Into an array of the caller's, by `out`, it took as long: 1.06 [0.65, 1.58] at 64 MiB.)
    Calls of up to 2 MiB are unary, the others streamed in chunks of 1 MiB; that is the client's own choice.

What limits it
    grpcio takes and gives `bytes` only: every message is copied into fresh memory at both ends under the
    interpreter's lock, and fresh memory costs about ten times a copy (page faults). Our server's processes
    have malloc keep what is freed (`keep_freed_memory`), and chunks of 1 MiB fit what it keeps, which is why
    streams beat one large message; protobuf would add a copy of each chunk when it is built, serialized,
    parsed and read, so that ours are written and read by hand. A stream costs about two unary calls before
    the first byte. The ceiling is raw TCP: two copies in the kernel, none in user space. Two cores are shared
    by client, front process and worker.

What was expected before the first run
    1 and 64 KiB: 0.3 to 0.5 against either bare grpcio (a second process, validation and a log line for each
    call against none of these). 1 MiB: about 1 against protobuf bytes, 0.5 against identity. 16 and 64 MiB: 2
    to 4 and 1.2 to 2. Against raw TCP: 0.03 to 0.1 for small calls, 0.2 to 0.4 for large ones.
    Found wrong: small calls came out at 0.2 to 0.3, and 1 MiB at 0.5 and 0.1. There, blocks of the size of a
    chunk were mapped anew for each copy, on both sides; `keep_freed_memory` came of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import numpy as np
from tests.benchmarks.echo import payload
from tests.benchmarks.goals import Figure, Goal, at_least, promised
from tests.benchmarks.harness import Effort, Result, compare
from tests.benchmarks.operands import Array, Call
from tests.benchmarks.processes import Entry, Field, bare_server
from tests.benchmarks.service_under_test import service
from tests.operators import GRID_SAMPLER

from npugrad.call import CallOptions
from npugrad.v1 import backward_pb2_grpc
from npugrad_client import Client
from npugrad_client._call import prepare
from npugrad_client._frames import unary_request

TITLE = "Transport: S bytes out and S bytes back over loopback"
SUBTITLE = "simulated device, which writes zeros; the peers only echo, their gRPC calls are unary"
DEVICES = "test:1?ms=0"
OURS, STUB = "npugrad", "generated stub"
PROTOBUF, IDENTITY, TCP = "grpcio, protobuf bytes", "grpcio, identity", "raw TCP"
_ROW_BYTES = 256
CASES = {
    "1 KiB": 2**10,
    "1 KiB, generated stub": 2**10,
    "64 KiB": 2**16,
    "1 MiB": 2**20,
    "16 MiB": 2**24,
    "64 MiB": 2**26,
}
GOALS: Mapping[str, Mapping[str, Goal]] = {
    "1 KiB": {PROTOBUF: at_least(0.42, 0.55)},
    "1 KiB, generated stub": {PROTOBUF: at_least(0.5, 0.65)},
    "64 KiB": {PROTOBUF: at_least(0.5, 0.7)},
    "1 MiB": {PROTOBUF: at_least(1.0, 1.5)},
    "16 MiB": {PROTOBUF: at_least(5, 7), TCP: at_least(0.5, 0.6)},
    "64 MiB": {PROTOBUF: at_least(6, 8), TCP: at_least(0.5, 0.6)},
}
"""What was promised of a case, by peer."""
_QUICK = 2


def arguments(nbytes: int) -> dict[str, Any]:
    """Those of a call that sends an image of so many bytes and returns its gradient."""
    point = np.zeros((1, 1, 1, 2), np.float32)
    return {
        "grad_output": point[..., :1],
        "input": payload(nbytes).reshape(1, 1, -1, _ROW_BYTES // 4),
        "grid": point,
        "interpolation_mode": 0,
        "padding_mode": 0,
        "align_corners": False,
        "output_mask": (True, True),
    }


class ServiceEcho:
    def __init__(self, address: str) -> None:
        self._client = Client(address)

    def prepare(self, case: Mapping[str, Any]) -> Call:
        given = arguments(case["nbytes"])

        def call() -> Mapping[str, Array]:
            return {"echo": self._client.grid_sampler_2d_backward(**given).input_grad}

        _check(call(), given["input"])
        return call


class StubEcho:
    """The generated stub, with a request that is there, for the service without its client."""

    def __init__(self, address: str) -> None:
        self._stub = backward_pb2_grpc.BackwardServiceStub(grpc.insecure_channel(address))

    def prepare(self, case: Mapping[str, Any]) -> Call:
        given = arguments(case["nbytes"])
        image = given["input"]
        operands = {param.name: given.pop(param.name) for param in GRID_SAMPLER.inputs}
        request = unary_request(prepare(GRID_SAMPLER, operands, given, None, CallOptions()))
        method = getattr(self._stub, GRID_SAMPLER.rpc)

        def call() -> Mapping[str, Array]:
            data = method(request).input_grad.data
            return {"echo": np.frombuffer(data, np.float32).reshape(image.shape)}

        _check(call(), image)
        return call


def _check(found: Mapping[str, Array], image: Array) -> None:
    if found["echo"].shape != image.shape or found["echo"].any():
        raise RuntimeError(
            "the reply is not what the simulated device writes: zeros in the shape of the image"
        )


def run(effort: Effort) -> Iterator[Result | Figure]:
    echo = "tests.benchmarks.echo"
    with service(DEVICES) as ours, bare_server("grpc") as grpc_server, bare_server("tcp") as tcp:
        entries = {
            OURS: Entry(f"{__name__}:ServiceEcho", {"address": ours}),
            STUB: Entry(f"{__name__}:StubEcho", {"address": ours}),
            PROTOBUF: Entry(f"{echo}:GrpcEcho", {"address": grpc_server, "message": "protobuf"}),
            IDENTITY: Entry(f"{echo}:GrpcEcho", {"address": grpc_server, "message": "identity"}),
            TCP: Entry(f"{echo}:TcpEcho", {"address": tcp}),
        }
        with Field(effort, entries) as contestants:
            for name, nbytes in effort.first(CASES.items(), _QUICK):
                caller = STUB if name.endswith(STUB) else OURS
                chosen = contestants.prepared({"nbytes": nbytes}, (caller, PROTOBUF, IDENTITY, TCP))
                slots = {who: contestant.median_s for who, contestant in chosen.items()}
                result = compare(name, "float32", slots, effort)
                yield result
                yield from promised(result, GOALS[name])
