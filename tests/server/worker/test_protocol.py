"""What pool and workers say to each other: each message reads back, and nothing else is taken for one."""

from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npugrad import CallMeta, Product, TensorMeta
from npugrad.attributes import Scalar
from npugrad.call import CallOptions
from npugrad_server.worker import protocol
from npugrad_server.worker.packets import MAX_MESSAGE_BYTES, decode, encode, pack
from npugrad_server.worker.protocol import AskWorkspace, CallDone, Message, RunCall
from npugrad_server.worker.run_again import RunAgain

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
numbers = st.integers(0, 2**64 - 1)
seconds = st.floats(allow_nan=False)
again = st.builds(
    RunAgain,
    call=numbers,
    plan=numbers,
    input_offset=numbers,
    output_offset=numbers,
    deadline_s=st.none() | seconds,
    workspace_bytes=st.none() | st.integers(0, 2**63 - 1),
    priority=st.integers(-100, 100),
    label=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=64),
)
done = st.builds(
    CallDone,
    call=numbers,
    copy_in_s=seconds,
    run_s=seconds,
    copy_out_s=seconds,
    workspace_bytes=numbers,
    backend=st.text(max_size=32),
    verification=st.text(max_size=200),
    verified=st.dictionaries(st.text(max_size=20), st.lists(seconds, min_size=3, max_size=3), max_size=3),
)


@given(calls)
def test_a_call_and_a_question_about_it_read_back_exactly(call: RunCall) -> None:
    for message in (call, AskWorkspace(call.call, call.operator, call.meta)):
        assert decode(encode(message)) == message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 5e-324, -0.0])
def test_every_double_survives(value: float) -> None:
    found = decode(encode(RunCall(1, "op", CallMeta({}, {"x": value}), {}, CallOptions(), {}, {})))
    assert isinstance(found, RunCall)
    assert repr(found.meta.attrs["x"]) == repr(value)


@pytest.mark.parametrize(
    "message",
    [
        protocol.OpenDevice("test:0?ms=1", "atlas-a2", 2, 3, 4096, 4, 8192, 0),
        protocol.DeviceReady("cpu-reference", "words", False, False),
        protocol.DeviceReady("npu", "words", True, True, {"an_operator": "no kernel"}, 2**36),
        protocol.OpenFailed("why \N{SNOWMAN}"),
        protocol.OpenFailed("why", "never"),
        protocol.DeviceFailed(7, "aclrtSynchronizeStream returned 507015", 507015, "soon", True, False),
        protocol.WorkspaceFound(7, 2**40),
        protocol.WorkspaceFound(7, None),
        protocol.CallDeferred(7, 2**40),
        protocol.AbandonCall(2**40),
        protocol.NeedWorkspace(7, 2**40),
        protocol.WorkspaceGranted(7),
        protocol.WorkspaceRefused(7, True, 2**40),
        protocol.WorkspaceRefused(7, False),
        protocol.AskMemory(8, give_back=True),
        protocol.MemoryFound(8, 2**40, 2**41),
        protocol.ForgetPlan(2**40),
        protocol.CallUnknown(7),
        protocol.CallFailed(7, "UNSAFE_LEVELS", "message", {"operand": "value"}, "trace\n" * 10),
    ],
)
def test_other_messages_read_back_exactly(message: Message) -> None:
    assert decode(encode(message)) == message


# ----------------------------------------------------------------- what is said once for each call is packed


@given(again, done)
def test_a_call_by_number_and_an_answer_read_back_exactly(call: RunAgain, answer: CallDone) -> None:
    found = decode(bytes(call))
    assert isinstance(found, RunAgain)
    assert RunAgain(*found.fields()) == found == call
    assert decode(pack(answer)) == decode(encode(answer)) == answer


@given(again | done, st.data())
def test_a_packet_that_is_cut_is_refused_or_lacks_the_end_of_its_text(
    message: RunAgain | CallDone, data: st.DataObject
) -> None:
    packet = encode(message) if isinstance(message, RunAgain) else pack(message)
    cut = packet[: data.draw(st.integers(0, len(packet) - 1))]
    try:
        found = decode(cut)
    except ValueError:
        return
    assert type(found) is type(message)
    assert len(packet) > len(cut)


@given(st.sampled_from([b"\1", b"\2"]), st.binary(max_size=200))
def test_any_bytes_behind_the_first_are_a_message_or_refused(kind: bytes, rest: bytes) -> None:
    try:
        found = decode(kind + rest)
    except ValueError:
        return
    assert isinstance(found, RunAgain if kind == b"\1" else CallDone)
    if isinstance(found, CallDone) and not any(map(math.isnan, (found.copy_in_s, found.run_s))):
        assert pack(found)[:17] == (kind + rest)[:17]


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (b"\1", "found a packet of 1 bytes; expected 50 to 114"),
        (RunAgain(1, 2, 3, 4)[:-1], "found a packet of 49 bytes"),
        (RunAgain(1, 2, 3, 4, label="x" * 65), "found a packet of 115 bytes"),
        (RunAgain(1, 2, 3, 4) + b"\xff", "invalid start byte"),
        (struct.pack("<BbQQQQdq", 1, 0, 1, 2, 3, 4, 0.0, -2), "found -2 bytes of workspace"),
        (b"\2" * 56, "found a packet of 56 bytes; expected 57 to"),
        (pack(CallDone(1, 0, 0, 0, 0, "x" * (MAX_MESSAGE_BYTES + 1))), "found a packet of"),
        (b"\3" + bytes(60), "."),
        (b"\0" + bytes(60), "."),
        (b"", "."),
        (b"{}", "."),
        (b"[]", "."),
        (b"[1, 2]", "."),
        (b'["RunCall", {}]', "."),
        (b'["OpenFailed", {"other": 1}]', "."),
        (b'["Nobody", {}]', "."),
        (b"\xff", "."),
    ],
)
def test_anything_else_is_refused(packet: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode(packet)


def test_messages_are_short_or_have_a_limit_into_which_the_largest_call_fits() -> None:
    assert len(encode(RunAgain(1, 2, 3, 4))) == 50
    assert len(pack(CallDone(1, 0, 0, 0, 0, "cpu"))) == 60
    assert json.loads(encode(CallDone(1, 0, 0, 0, 0, "cpu")))[0] == "CallDone", "it is a line of JSON"
    meta = TensorMeta("float32", [1] * 32, "FRACTAL_Z_3D", [2**57] * 32, 2**57)
    tensors = {f"a_rather_long_name_{i}": meta for i in range(24)}
    call = RunCall(1, "op", CallMeta(tensors, {}), tensors, CallOptions(label="x" * 64), {}, {})
    assert len(encode(call)) < MAX_MESSAGE_BYTES
    with pytest.raises(ValueError, match="found a message of"):  # here, and not by the kernel
        encode(protocol.OpenFailed("x" * MAX_MESSAGE_BYTES))
