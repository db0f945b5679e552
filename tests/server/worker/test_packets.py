"""What is said once for each call, in its fixed layout; the other messages are in `test_protocol.py`."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npugrad_server.worker.packets import MAX_MESSAGE_BYTES, decode, encode, pack
from npugrad_server.worker.protocol import CallDone, CallUnknown, ForgetPlan
from npugrad_server.worker.run_again import RunAgain

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


@given(again)
def test_a_call_by_number_reads_back_exactly(message: RunAgain) -> None:
    found = decode(bytes(message))
    assert isinstance(found, RunAgain)
    assert RunAgain(*found.fields()) == found == message


@given(done)
def test_an_answer_reads_back_exactly_in_either_form(message: CallDone) -> None:
    assert decode(pack(message)) == message
    assert decode(encode(message)) == message


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
    ],
)
def test_a_packet_that_no_layout_fits_is_refused(packet: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode(packet)


@pytest.mark.parametrize("message", [ForgetPlan(2**40), CallUnknown(7)])
def test_what_is_said_seldom_reads_back_exactly(message: ForgetPlan | CallUnknown) -> None:
    assert decode(encode(message)) == message


def test_what_is_said_once_for_each_call_is_short() -> None:
    assert len(encode(RunAgain(1, 2, 3, 4))) == 50
    assert len(pack(CallDone(1, 0, 0, 0, 0, "cpu"))) == 60
