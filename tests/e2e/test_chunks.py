"""Chunks as other implementations of protobuf may write them, and bytes that are none, within a call."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from tests.calls import Sample, call_execute, failure_of, sample
from tests.fix_server import ServerProcess

from npugrad.errors import MalformedRequest
from npugrad.v1 import backward_pb2
from npugrad.varint import LENGTH_DELIMITED, VARINT, encode_varint, tag

CHUNK, OPERAND, OFFSET, DATA = 2, 1, 2, 3


@pytest.fixture(scope="module")
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    with server.channel() as opened:
        yield opened


@pytest.fixture(scope="module")
def large() -> Sample:
    """Operands and one result of 2.4 MB, so three chunks each."""
    return sample(n=1, c=4, hxw=150_001, group=2)


def number(field: int, value: int) -> bytes:
    return bytes((tag(field, VARINT),)) + encode_varint(value)


def content(field: int, value: bytes) -> bytes:
    return bytes((tag(field, LENGTH_DELIMITED),)) + encode_varint(len(value)) + value


def otherwise(frame: backward_pb2.ExecuteRequest) -> bytes:
    """The frame of a chunk with its fields backwards, twice, in two parts, and with unknown ones."""
    chunk = frame.chunk
    unknown = number(15, 7) + content(14, b"unknown")
    first = content(DATA, chunk.data) + unknown + number(OFFSET, 99)
    second = number(OFFSET, chunk.offset) + number(OPERAND, chunk.operand)
    return content(CHUNK, first) + unknown + content(CHUNK, second)


def test_chunks_may_be_written_otherwise(channel: grpc.Channel, large: Sample) -> None:
    header, *chunks = large.frames()
    assert call_execute(channel, [header, *map(otherwise, chunks)]).contents == large.reference()


@pytest.mark.parametrize("lost", [1, 100])
def test_a_chunk_that_is_cut_off_is_refused(server: ServerProcess, channel: grpc.Channel, lost: int) -> None:
    header, chunk, *_ = sample().frames()
    cut = chunk.SerializeToString()[:-lost]
    failure = failure_of(lambda: call_execute(channel, [header, cut]))
    assert failure.status is grpc.StatusCode.INVALID_ARGUMENT
    assert type(failure.error) is MalformedRequest
    found = f"found {len(cut)} bytes that do not parse; expected npugrad.v1.ExecuteRequest"
    assert found in str(failure.error)
    server.assert_nothing_leaked()
