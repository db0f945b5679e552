"""A gRPC server that answers small unary calls at once, with bytes it has ready.

What is left of a call is the client and gRPC. Run as ``python -m tests.benchmarks.canned``; it prints its
address as a line of JSON and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import numpy as np

from npugrad import codec
from npugrad.call import ExecutionInfo
from npugrad.ops import OPERATORS
from npugrad.products import Product

if TYPE_CHECKING:
    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord

SERVICE = "npugrad.v1.BackwardService"
SMALL: dict[str, dict[str, Any]] = {
    "multi_scale_deformable_attention_grad": {
        "bs": 1,
        "nq": 4,
        "nh": 2,
        "ch": 8,
        "levels": ((4, 4), (2, 2)),
        "points": 4,
    },
    "grid_sampler_2d_backward": {"n": 1, "c": 3, "h": 8, "w": 8, "oh": 8, "ow": 8},
    "group_norm_backward": {"n": 2, "c": 8, "hxw": 16, "group": 4},
}
"""Sizes of small calls by operator. Floyd has none: the smallest that its documents allow is streamed."""


def small_call(record: OpRecord) -> CallMeta:
    """The call that the server knows the answer to."""
    return record.build(dtype=record.inputs[0].dtypes[Product.ATLAS_A2][0], **SMALL[record.name])


def answer(record: OpRecord) -> bytes:
    """Its answer, random data."""
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
    sys.stdout.write(json.dumps({"address": f"127.0.0.1:{port}"}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(_serve())
