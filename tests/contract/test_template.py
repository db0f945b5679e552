"""Templates: what they encode is what protobuf writes, and what they split is what protobuf reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.synthetic.record import REGISTRY as SYNTHETIC

from npugrad import codec
from npugrad.call import CallOptions
from npugrad.meta import TensorMeta
from npugrad.operator import OpRecord
from npugrad.products import Product
from npugrad.registry import REGISTRY, Registry
from npugrad.template import Template
from npugrad.v1.operators_pb2 import ExecutionInfo, GroupNormBackwardRequest, GroupNormBackwardResponse

OUTPUTS = ("grad_input", "grad_gamma", "grad_beta")


def _response(lengths: tuple[int | None, ...], padding: bytes = b"") -> GroupNormBackwardResponse:
    """A reply whose outputs have contents of these lengths; None for an output that is not there."""
    message = GroupNormBackwardResponse()
    for name, length in zip(OUTPUTS, lengths, strict=True):
        if length is not None:
            tensor = getattr(message, name)
            codec.encode_meta(TensorMeta("uint8", (length,)), tensor.meta)
            tensor.data, tensor.padding = bytes(length), padding
    return message


def _template(message: Any) -> Template:
    contents = {name: len(getattr(message, name).data) for name in OUTPUTS if message.HasField(name)}
    return Template(message, "info", contents)


def _filled(message: Any, contents: list[bytes], rest: Any) -> Any:
    """The same reply with other contents, and the info of the rest."""
    made = type(message)()
    made.CopyFrom(rest)
    made.MergeFrom(message)
    for name, content in zip([n for n in OUTPUTS if message.HasField(n)], contents, strict=True):
        getattr(made, name).data = content
    return made


def _rest(device: str, attempts: int) -> GroupNormBackwardResponse:
    info = ExecutionInfo(device=device, attempts=attempts)
    return GroupNormBackwardResponse(info=info)


messages = st.builds(
    _response,
    st.tuples(*[st.none() | st.sampled_from((0, 1, 7, 127, 128, 200, 16383, 16384))] * 3),
    st.binary(max_size=3),
)
rests = st.builds(_rest, st.text(max_size=200), st.integers(0, 2**32 - 1))


@given(messages, rests, st.booleans(), st.data())
def test_what_is_encoded_is_what_protobuf_writes_and_is_split_again(
    message: Any, rest: Any, is_last: bool, data: st.DataObject
) -> None:
    contents = [data.draw(st.binary(min_size=n, max_size=n)) for n in _lengths(message)]
    varying = rest.SerializeToString()
    whole = _template(message).encode(contents, varying)
    assert whole == _filled(message, contents, rest).SerializeToString()
    encoded = _template(message).encode(contents)
    found = _template(message).split(encoded + varying if is_last else varying + encoded)
    assert found is not None
    assert list(map(bytes, found[0])) == contents
    assert found[1] == rest


def _lengths(message: Any) -> list[int]:
    return [len(getattr(message, name).data) for name in OUTPUTS if message.HasField(name)]


@given(messages, messages, rests)
def test_another_message_is_not_split(message: Any, other: Any, rest: Any) -> None:
    found = _template(message).split(
        _filled(other, [bytes(n) for n in _lengths(other)], rest).SerializeToString()
    )
    assert (found is not None) is (message == other)


@given(messages, rests, st.booleans(), st.data())
def test_whatever_is_split_parses_to_the_same(
    message: Any, rest: Any, is_last: bool, data: st.DataObject
) -> None:
    """However the bytes are changed: split by the template or not at all, never otherwise than protobuf."""
    template = _template(message)
    varying = rest.SerializeToString()
    parts = [template.encode([bytes(n) for n in _lengths(message)]), varying]
    changed = bytearray(b"".join(parts if is_last else parts[::-1]) or data.draw(st.binary(max_size=64)))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, max(0, len(changed) - 1)))
        changed[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    found = template.split(bytes(changed))
    if found is not None:
        parsed = type(message).FromString(bytes(changed))
        assert parsed == _filled(message, list(map(bytes, found[0])), found[1])


def test_a_field_of_the_template_that_comes_again_is_for_protobuf() -> None:
    message = _response((4, None, None))
    encoded = _template(message).encode([b"1234"])
    assert _template(message).split(encoded + _response((2, None, None)).SerializeToString()) is None
    assert _template(message).split(_response((None, 2, None)).SerializeToString() + encoded) is None


def test_contents_that_do_not_fit_or_are_not_contiguous_are_refused() -> None:
    template = _template(_response((4, None, None)))
    for contents in ([b"123"], [b"12345"], [], [b"12", b"34"]):
        with pytest.raises(ValueError, match=r"found|attempt"):
            template.encode(contents)
    with pytest.raises((TypeError, BufferError, ValueError)):
        template.encode([np.zeros((2, 4), np.uint8)[:, ::2]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_arrays_are_taken_as_they_are(dtype: str) -> None:
    array = np.ones((2, 3), TensorMeta(dtype, ()).dtype.numpy)
    message = GroupNormBackwardRequest(n=2)
    encoded = Template(message, "options", {"input": array.nbytes}).encode([array])
    assert GroupNormBackwardRequest.FromString(encoded).input.data == array.tobytes()


@pytest.mark.parametrize(
    ("registry", "record"),
    [pytest.param(r, s, id=s.name) for r in (REGISTRY, SYNTHETIC) for s in r.records.values()],
)
def test_a_call_of_every_operator_is_encoded_as_by_the_codec(registry: Registry, record: OpRecord) -> None:
    options = CallOptions(deterministic=True, priority=-3, label="tests")
    for call in (sample.call for sample in record.samples(Product.ATLAS_A2)):
        contents = {
            name: memoryview(bytes([7]) * meta.content_bytes)
            for name, meta in call.inputs.items()
            if meta is not None and meta.dtype.has_data
        }
        message, _ = codec.encode_request(
            call.inputs, contents, record, call.attrs, call.outputs, options, registry=registry
        )
        template = Template(message, "options", {name: data.nbytes for name, data in contents.items()})
        varying = type(message)(options=message.options).SerializeToString()
        assert template.encode(list(contents.values()), varying) == message.SerializeToString()


def test_no_content_is_made_to_make_a_template() -> None:
    """The first call of every signature makes two: with contents of 1 MiB that took 10 ms of its time."""
    message = _response((0, None, 0), padding=b"pad")
    template = Template(message, "info", {"grad_input": 2**60, "grad_beta": 0})
    assert 2**60 < template.nbytes < 2**60 + 2 * message.ByteSize()
    assert template.split(message.SerializeToString()) is None
