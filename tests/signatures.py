"""Requests and what their signatures are made of."""

from __future__ import annotations

from typing import Any

from tests.synthetic.record import REGISTRY as SYNTHETIC

from npugrad import codec
from npugrad.generators import Draw
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.ops import get_operator
from npugrad.recipe import Recipe
from npugrad.registry import REGISTRY, Registry
from npugrad.signature import Signature, SignatureReader

NORM = get_operator("group_norm_backward")
SEED = 7
_READERS = {
    message.DESCRIPTOR.full_name: SignatureReader(message.DESCRIPTOR, "unary")
    for registry in (REGISTRY, SYNTHETIC)
    for message in registry.requests.values()
}


def reader(message: type[Any]) -> SignatureReader:
    """The reader of a request."""
    return _READERS[message.DESCRIPTOR.full_name]


def read(message: Any) -> Signature | None:
    return reader(type(message)).read(message.SerializeToString())


def is_plain(message: Any) -> bool:
    return reader(type(message)).is_plain(message.SerializeToString())


def key(message: Any) -> bytes:
    found = read(message)
    assert found is not None
    return found.key


def stripped(message: Any) -> Any:
    """The message with nothing in it that a signature leaves out."""
    bare = type(message)()
    bare.CopyFrom(message)
    bare.options.label, bare.options.priority = "", 0
    if not bare.options.ByteSize():
        bare.ClearField("options")
    for field, tensor in bare.ListFields():
        if field.message_type is None or field.message_type.name != "Tensor":
            continue
        tensor.padding = b""
        kind = tensor.WhichOneof("content")
        if kind == "data":
            tensor.data = bytes(len(tensor.data))
        elif kind == "recipe":
            tensor.recipe.seed, tensor.recipe.digest = 0, b""
        elif kind == "region":
            tensor.region.name, tensor.region.offset = "", 0
    return bare


def contents(call: CallMeta, fill: bytes) -> dict[str, memoryview]:
    return {n: memoryview(fill * m.content_bytes) for n, m in call.inputs.items() if m is not None}


def request(
    record: OpRecord, call: CallMeta, fill: bytes = b"\0", registry: Registry = REGISTRY, **more: Any
) -> Any:
    made, _ = codec.encode_request(
        call.inputs, contents(call, fill), record, call.attrs, call.outputs, registry=registry, **more
    )
    return made


def norm(**more: Any) -> Any:
    return request(NORM, NORM.build(), **more)


def of_recipes(seed: int = SEED, digest: bytes = b"") -> Any:
    call = NORM.build()
    metas = {name: meta for name, meta in call.inputs.items() if meta is not None}
    made = {n: Recipe.of(Draw("uniform", (0.5, 2.0), 3), m, seed, digest) for n, m in metas.items()}
    return codec.encode_request(call.inputs, made, NORM, call.attrs)[0]


def announced(nbytes: int = 3) -> Any:
    message = norm()
    message.input.chunked_bytes = nbytes
    return message


def in_region(name: str = "r", offset: int = 0, byte_size: int = 8) -> Any:
    message = norm()
    message.input.region.name, message.input.region.offset = name, offset
    message.input.region.byte_size = byte_size
    return message
