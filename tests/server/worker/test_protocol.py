from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npugrad import CallMeta, Product, TensorMeta
from npugrad.attributes import Scalar
from npugrad.call import CallOptions
from npugrad_server.worker.packets import MAX_MESSAGE_BYTES, decode, encode
from npugrad_server.worker.protocol import (
    AbandonCall,
    AskMemory,
    AskWorkspace,
    CallDeferred,
    CallDone,
    CallFailed,
    DeviceFailed,
    DeviceReady,
    MemoryFound,
    Message,
    NeedWorkspace,
    OpenDevice,
    OpenFailed,
    RunCall,
    WorkspaceFound,
    WorkspaceGranted,
    WorkspaceRefused,
)

metas = st.builds(
    lambda dtype, axes, offset: TensorMeta(
        dtype, [s for s, _ in axes], "NCHW", [step for _, step in axes], offset
    ),
    st.sampled_from(["float32", "bfloat16", "int64", "bool"]),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=32),
    st.integers(0, 2**40),
)
attrs = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.lists(st.booleans()).map(tuple),
    st.lists(st.integers(-(2**63), 2**64 - 1)).map(tuple),
    st.lists(st.floats(allow_nan=False, width=32)).map(tuple),
    st.builds(Scalar, st.just("float32"), st.floats(width=32)),
    st.builds(Scalar, st.just("bool"), st.booleans()),
    st.text(),
    st.none(),
)
names = st.text("abc_", min_size=1, max_size=4)
offsets = st.dictionaries(names, st.integers(0, 2**50), max_size=3)
calls = st.builds(
    RunCall,
    call=st.integers(0, 2**40),
    operator=names,
    meta=st.builds(
        CallMeta,
        st.dictionaries(names, st.none() | metas, max_size=3),
        st.dictionaries(names, attrs, max_size=4),
        product=st.sampled_from(Product),
    ),
    outputs=st.dictionaries(names, st.none() | metas, max_size=3),
    options=st.builds(CallOptions, st.booleans(), st.integers(-100, 100), names, st.booleans()),
    input_offsets=offsets,
    output_offsets=offsets,
    deadline_s=st.none() | st.floats(0, 1e9),
    workspace_bytes=st.none() | st.integers(0, 2**50),
)


@settings(deadline=None)
@given(calls)
def test_a_call_reads_back_exactly(call: RunCall) -> None:
    assert decode(encode(call)) == call


@settings(deadline=None)
@given(calls)
def test_a_question_reads_back_exactly(call: RunCall) -> None:
    asked = AskWorkspace(call.call, call.operator, call.meta)
    assert decode(encode(asked)) == asked


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 5e-324, -0.0])
def test_every_double_survives(value: float) -> None:
    sent = RunCall(1, "op", CallMeta({}, {"x": value}), {}, CallOptions(), {}, {})
    found = decode(encode(sent))
    assert isinstance(found, RunCall)
    assert repr(found.meta.attrs["x"]) == repr(value)


@pytest.mark.parametrize(
    "message",
    [
        OpenDevice("test:0?ms=1", "atlas-a2", 2, 3, 4096, 4, 8192, 0),
        DeviceReady("cpu-reference", "words", False, False),
        DeviceReady("npu", "words", True, True, {"an_operator": "no kernel"}, 2**36),
        OpenFailed("why \N{SNOWMAN}"),
        OpenFailed("why", "never"),
        DeviceFailed(7, "aclrtSynchronizeStreamWithTimeout returned 507015", 507015, "soon", True, False),
        CallDone(7, 0.1, 1e-9, 0.0, 2**40, "cpu-reference"),
        WorkspaceFound(7, 2**40),
        WorkspaceFound(7, None),
        CallDeferred(7, 2**40),
        AbandonCall(2**40),
        NeedWorkspace(7, 2**40),
        WorkspaceGranted(7),
        WorkspaceRefused(7, True, 2**40),
        WorkspaceRefused(7, False),
        AskMemory(8, give_back=True),
        MemoryFound(8, 2**40, 2**41),
        CallFailed(7, "UNSAFE_LEVELS", "message", {"operand": "value"}, "trace\n" * 10),
    ],
)
def test_other_messages_read_back_exactly(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"{}",
        b"[]",
        b"[1, 2]",
        b'["RunCall", {}]',
        b'["OpenFailed", {"other": 1}]',
        b'["Nobody", {}]',
        b"\xff",
    ],
)
def test_anything_else_is_refused(packet: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(packet)


def test_the_largest_call_there_can_be_fits() -> None:
    meta = TensorMeta("float32", [1] * 32, "FRACTAL_Z_3D", [2**57] * 32, 2**57)
    tensors = {f"a_rather_long_name_{i}": meta for i in range(24)}
    call = RunCall(1, "op", CallMeta(tensors, {}), tensors, CallOptions(label="x" * 64), {}, {})
    assert len(encode(call)) < MAX_MESSAGE_BYTES


def test_a_message_above_the_limit_is_refused_here_and_not_by_the_kernel() -> None:
    with pytest.raises(ValueError, match="found a message of"):
        encode(OpenFailed("x" * MAX_MESSAGE_BYTES))


def test_a_message_is_one_line_of_json() -> None:
    assert json.loads(encode(CallDone(1, 0, 0, 0, 0, "cpu")))[0] == "CallDone"
