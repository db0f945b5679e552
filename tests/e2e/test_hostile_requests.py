"""Hostile requests: every kind of bad input gets a typed error or a right result, and harms nothing.

After each test `unharmed` looks at the server: the same process, healthy, no byte in use, a right answer.
Random messages are in `test_hostile_messages`, calls that are wild as a whole in `test_hostile_calls`,
clients that vanish or talk nonsense in `test_hostile_connections`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any

import grpc
import pytest
from tests.calls import TIMEOUT_S, Sample, call_execute, call_unary, failure_of, sample
from tests.e2e.harness import (
    RECORDS,
    Wire,
    both_ways,
    case,
    differences,
    each_operator,
    local_results,
    outputs_of,
)
from tests.fix_server import ServerProcess
from tests.operators import FLOYD, GRID_SAMPLER, GROUP_NORM, MSDA
from tests.summary import Tally

from npugrad import codec
from npugrad.attributes import KINDS
from npugrad.codec import encode_meta
from npugrad.dtypes import DType
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
from npugrad.operator import AttrParam, OpRecord
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad.v1 import backward_pb2, server_pb2, tensor_pb2, validation_pb2
from npugrad.validation import validate_call
from npugrad_client import Client

Edit = Callable[[Any], None]
Legal = Mapping[str, Sample]

pytestmark = pytest.mark.usefixtures("unharmed")

UNCHECKED = {(name, "output_mask") for name in ("grid_sampler_2d_backward", "grid_sampler_3d_backward")}
"""Attributes with which a call succeeds when they are null, whatever else it has."""
NULL_OF_161002 = ("group_norm_backward",)
"""Operators whose pages give a null mask this number, and not 161001."""


def small_message(made: Sample) -> Any:
    """The request of a legal call; Floyd's contents, which are megabytes, are left out."""
    if made.record is not FLOYD:
        return made.message()
    return codec.encode_request(made.call.inputs, {}, made.record, made.call.attrs)[0]


# ----------------------------------------------------------------------------------- null and forgotten


@each_operator
def test_what_is_missing_is_named(
    record: OpRecord, client: Client, channel: grpc.Channel, legal: Legal
) -> None:
    made = legal[record.name]
    required = [param.name for param in record.inputs if not param.optional]
    for name in required:
        with case(name):
            with pytest.raises(NullOperand) as caught:
                getattr(client, record.name)(**{**made.arrays, name: None}, **made.call.attrs)
            assert (caught.value.code, caught.value.constraint) == (161001, f"{name}.not_null")
            assert str(caught.value).startswith(f"{record.name}: {name}: found null; expected a tensor")
    for attr in record.attrs:
        with case(attr.name):
            assert_missed(channel, made, attr)
    # Of nothing but nulls the first is told, and all are counted, in a status that fits.
    message = small_message(made)
    for param in record.inputs:
        message.ClearField(param.name)
    for param in record.outputs:
        getattr(message, param.name).SetInParent()
    for error in both_ways(channel, record, message):
        assert isinstance(error, OperatorError)
        assert (error.code, error.constraint) == (161001, f"{required[0]}.not_null")
        assert error.violations_total == len(required) + len(record.outputs)


def assert_missed(channel: grpc.Channel, made: Sample, attr: AttrParam) -> None:
    """A call without an attribute is refused, or does nothing where the documents have it so."""
    record, message, name = made.record, small_message(made), attr.name
    message.ClearField(name)
    if record.accepts_unchecked(made.call.with_attrs(**{name: None})):
        assert (record.name, name) in UNCHECKED
        assert call_unary(channel, record, message).metas == dict.fromkeys(p.name for p in record.outputs)
        return
    for error in both_ways(channel, record, message):
        if KINDS[attr.type].is_pointer:
            assert type(error) is (InvalidOperand if record.name in NULL_OF_161002 else NullOperand)
            assert error.constraint == f"{name}.not_null"
        else:
            assert isinstance(error, MalformedRequest)
            assert (error.operator, error.operand) == (record.name, name)
            assert "found nothing; expected the attribute to be set" in str(error)


@each_operator
def test_attribute_out_of_range(record: OpRecord, channel: grpc.Channel, legal: Legal) -> None:
    made = legal[record.name]
    names = [param.name for param in record.attrs if param.type == "int64"]
    values = (-(2**63), -(2**31) - 1, -1, 0, 5, 2**31, 2**63 - 1)
    legal_ones = {"dim": (-1, 0), "ignore_index": values}
    for name in names:
        for value in values:
            with case(name, value):
                message = made.message()
                setattr(message, name, value)
                expected = validate_call(record, made.call.with_attrs(**{name: value}))
                if not expected.status:
                    assert value in legal_ones.get(name, (0, 5)), "a wild value was found legal"
                    assert call_unary(channel, record, message).contents
                    continue
                for error in both_ways(channel, record, message):
                    assert isinstance(error, (InvalidOperand, TilingError))
                    assert (error.code, error.constraint) == (expected.status, expected.violations[0].id)


def test_any_scale_is_computed(client: Client, legal: Legal) -> None:
    """The documents limit no value of it."""
    made = legal[FLOYD.name]
    for scale in (math.nan, -math.inf, 1e308, -1.0):
        with case(scale):
            call = made.call.with_attrs(scale_value=scale)
            result = getattr(client, FLOYD.name)(**made.arrays, scale_value=scale)
            assert differences(local_results(FLOYD, call, made.arrays), outputs_of(FLOYD, result)) == []


@pytest.mark.parametrize("record", [GRID_SAMPLER, GROUP_NORM], ids=lambda record: record.name)
def test_mask_of_the_wrong_length(record: OpRecord, channel: grpc.Channel, legal: Legal) -> None:
    for mask in ((), (True,), (True,) * 4, (False,) * 1000):
        message = legal[record.name].message()
        message.output_mask.values[:] = mask
        for error in both_ways(channel, record, message):
            with case(len(mask)):
                assert isinstance(error, InvalidOperand)
                assert error.operator == record.name
                assert error.violations[0].operands == ("output_mask",)


# ---------------------------------------------------------------------------------------------- tensors


def _put(tensor: Any, **fields: Any) -> None:
    for name, value in fields.items():
        if isinstance(value, list):
            getattr(tensor.meta, name)[:] = value
        else:
            setattr(tensor.meta, name, value)


def _steps(tensor: Any) -> list[int]:
    """The strides that a tensor of its shape has."""
    return list(TensorMeta("int8", tuple(tensor.meta.shape)).contiguous_strides)


def _content(change: Callable[[bytes], bytes]) -> Edit:
    return lambda tensor: setattr(tensor, "data", change(tensor.data))


DOCUMENTED = ("ACLNN_ERR_PARAM_INVALID", "ACLNN_ERR_INNER_TILING_ERROR")
# What is done to one operand, and the reasons it may be refused with; a text is what MALFORMED_TENSOR says.
TENSORS: dict[str, tuple[Edit, tuple[str, ...] | str]] = {
    "dtype_complex": (lambda t: _put(t, data_type=tensor_pb2.DATA_TYPE_COMPLEX64), DOCUMENTED),
    "dtype_string": (lambda t: _put(t, data_type=tensor_pb2.DATA_TYPE_STRING), DOCUMENTED),
    "dtype_int16": (lambda t: _put(t, data_type=tensor_pb2.DATA_TYPE_INT16), DOCUMENTED),
    "dtype_float8": (lambda t: _put(t, data_type=tensor_pb2.DATA_TYPE_FLOAT8_E4M3FN), DOCUMENTED),
    "dtype_unset": (lambda t: _put(t, data_type=0), "found data type 0;"),
    "dtype_unknown": (lambda t: _put(t, data_type=12345), "found data type 12345"),
    "dtype_negative": (lambda t: _put(t, data_type=-1), "found data type -1"),
    "format_unknown": (lambda t: _put(t, format=99), "found format 99"),
    "rank_up": (lambda t: _put(t, shape=[*t.meta.shape, 7]), DOCUMENTED),
    "rank_9": (lambda t: _put(t, shape=[*t.meta.shape, *[1] * (9 - len(t.meta.shape))]), DOCUMENTED),
    "rank_20": (lambda t: _put(t, shape=[1] * 20), (*DOCUMENTED, "MALFORMED_TENSOR")),
    "rank_33": (lambda t: _put(t, shape=[1] * (MAX_RANK + 1)), f"found rank {MAX_RANK + 1}"),
    "rank_60_000": (lambda t: _put(t, shape=[1] * 60_000), "found rank 60000"),
    "shape": (
        lambda t: _put(t, shape=[*t.meta.shape[:-1], t.meta.shape[-1] + 3]),
        (*DOCUMENTED, "MALFORMED_TENSOR"),
    ),
    "size_negative": (lambda t: _put(t, shape=[-1, *t.meta.shape[1:]]), "found shape [-1"),
    "size_least": (
        lambda t: _put(t, shape=[-(2**63), *t.meta.shape[1:]]),
        "found shape [-9223372036854775808",
    ),
    "size_overflow": (lambda t: _put(t, shape=[2**62, 2**62]), "2^63 - 1 bytes"),
    "size_wraps_to_zero": (lambda t: _put(t, shape=[2**32, 2**32]), "2^63 - 1 bytes"),
    "size_wraps_around": (lambda t: _put(t, shape=[2**32 + 1, 2**32 - 1]), "2^63 - 1 bytes"),
    "size_greatest": (lambda t: _put(t, shape=[2**63 - 1]), "2^63 - 1 bytes"),
    "size_zero_and_greatest": (lambda t: _put(t, shape=[0, 2**63 - 1, 2**63 - 1]), DOCUMENTED),
    "strides_too_few": (lambda t: _put(t, strides=[1], shape=[2, 3]), "found 1 strides, rank 2"),
    "strides_60_000": (lambda t: _put(t, strides=[1] * 60_000), "found 60000 strides"),
    "strides_too_many": (lambda t: _put(t, strides=[*_steps(t), 1]), "found"),
    "strides_negative": (lambda t: _put(t, strides=[-_steps(t)[0], *_steps(t)[1:]]), "found strides"),
    "strides_outside": (
        lambda t: _put(t, strides=[2 * step for step in _steps(t)]),
        "bytes of content; expected",
    ),
    "strides_overflow": (lambda t: _put(t, strides=[2**62] * len(_steps(t))), "found"),
    "strides_inside": (lambda t: _put(t, strides=[0] * len(_steps(t))), "found"),
    "offset": (lambda t: _put(t, storage_offset=1), "bytes of content; expected"),
    "offset_negative": (lambda t: _put(t, storage_offset=-1), "found storage offset -1"),
    "offset_greatest": (lambda t: _put(t, storage_offset=2**63 - 1), "found"),
    "content_shorter": (_content(lambda data: data[:-1]), "bytes of content; expected"),
    "content_longer": (_content(lambda data: data + b"\0"), "bytes of content; expected"),
    "content_empty": (_content(lambda data: b""), "found"),
    "content_missing": (lambda tensor: tensor.ClearField("data"), "found"),
    "content_twice": (_content(lambda data: data * 2), "bytes of content; expected"),
    "content_in_shared_memory": (lambda tensor: tensor.region.SetInParent(), ("CONTENT_UNSUPPORTED",)),
    "content_by_recipe": (lambda tensor: tensor.recipe.SetInParent(), ("RECIPE_INVALID",)),
    "content_unrelated": (lambda tensor: setattr(tensor, "chunked_bytes", 2**64 - 1), "found"),
    "meta_missing": (lambda tensor: tensor.ClearField("meta"), "found"),
}


@each_operator
@pytest.mark.parametrize(
    "of_each", [False, pytest.param(True, marks=pytest.mark.deep)], ids=["turns", "each"]
)
def test_bad_tensor(
    of_each: bool, record: OpRecord, channel: grpc.Channel, legal: Legal, tally: Tally
) -> None:
    """An operand is broken in every way: one of each type and rank, or another for each way."""
    made = legal[record.name]
    params = record.inputs if record is not FLOYD else record.inputs[::4]
    given = {param.name: meta for param in params if (meta := made.call.inputs[param.name]) is not None}
    unlike = {(meta.dtype, meta.rank): name for name, meta in given.items()}.values()
    for turn, (what, (edit, expected)) in enumerate(TENSORS.items(), RECORDS.index(record)):
        names = [name for name in (unlike if of_each else given) if is_bad(what, record, name, given[name])]
        for name in names if of_each else [names[turn % len(names)]]:
            for error in refusals(channel, made, name, edit, announce=not what.startswith("content")):
                with case(what, name):
                    assert_named(error, record, name, expected)
                tally("hostile: tensors refused", 1)


def is_bad(what: str, record: OpRecord, name: str, meta: TensorMeta) -> bool:
    """Whether that breaks an operand: any step fits one element, and indices may be int16."""
    if what == "dtype_int16":
        param = next(param for param in record.inputs if param.name == name)
        return DType.INT16 not in param.dtypes[Product.ATLAS_A2]
    return meta.size > 1 or what not in ("shape", "strides_outside", "strides_inside", "strides_overflow")


def assert_named(error: NpugradError, record: OpRecord, name: str, expected: tuple[str, ...] | str) -> None:
    """The error names operator and operand, and is one of those that are expected."""
    assert error.operator == record.name
    assert name in str(error)
    if isinstance(expected, str):
        assert isinstance(error, MalformedTensor)
        assert error.operand == name
        assert str(error).startswith(f"{record.name}: {name}: found")
        assert expected in str(error)
    else:
        assert error.reason in expected, error


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


def test_more_axes_than_are_read(channel: grpc.Channel, legal: Legal) -> None:
    """Reading them would hold the event loop: the message is refused for its size, whatever is in it."""
    for record, edit in (
        (GROUP_NORM, lambda t: _put(t, shape=[1] * 10**6)),
        (MSDA, lambda t: _put(t, strides=[1] * 100_000)),
    ):
        errors = refusals(channel, legal[record.name], record.inputs[0].name, edit, announce=True)
        # A unary method tells the operator; of a stream it would have to be read.
        assert [error.operator for error in errors] == [record.name, "", ""]
        for error in errors:
            assert isinstance(error, MalformedRequest)
            assert "more than 65536 bytes besides contents, or 4096 fields" in str(error)


@each_operator
def test_bad_declared_output(record: OpRecord, channel: grpc.Channel, legal: Legal) -> None:
    made = legal[record.name]
    metas = record.infer(made.call)
    for output in (param.name for param in record.outputs):
        meta = metas[output]
        assert meta is not None
        for wrong in (TensorMeta("int8", meta.shape), TensorMeta(meta.dtype, (*meta.shape, 2))):
            with case(output, wrong):
                message = small_message(made)
                encode_meta(wrong, getattr(message, output).meta)
                for error in both_ways(channel, record, message):
                    assert isinstance(error, (InvalidOperand, TilingError))
                    assert error.violations[0].operands[0] == output
        getattr(message, output).meta.shape[:] = [-5]
        for error in both_ways(channel, record, message):
            assert isinstance(error, MalformedTensor)
            assert error.operand == output


# --------------------------------------------------------------------------- unknown operators and enums


def test_header_that_names_no_operator(wire: Wire, channel: grpc.Channel) -> None:
    unknown = backward_pb2.ExecuteHeader.FromString(b"\xfa\x01\x03\x0a\x01\x00")  # field 31 of a newer client
    for call, kind, found in (
        (backward_pb2.ExecuteHeader(), MalformedRequest, "no call"),
        (unknown, UnsupportedOperator, "a call of an unknown operator"),
        (None, MalformedRequest, "no call"),
    ):
        frame = backward_pb2.ExecuteRequest(header=call or backward_pb2.ExecuteHeader())
        asks: dict[str, Callable[[], object]] = {
            "execute: header": partial(call_execute, channel, [frame]),
            "validate: call": partial(wire.validation.Validate, validation_pb2.ValidateRequest(call=call)),
        }
        for where, act in asks.items():
            error = failure_of(act).error
            assert (type(error), error.operator) == (kind, "")
            assert str(error).startswith(f"{where}: found {found}; expected one of multi_scale")


def test_unknown_product(wire: Wire, legal: Legal) -> None:
    call = legal[GROUP_NORM.name].header()[0].header
    for number in (4, 99, -1, 2**31 - 1):
        asks: tuple[tuple[Any, Any], ...] = (
            (wire.validation.Validate, validation_pb2.ValidateRequest(call=call, product=number)),  # type: ignore[arg-type]
            (wire.server.ListOperators, server_pb2.ListOperatorsRequest(product=number)),  # type: ignore[arg-type]
        )
        for ask, request in asks:
            error = failure_of(partial(ask, request)).error
            assert isinstance(error, MalformedRequest)
            assert f"found {number}; expected one of 1 (atlas-training)" in str(error)


# ------------------------------------------------------------------------------------ bytes and metadata


def send_bytes(channel: grpc.Channel, method: str, data: bytes) -> bytes:
    call: Any = channel.unary_unary(f"/{method}")
    return bytes(call(data, timeout=TIMEOUT_S))


def test_bytes_that_are_no_message(channel: grpc.Channel) -> None:
    for method in (
        *(f"npugrad.v1.BackwardService/{record.rpc}" for record in OPERATORS.values()),
        *("npugrad.v1.ValidationService/Validate", "npugrad.v1.ServerService/ListOperators"),
    ):
        for data in (b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x0f", b"\x12"):
            with case(method, data):
                failure = failure_of(partial(send_bytes, channel, method, data))
                assert failure.status is grpc.StatusCode.INVALID_ARGUMENT
                assert isinstance(failure.error, MalformedRequest)
                said = f"found {len(data)} bytes that do not parse; expected npugrad.v1."
                assert said in str(failure.error)


def test_bytes_that_are_no_frame(channel: grpc.Channel) -> None:
    """The last two are chunks that are cut off."""
    execute: Any = channel.stream_stream("/npugrad.v1.BackwardService/Execute")
    header, chunk = [frame.SerializeToString() for frame in islice(sample().frames(), 2)]
    for sent in ([b"\xff" * 9], [header, b"\xff" * 9], [header, chunk[:-1]], [header, chunk[:-100]]):
        failure = failure_of(partial(list, execute(iter(sent), timeout=TIMEOUT_S)))
        assert failure.status is grpc.StatusCode.INVALID_ARGUMENT
        assert type(failure.error) is MalformedRequest
        said = f"found {len(sent[-1])} bytes that do not parse; expected npugrad.v1.ExecuteRequest"
        assert said in str(failure.error)


@pytest.mark.parametrize(
    ("method", "data", "status"),
    [
        ("grpc.health.v1.Health/Check", b"\xff" * 64, grpc.StatusCode.INVALID_ARGUMENT),
        ("npugrad.v1.BackwardService/DropTables", b"", grpc.StatusCode.UNIMPLEMENTED),
    ],
)
def test_what_grpc_itself_refuses(
    channel: grpc.Channel, method: str, data: bytes, status: grpc.StatusCode
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        send_bytes(channel, method, data)
    assert caught.value.code() is status


METADATA: dict[str, list[tuple[str, Any]]] = {
    "long": [("x-request-id", "a" * 65)],
    "space": [("x-request-id", "two words")],
    "quotes": [("x-request-id", '"}\\{"')],
    "empty": [("x-request-id", "")],
    "binary": [("x-request-id-bin", b"\0\xff")],
    "status": [("grpc-status-details-bin", b"\xff" * 100)],
    "many": [(f"x-junk-{i}", "y" * 50) for i in range(60)],
    "twice": [("x-request-id", "good"), ("x-request-id", "other")],
}


def test_hostile_metadata_never_reaches_log_or_reply(victim: ServerProcess, channel: grpc.Channel) -> None:
    made = sample()
    for name, metadata in METADATA.items():
        with case(name):
            found = call_unary(channel, made.record, made.message(), metadata=metadata).info.request_id
            given = {value for key, value in metadata if key == "x-request-id"} - {"good"}
            assert found not in given
            assert (found == "good") is (name == "twice")
            assert victim.find_log("call", request_id=found)["operator"] == made.record.name


def test_metadata_beyond_the_limit_of_http2_is_refused_by_the_transport(channel: grpc.Channel) -> None:
    made = sample()
    with pytest.raises(grpc.RpcError) as caught:
        call_unary(channel, made.record, made.message(), metadata=[("x-junk", "y" * 200_000)])
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
