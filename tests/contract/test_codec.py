"""Messages and calls: what is encoded is decoded, and what is not sane is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from npugrad import codec, layout
from npugrad.attributes import AttrType
from npugrad.call import CallOptions, ExecutionInfo, VerifiedOutput
from npugrad.errors import MalformedRequest, MalformedTensor, RequestError
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord, TensorParam
from npugrad.ops import OPERATORS, get_operator
from npugrad.products import Product
from npugrad.registry import REGISTRY
from npugrad.v1 import backward_pb2, operators_pb2, tensor_pb2

A2 = Product.ATLAS_A2
NORM = get_operator("group_norm_backward")
GRID = get_operator("grid_sampler_2d_backward")


def _contents(call: CallMeta) -> dict[str, memoryview]:
    return {n: memoryview(bytes(m.content_bytes)) for n, m in call.inputs.items() if m is not None}


def _encoded(record: OpRecord, call: CallMeta, **extra: Any) -> Any:
    return codec.encode_request(call.inputs, _contents(call), record, call.attrs, call.outputs, **extra)[0]


def _norm() -> tuple[CallMeta, Any]:
    call = NORM.build()
    return call, _encoded(NORM, call)


def test_requests_come_back(record: OpRecord) -> None:
    options = CallOptions(deterministic=True, priority=-3, label="tests", verify=True)
    for sample in record.samples(A2):
        message = _encoded(record, sample.call, options=options)
        wire = codec.decode_request(record, type(message).FromString(message.SerializeToString()), A2)
        assert wire.call == sample.call
        assert wire.options == options
        codec.check_contents(wire, chunked=False)


FIELDS: Mapping[AttrType, str] = {
    "int64": "TYPE_INT64",
    "int32": "TYPE_INT32",
    "int8": "TYPE_INT32",
    "uint64": "TYPE_UINT64",
    "double": "TYPE_DOUBLE",
    "float": "TYPE_FLOAT",
    "bool": "TYPE_BOOL",
    "string": "TYPE_STRING",
    "int64_array": "Int64Array",
    "float_array": "FloatArray",
    "bool_array": "BoolArray",
    "scalar": "Scalar",
}
"""The type of the field of each kind of attribute, or the name of its message."""


def test_messages_have_the_fields_of_the_record_in_its_order(record: OpRecord) -> None:
    """The operand of a chunk is the number of its field less 2: so a caller of any language may count."""
    request = REGISTRY.requests[record.name].DESCRIPTOR
    assert [f.name for f in request.fields] == ["options", *(p.name for p in record.params)]
    assert [f.number for f in request.fields] == list(range(1, 2 + len(record.params)))
    response = REGISTRY.responses[record.name].DESCRIPTOR
    assert [f.name for f in response.fields] == ["info", *(p.name for p in record.outputs)]
    for param in record.params:
        found = request.fields_by_name[param.name]
        if isinstance(param, TensorParam):
            expected = "Tensor" if param.role == "input" else "DeclaredOutput"
        else:
            expected = FIELDS[param.type]
        if found.message_type is None:
            assert found.type == getattr(found, expected)
            assert found.has_presence
        else:
            assert found.message_type.full_name == f"npugrad.v1.{expected}"
    for header in (backward_pb2.ExecuteHeader, backward_pb2.ExecuteResponseHeader):
        assert {f.name for f in header.DESCRIPTOR.fields} == set(OPERATORS)


def test_declared_outputs_travel_with_null_and_inferred_told_apart() -> None:
    call = NORM.build().with_outputs(grad_input=None, grad_gamma=TensorMeta("float32", (6,)))
    decoded = codec.decode_request(NORM, _encoded(NORM, call), A2).call
    assert dict(decoded.outputs) == {"grad_input": None, "grad_gamma": TensorMeta("float32", (6,))}


def test_large_contents_are_announced_and_small_ones_carried() -> None:
    call = NORM.build()
    message, follow = codec.encode_request(
        call.inputs, _contents(call), NORM, call.attrs, chunk_from_bytes=100
    )
    assert [index for index, _ in follow] == [0, 1]
    assert message.grad_out.chunked_bytes == 192
    assert len(message.mean.data) == 24
    wire = codec.decode_request(NORM, message, A2)
    codec.check_contents(wire, chunked=True)
    with pytest.raises(MalformedTensor, match=r"grad_out: found content announced in chunks"):
        codec.check_contents(wire, chunked=False)


def test_a_forgotten_attribute_is_named_and_a_forgotten_mask_is_null() -> None:
    for name in ("n", "c", "hxw", "group"):
        _, message = _norm()
        message.ClearField(name)
        with pytest.raises(MalformedRequest, match=f"{name}: found nothing") as caught:
            codec.decode_request(NORM, message, A2)
        assert caught.value.operand == name
    _, message = _norm()
    message.ClearField("output_mask")
    assert codec.decode_request(NORM, message, A2).call.attrs["output_mask"] is None
    message.output_mask.SetInParent()
    assert codec.decode_request(NORM, message, A2).call.attrs["output_mask"] == ()


BAD_METAS: dict[str, tuple[dict[str, Any], str]] = {
    "unspecified type": ({"data_type": 0}, "data type 0"),
    "unknown type": ({"data_type": 99}, "data type 99"),
    "unknown format": ({"format": 99}, "format 99"),
    "negative size": ({"shape": [2, -3]}, r"shape \[2, -3\]"),
    "negative stride": ({"shape": [2, 3], "strides": [3, -1]}, r"strides \[3, -1\]"),
    "too few strides": ({"shape": [2, 3], "strides": [1]}, "1 strides"),
    "negative offset": ({"shape": [2, 3], "storage_offset": -1}, "storage offset -1"),
    "size beyond int64": ({"shape": [2**62, 4]}, "2\\^63"),
    "span beyond int64": ({"shape": [3], "strides": [2**62]}, "2\\^63"),
    "offset beyond int64": ({"shape": [1], "storage_offset": 2**62}, "2\\^63"),
    "rank": ({"shape": [1] * 40_000}, "rank 40000"),
}


@pytest.mark.parametrize("name", ["mean", "grad_gamma"], ids=["input", "declared output"])
def test_bad_meta_is_malformed_and_names_the_operand(name: str) -> None:
    for fields, text in BAD_METAS.values():
        _, message = _norm()
        field = getattr(message, name)
        field.meta.CopyFrom(tensor_pb2.TensorMeta(**{"data_type": 1, **fields}))
        with pytest.raises(MalformedTensor, match=text) as caught:
            codec.decode_request(NORM, message, A2)
        assert caught.value.operand == name
        assert str(caught.value).startswith(f"group_norm_backward: {name}: ")


def test_content_of_another_length_or_kind_is_malformed() -> None:
    _, message = _norm()
    for length in (0, 23, 25, 2**20):
        message.mean.data = bytes(length)
        wire = codec.decode_request(NORM, message, A2)
        with pytest.raises(MalformedTensor, match=f"mean: found {length} bytes of content; expected 24"):
            codec.check_contents(wire, chunked=False)
    message.mean.ClearField("data")
    wire = codec.decode_request(NORM, message, A2)
    with pytest.raises(MalformedTensor, match="mean: found no content; expected 24 bytes"):
        codec.check_contents(wire, chunked=False)
    message.mean.region.SetInParent()  # which no server takes yet
    wire = codec.decode_request(NORM, message, A2)
    with pytest.raises(RequestError, match="mean: found content of kind region") as caught:
        codec.check_contents(wire, chunked=True)
    assert caught.value.reason == "CONTENT_UNSUPPORTED"


def test_padding_is_ignored() -> None:
    call, message = _norm()
    message.grad_out.padding = b"x" * 13
    assert codec.decode_request(NORM, message, A2).call == call


@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", 101), ("priority", -101), ("label", "x" * 65), ("label", "a\nb"), ("label", "é")],
)
def test_bad_option_is_malformed_and_named(field: str, value: Any) -> None:
    _, message = _norm()
    setattr(message.options, field, value)
    with pytest.raises(MalformedRequest, match=f"{field}: found") as caught:
        codec.decode_request(NORM, message, A2)
    assert caught.value.operand == field


@pytest.mark.parametrize("field", ["execute: header", "validate: call"])
def test_header_without_a_call_is_malformed(field: str) -> None:
    with pytest.raises(MalformedRequest, match=f"^{field}: found no call; expected one of"):
        codec.unwrap(backward_pb2.ExecuteHeader(), field=field)


INFO = ExecutionInfo(
    "cpu", "cpu:3", Product.ATLAS_TRAINING, True, 2**40, 2, 0.5, 0.25, 1.5, 0.125, "request-1",
    "by coordinate rule vendor-a2",
    (VerifiedOutput("grad_input", 1e-6, 1e-7, 0.01), VerifiedOutput("grad_gamma", 0.0, 0.0, 0.0)),
    0.75, 1.75,
)  # fmt: skip


def test_response_round_trip_keeps_bits_and_masked_out_outputs() -> None:
    rng = np.random.default_rng(0)
    array = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    meta, data = layout.content(array)
    metas = {"input_grad": meta, "grid_grad": None}
    message, follow = codec.encode_response(GRID, metas, {"input_grad": data}, INFO)
    assert follow == []
    result = codec.decode_response(GRID, message)
    assert result.metas == metas
    assert result.contents["input_grad"].data == array.tobytes()
    assert result.info == INFO


def test_response_whose_content_does_not_fit_is_refused() -> None:
    meta = TensorMeta("float32", (4,))
    message, _ = codec.encode_response(
        NORM,
        {"grad_input": None, "grad_gamma": meta, "grad_beta": None},
        {"grad_gamma": memoryview(bytes(16))},
        INFO,
    )
    message.grad_gamma.data = bytes(15)
    with pytest.raises(MalformedTensor, match="grad_gamma: found 15 bytes"):
        codec.decode_response(NORM, message)


def test_info_has_the_fields_of_the_message_and_a_product_that_is_known() -> None:
    message = operators_pb2.ExecutionInfo()
    codec.encode_info(INFO, message)
    assert codec.decode_info(message) == INFO
    fields = {f.name for f in message.DESCRIPTOR.fields} - {"timeline"}  # see test_timeline
    assert {f.name for f, _ in message.ListFields()} == fields
    assert replace(codec.decode_info(message), attempts=9) != INFO
    message.product = 77  # type: ignore[assignment]
    with pytest.raises(RequestError):
        codec.decode_info(message)
