"""A gRPC server that answers small unary calls at once, with bytes it has ready.

What is left of a call is the client and gRPC. Run as ``python -m tests.benchmarks.canned``; it prints its
address as a line of JSON and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import grpc.aio
import numpy as np
from tests.benchmarks.contestant import tell

from npugrad import codec
from npugrad.call import ExecutionInfo
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad_client._channels import STREAM_FROM_BYTES

SERVICE = "npugrad.v1.BackwardService"


def small_call(record: OpRecord) -> CallMeta:
    """The call that the server knows the answer to: the smallest that is of use."""
    dtype = record.inputs[0].dtypes[Product.ATLAS_A2][0]
    return record.build(dtype=dtype, **record.workloads.named["tiny"].sizes)


def _travels_whole(record: OpRecord) -> bool:
    metas = small_call(record).inputs.values()
    return sum(meta.nbytes for meta in metas if meta is not None) < STREAM_FROM_BYTES


SMALL = tuple(name for name, record in OPERATORS.items() if _travels_whole(record))
"""Operators with such a call. Floyd has none: the smallest that its documents allow is streamed."""


def answer(record: OpRecord) -> bytes:
    rng = np.random.default_rng(3)
    metas = record.infer(small_call(record))
    contents = {
        name: memoryview(rng.standard_normal(meta.shape).astype(meta.dtype.numpy).tobytes())
        for name, meta in metas.items()
        if meta is not None
    }
    message, _ = codec.encode_response(
        record, metas, contents, ExecutionInfo("test", "test:0", Product.ATLAS_A2)
    )
    found: bytes = message.SerializeToString()
    return found


def _handler(ready: bytes) -> Any:
    async def reply(_: bytes, __: Any) -> bytes:
        return ready

    return grpc.unary_unary_rpc_method_handler(reply)


async def _serve() -> None:
    methods = {OPERATORS[name].rpc: _handler(answer(OPERATORS[name])) for name in SMALL}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tell({"address": f"127.0.0.1:{port}"})
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(_serve())
