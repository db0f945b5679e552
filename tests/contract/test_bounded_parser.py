"""What is parsed of messages from anybody: contents of any length, and not much besides."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tests.calls import sample

from npugrad.bounded_parser import MAX_FIELDS, MAX_PARSED_BYTES, MessageTooBulky, bounded_parser
from npugrad.registry import REGISTRY
from npugrad.signature import SignatureReader
from npugrad.v1 import backward_pb2, operators_pb2, validation_pb2

REQUEST = operators_pb2.GroupNormBackwardRequest
N, UNKNOWN, EMPTY_TENSOR = b"\x38\x01", b"\x78\x01", b"\x12\x00"
parse = bounded_parser(REQUEST)


def described(axes: int) -> Any:
    """A request that describes a tensor of so many axes."""
    message = REQUEST()
    message.grad_out.meta.shape[:] = [1] * axes
    return message


@pytest.mark.parametrize(
    "more", [N, UNKNOWN, EMPTY_TENSOR, b"\x7b\x7c"], ids=["n", "unknown", "empty", "group"]
)
@pytest.mark.parametrize("count", [MAX_FIELDS, 2**20])
def test_many_small_fields_are_too_many_in_a_large_message(more: bytes, count: int) -> None:
    begun = sample(n=1, c=8, hxw=2**13, group=2).message().SerializeToString()
    assert parse(begun) == REQUEST.FromString(begun)
    with pytest.raises(MessageTooBulky, match=r"more than 65536 bytes besides contents, or 4096 fields"):
        parse(begun + more * count)


def test_long_descriptions_are_too_long_wherever_they_are() -> None:
    validate = bounded_parser(validation_pb2.ValidateRequest)
    frame = bounded_parser(backward_pb2.ExecuteRequest)
    for axes, is_legal in ((MAX_PARSED_BYTES - 100, True), (MAX_PARSED_BYTES, False)):
        message = described(axes)
        asked = validation_pb2.ValidateRequest()
        asked.call.group_norm_backward.CopyFrom(message)
        header = backward_pb2.ExecuteRequest()
        header.header.group_norm_backward.CopyFrom(message)
        pairs: list[tuple[Any, Any]] = [(parse, message), (validate, asked), (frame, header)]
        for parser, made in pairs:
            if is_legal:
                assert parser(made.SerializeToString()) == made
            else:
                with pytest.raises(MessageTooBulky):
                    parser(made.SerializeToString())


def test_numbers_in_more_bytes_than_they_need_hide_nothing() -> None:
    padded = b"\xb8\x80\x80\x00\x81\x00"
    message = REQUEST.FromString(padded)
    assert message.n == 1
    with pytest.raises(MessageTooBulky):
        parse(padded + N * 2**20)


def test_a_number_without_end_is_left_to_protobuf_after_ten_bytes() -> None:
    """Read to its end it would take minutes: each byte more makes a larger number."""
    seen: list[int] = []

    class Watched(bytes):
        def __getitem__(self, at: Any) -> Any:
            seen.append(at)
            return super().__getitem__(at)

    for begun in (b"", b"\x38", b"\x12"):
        with pytest.raises(DecodeError):
            parse(Watched(begun + b"\xff" * 2**20))
    assert len(seen) < 64


@given(st.binary(max_size=64), st.integers(0, 64))
def test_anything_else_is_what_protobuf_makes_of_it(noise: bytes, at: int) -> None:
    """Also where a large message is damaged or cut short."""
    large = REQUEST()
    large.input.data = bytes(MAX_PARSED_BYTES + 1)
    whole = large.SerializeToString()
    data = whole[:at] + noise + whole[at:]
    try:
        expected = REQUEST.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            parse(data)
    else:
        try:
            assert parse(data) == expected
        except MessageTooBulky:
            assert expected.ByteSize() - len(expected.input.data) > MAX_PARSED_BYTES


def test_a_signature_is_not_read_through_millions_of_fields() -> None:
    """Steps are counted by what is looked at: bytes behind the first few thousand are not."""
    reader = SignatureReader(REGISTRY.requests["group_norm_backward"].DESCRIPTOR, "whole")
    seen: list[int] = []

    class Watched(bytes):
        def __getitem__(self, at: Any) -> Any:
            seen.append(at)
            return super().__getitem__(at)

    assert reader.read(Watched(N * 2**20)) is None
    assert len(seen) < 2**15
