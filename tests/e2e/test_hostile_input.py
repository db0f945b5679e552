"""Bad input: every kind of it, for every operator, gets a typed error or a right result, and harms nothing.

After each test `unharmed` looks at the server: the same process, healthy, no byte in use, a right answer.
Streams, values and sizes are in `test_hostile_calls`, random messages in `test_hostile_messages`, bytes and
metadata in `test_hostile_bytes`, clients that vanish or talk nonsense in `test_hostile_connections`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import pytest
from tests.calls import Sample, call_execute, call_unary, failure_of
from tests.e2e.harness import RECORDS, Wire, both_ways, differences, each_operator, local_results, outputs_of
from tests.operators import FLOYD, GRID_SAMPLER, GROUP_NORM
from tests.summary import Tally

from npugrad import codec
from npugrad.attributes import KINDS
from npugrad.codec import encode_meta
from npugrad.errors import (
    InvalidOperand,
    MalformedRequest,
    MalformedTensor,
    NpugradError,
    NullOperand,
    OperatorError,
    TilingError,
    UnsupportedOperator,
)
from npugrad.meta import MAX_RANK, TensorMeta
from npugrad.operator import OpRecord
from npugrad.v1 import backward_pb2, operators_pb2, server_pb2, tensor_pb2, validation_pb2
from npugrad.validation import validate_call
from npugrad_client import Client

Edit = Callable[[Any], None]

pytestmark = pytest.mark.usefixtures("unharmed")

REQUIRED = [
    pytest.param(s, p.name, id=f"{s.name}-{p.name}") for s in RECORDS for p in s.inputs if not p.optional
]
UNCHECKED = {(name, "output_mask") for name in ("grid_sampler_2d_backward", "grid_sampler_3d_backward")}
"""Attributes with which a call succeeds when they are null, whatever else it has."""
NULL_OF_161002 = ("group_norm_backward",)
"""Operators whose pages give a null mask this number, and not 161001."""
ATTRIBUTES = [pytest.param(s, p.name, id=f"{s.name}-{p.name}") for s in RECORDS for p in s.attrs]


def small_message(made: Sample) -> Any:
    """The request of a legal call; Floyd's contents, which are megabytes, are left out."""
    if made.record is not FLOYD:
        return made.message()
    return codec.encode_request(made.call.inputs, {}, made.record, made.call.attrs)[0]


# ----------------------------------------------------------------------------------- null and forgotten


@pytest.mark.parametrize(("record", "name"), REQUIRED)
def test_null_operand(record: OpRecord, name: str, client: Client, legal: Mapping[str, Sample]) -> None:
    made = legal[record.name]
    with pytest.raises(NullOperand) as caught:
        getattr(client, record.name)(**{**made.arrays, name: None}, **made.call.attrs)
    assert (caught.value.code, caught.value.constraint) == (161001, f"{name}.not_null")
    assert str(caught.value).startswith(f"{record.name}: {name}: found null; expected a tensor")


@pytest.mark.parametrize(("record", "name"), ATTRIBUTES)
def test_forgotten_attribute(
    record: OpRecord, name: str, channel: grpc.Channel, legal: Mapping[str, Sample]
) -> None:
    message = small_message(legal[record.name])
    message.ClearField(name)
    kind = next(param.type for param in record.attrs if param.name == name)
    if record.accepts_unchecked(legal[record.name].call.with_attrs(**{name: None})):
        # Documented: null succeeds, nothing is computed.
        assert (record.name, name) in UNCHECKED
        assert call_unary(channel, record, message).metas == dict.fromkeys(p.name for p in record.outputs)
        return
    for error in both_ways(channel, record, message):
        if KINDS[kind].is_pointer:
            assert type(error) is (InvalidOperand if record.name in NULL_OF_161002 else NullOperand)
            assert error.constraint == f"{name}.not_null"
        else:
            assert isinstance(error, MalformedRequest)
            assert (error.operator, error.operand) == (record.name, name)
            assert "found nothing; expected the attribute to be set" in str(error)


@each_operator
def test_nothing_but_nulls(record: OpRecord, channel: grpc.Channel, legal: Mapping[str, Sample]) -> None:
    """The first is told, and all are counted, in a status that fits."""
    message = small_message(legal[record.name])
    for param in record.inputs:
        message.ClearField(param.name)
    for param in record.outputs:
        getattr(message, param.name).SetInParent()
    required = [param.name for param in record.inputs if not param.optional]
    for error in both_ways(channel, record, message):
        assert isinstance(error, OperatorError)
        assert (error.code, error.constraint) == (161001, f"{required[0]}.not_null")
        assert error.violations_total == len(required) + len(record.outputs)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"priority": 101}, "priority"),
        ({"priority": -(2**31)}, "priority"),
        ({"label": "x" * 65}, "label"),
        ({"label": "a\nb"}, "label"),
        ({"label": "\u00e9"}, "label"),
    ],
)
def test_options_out_of_range(
    options: dict[str, Any], culprit: str, channel: grpc.Channel, legal: Mapping[str, Sample]
) -> None:
    message = legal[GROUP_NORM.name].message()
    message.options.CopyFrom(operators_pb2.CallOptions(**options))
    for error in both_ways(channel, GROUP_NORM, message):
        assert isinstance(error, MalformedRequest)
        assert error.operand == culprit


INTEGERS = (-(2**63), -(2**31) - 1, -1, 0, 5, 2**31, 2**63 - 1)
ATTRIBUTE_VALUES = [
    pytest.param(s, p.name, value, id=f"{s.name}-{p.name}-{value}")
    for s in RECORDS
    for p in s.attrs
    if p.type == "int64"
    for value in INTEGERS
]


@pytest.mark.parametrize(("record", "name", "value"), ATTRIBUTE_VALUES)
def test_attribute_out_of_range(
    record: OpRecord, name: str, value: int, channel: grpc.Channel, legal: Mapping[str, Sample]
) -> None:
    made = legal[record.name]
    message = made.message()
    setattr(message, name, value)
    expected = validate_call(record, made.call.with_attrs(**{name: value}))
    if not expected.status:
        assert value in (0, 5), "a wild value was found legal"
        assert call_unary(channel, record, message).contents
        return
    for error in both_ways(channel, record, message):
        assert isinstance(error, (InvalidOperand, TilingError))
        assert (error.code, error.constraint) == (expected.status, expected.violations[0].id)


@pytest.mark.parametrize("scale", [math.nan, -math.inf, 1e308, -1.0])
def test_any_scale_is_computed(scale: float, client: Client, legal: Mapping[str, Sample]) -> None:
    """The documents limit no value of it."""
    made = legal[FLOYD.name]
    call = made.call.with_attrs(scale_value=scale)
    result = getattr(client, FLOYD.name)(**made.arrays, scale_value=scale)
    assert differences(local_results(FLOYD, call, made.arrays), outputs_of(FLOYD, result)) == []


@pytest.mark.parametrize("mask", [(), (True,), (True,) * 4, (False,) * 1000])
@pytest.mark.parametrize("record", [GRID_SAMPLER, GROUP_NORM], ids=lambda record: record.name)
def test_mask_of_the_wrong_length(
    record: OpRecord, mask: tuple[bool, ...], channel: grpc.Channel, legal: Mapping[str, Sample]
) -> None:
    message = legal[record.name].message()
    message.output_mask.values[:] = mask
    for error in both_ways(channel, record, message):
        assert isinstance(error, InvalidOperand)
        assert error.operator == record.name
        assert error.violations[0].operands == ("output_mask",)


# ---------------------------------------------------------------------------------------------- tensors


def _meta(**fields: Any) -> Edit:
    def edit(tensor: Any) -> None:
        for name, value in fields.items():
            if isinstance(value, list):
                getattr(tensor.meta, name)[:] = value
            else:
                setattr(tensor.meta, name, value)

    return edit


def _shape(change: Callable[[list[int]], list[int]]) -> Edit:
    def edit(tensor: Any) -> None:
        tensor.meta.shape[:] = change(list(tensor.meta.shape))

    return edit


def _steps(change: Callable[[tuple[int, ...]], list[int]]) -> Edit:
    def edit(tensor: Any) -> None:
        tensor.meta.strides[:] = change(TensorMeta("int8", tuple(tensor.meta.shape)).contiguous_strides)

    return edit


def _content(change: Callable[[bytes], bytes]) -> Edit:
    def edit(tensor: Any) -> None:
        tensor.data = change(tensor.data)

    return edit


def _kind(name: str) -> Edit:
    def edit(tensor: Any) -> None:
        getattr(tensor, name).SetInParent()

    return edit


DOCUMENTED = ("ACLNN_ERR_PARAM_INVALID", "ACLNN_ERR_INNER_TILING_ERROR")
# What is done to one operand, and the reasons it may be refused with; a text is what MALFORMED_TENSOR says.
TENSORS: dict[str, tuple[Edit, tuple[str, ...] | str]] = {
    "dtype_complex": (_meta(data_type=tensor_pb2.DATA_TYPE_COMPLEX64), DOCUMENTED),
    "dtype_string": (_meta(data_type=tensor_pb2.DATA_TYPE_STRING), DOCUMENTED),
    "dtype_int16": (_meta(data_type=tensor_pb2.DATA_TYPE_INT16), DOCUMENTED),
    "dtype_float8": (_meta(data_type=tensor_pb2.DATA_TYPE_FLOAT8_E4M3FN), DOCUMENTED),
    "dtype_unset": (_meta(data_type=0), "found data type 0;"),
    "dtype_unknown": (_meta(data_type=12345), "found data type 12345"),
    "dtype_negative": (_meta(data_type=-1), "found data type -1"),
    "format_unknown": (_meta(format=99), "found format 99"),
    "rank_up": (_shape(lambda shape: [*shape, 7]), DOCUMENTED),
    "rank_9": (_shape(lambda shape: [*shape, *[1] * (9 - len(shape))]), DOCUMENTED),
    "rank_20": (_shape(lambda shape: [1] * 20), (*DOCUMENTED, "MALFORMED_TENSOR")),
    "rank_33": (_shape(lambda shape: [1] * (MAX_RANK + 1)), f"found rank {MAX_RANK + 1}"),
    "rank_60_000": (_shape(lambda shape: [1] * 60_000), "found rank 60000"),
    "shape": (_shape(lambda shape: [*shape[:-1], shape[-1] + 3]), (*DOCUMENTED, "MALFORMED_TENSOR")),
    "size_negative": (_shape(lambda shape: [-1, *shape[1:]]), "found shape [-1"),
    "size_least": (_shape(lambda shape: [-(2**63), *shape[1:]]), "found shape [-9223372036854775808"),
    "size_overflow": (_shape(lambda shape: [2**62, 2**62]), "2^63 - 1 bytes"),
    "size_wraps_to_zero": (_shape(lambda shape: [2**32, 2**32]), "2^63 - 1 bytes"),
    "size_wraps_around": (_shape(lambda shape: [2**32 + 1, 2**32 - 1]), "2^63 - 1 bytes"),
    "size_greatest": (_shape(lambda shape: [2**63 - 1]), "2^63 - 1 bytes"),
    "size_zero_and_greatest": (_shape(lambda shape: [0, 2**63 - 1, 2**63 - 1]), DOCUMENTED),
    "strides_too_few": (_meta(strides=[1], shape=[2, 3]), "found 1 strides, rank 2"),
    "strides_60_000": (_meta(strides=[1] * 60_000), "found 60000 strides"),
    "strides_too_many": (_steps(lambda steps: [*steps, 1]), "found"),
    "strides_negative": (_steps(lambda steps: [-steps[0], *steps[1:]]), "found strides"),
    "strides_outside": (_steps(lambda steps: [2 * step for step in steps]), "bytes of content; expected"),
    "strides_overflow": (_steps(lambda steps: [2**62] * len(steps)), "found"),
    "strides_inside": (_steps(lambda steps: [0] * len(steps)), "found"),
    "offset": (_meta(storage_offset=1), "bytes of content; expected"),
    "offset_negative": (_meta(storage_offset=-1), "found storage offset -1"),
    "offset_greatest": (_meta(storage_offset=2**63 - 1), "found"),
    "content_shorter": (_content(lambda data: data[:-1]), "bytes of content; expected"),
    "content_longer": (_content(lambda data: data + b"\0"), "bytes of content; expected"),
    "content_empty": (_content(lambda data: b""), "found"),
    "content_missing": (lambda tensor: tensor.ClearField("data"), "found"),
    "content_twice": (_content(lambda data: data * 2), "bytes of content; expected"),
    "content_in_shared_memory": (_kind("region"), ("CONTENT_UNSUPPORTED",)),
    "content_by_recipe": (_kind("recipe"), ("RECIPE_INVALID",)),
    "content_unrelated": (lambda tensor: setattr(tensor, "chunked_bytes", 2**64 - 1), "found"),
    "meta_missing": (lambda tensor: tensor.ClearField("meta"), "found"),
}


@each_operator
@pytest.mark.parametrize("what", TENSORS)
def test_bad_tensor(
    what: str, record: OpRecord, channel: grpc.Channel, legal: Mapping[str, Sample], tally: Tally
) -> None:
    """Each operand in turn is broken in one way."""
    edit, expected = TENSORS[what]
    for param in record.inputs if record is not FLOYD else record.inputs[::4]:
        made = legal[record.name]
        if made.call.inputs[param.name] is None or (
            what == "shape" and not made.call.tensor(param.name).rank
        ):
            continue
        for error in refusals(channel, made, param.name, edit, announce=not what.startswith("content")):
            assert error.operator == record.name
            assert param.name in str(error)
            if isinstance(expected, str):
                assert isinstance(error, MalformedTensor)
                assert error.operand == param.name
                assert str(error).startswith(f"{record.name}: {param.name}: found")
                assert expected in str(error)
            else:
                assert error.reason in expected, error
            tally("hostile: tensors refused", 1)


@each_operator
@pytest.mark.parametrize("edit", [_shape(lambda shape: [1] * 10**6), _meta(strides=[1] * 100_000)])
def test_more_axes_than_are_read(
    edit: Edit, record: OpRecord, channel: grpc.Channel, legal: Mapping[str, Sample]
) -> None:
    """Reading them would hold the event loop: the message is refused for its size, whatever is in it."""
    errors = refusals(channel, legal[record.name], record.inputs[0].name, edit, announce=True)
    # A unary method tells the operator; of a stream it would have to be read.
    assert [error.operator for error in errors] == [record.name, "", ""]
    for error in errors:
        assert isinstance(error, MalformedRequest)
        assert "more than 65536 bytes besides contents, or 4096 fields" in str(error)


def refusals(
    channel: grpc.Channel, made: Sample, name: str, edit: Edit, *, announce: bool
) -> list[NpugradError]:
    """How a call with an edited operand is refused, with its contents and as they are only announced."""
    message = made.message()
    edit(getattr(message, name))
    errors = both_ways(channel, made.record, message)
    if announce:
        head = made.header()[0]
        edit(getattr(getattr(head.header, made.record.name), name))
        errors.append(failure_of(lambda: call_execute(channel, [head])).error)
    return errors


@each_operator
@pytest.mark.parametrize("field", ["dtype", "shape"])
def test_bad_declared_output(
    record: OpRecord, field: str, channel: grpc.Channel, legal: Mapping[str, Sample]
) -> None:
    made = legal[record.name]
    for output in record.outputs:
        message = small_message(made)
        meta = record.infer(made.call)[output.name]
        assert meta is not None
        wrong = (
            TensorMeta("int8", meta.shape) if field == "dtype" else TensorMeta(meta.dtype, (*meta.shape, 2))
        )
        encode_meta(wrong, getattr(message, output.name).meta)
        for error in both_ways(channel, record, message):
            assert isinstance(error, (InvalidOperand, TilingError))
            assert error.violations[0].operands[0] == output.name
        getattr(message, output.name).meta.shape[:] = [-5]
        for error in both_ways(channel, record, message):
            assert isinstance(error, MalformedTensor)
            assert error.operand == output.name


# --------------------------------------------------------------------------- unknown operators and enums


def test_header_that_names_no_operator(wire: Wire, channel: grpc.Channel) -> None:
    unknown = backward_pb2.ExecuteHeader.FromString(b"\xfa\x01\x03\x0a\x01\x00")  # field 31 of a newer client
    for call, kind, found in (
        (backward_pb2.ExecuteHeader(), MalformedRequest, "no call"),
        (unknown, UnsupportedOperator, "a call of an unknown operator"),
    ):
        frame = backward_pb2.ExecuteRequest(header=call)
        for act in (
            lambda frame=frame: call_execute(channel, [frame]),
            lambda call=call: wire.validation.Validate(validation_pb2.ValidateRequest(call=call)),
        ):
            error = failure_of(act).error
            assert (type(error), error.operator) == (kind, "")
            assert f"found {found}; expected one of multi_scale" in str(error)


@pytest.mark.parametrize("number", [4, 99, -1, 2**31 - 1])
def test_unknown_product(number: Any, wire: Wire, legal: Mapping[str, Sample]) -> None:
    call = legal[GROUP_NORM.name].header()[0].header
    for act in (
        lambda: wire.validation.Validate(validation_pb2.ValidateRequest(call=call, product=number)),
        lambda: wire.server.ListOperators(server_pb2.ListOperatorsRequest(product=number)),
    ):
        error = failure_of(act).error
        assert isinstance(error, MalformedRequest)
        assert f"found {number}; expected one of 1 (atlas-training)" in str(error)
