"""Signatures against protobuf: what shares one decodes alike, apart from what a signature leaves out."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from tests.signatures import NORM, announced, in_region, key, norm, of_recipes, reader, request, stripped
from tests.synthetic.record import REGISTRY as SYNTHETIC

from npugrad.call import CallOptions
from npugrad.registry import REGISTRY


@cache
def _plain_messages() -> list[Any]:
    labelled = norm(options=CallOptions(deterministic=True, priority=-3, label="abc", verify=True))
    declared = NORM.build().with_outputs(grad_input=None, grad_gamma=NORM.build().inputs["gamma"])
    synthetic = SYNTHETIC.records["synthetic"]
    return [
        norm(),
        labelled,
        of_recipes(digest=b"d" * 32),
        announced(),
        in_region(),
        request(NORM, declared),
        request(synthetic, synthetic.build(), registry=SYNTHETIC),
    ]


def _compare(message: Any, data: bytes) -> None:
    """What shares the signature of a message decodes alike."""
    found = reader(type(message))
    signature = found.read(data)
    if signature is None or signature.key != key(message):
        return
    assert found.is_plain(data)
    decoded = type(message).FromString(data)
    assert stripped(decoded) == stripped(message)
    for name, taken in signature.taken.items():
        for field, value in taken.items():
            known = getattr(getattr(decoded, name), field)
            if isinstance(value, memoryview):
                assert bytes(value) == (known if isinstance(known, bytes) else known.encode())


@pytest.mark.parametrize("number", range(7))
def test_a_change_of_any_byte_gives_another_key_or_the_general_way_or_was_of_what_is_left_out(
    number: int,
) -> None:
    message = _plain_messages()[number]
    data = message.SerializeToString()
    for at in range(len(data)):
        for change in (1, 0x80, 0xFF):
            _compare_parsed(message, data[:at] + bytes([data[at] ^ change]) + data[at + 1 :])


def _compare_parsed(message: Any, data: bytes) -> None:
    """As `_compare`; a label that is no UTF-8 is the only thing that protobuf knows better."""
    try:
        type(message).FromString(data)
    except DecodeError:
        signature = reader(type(message)).read(data)
        if signature is not None and signature.key == key(message):
            taken = signature.taken
            texts = [bytes(each[f]) for each in taken.values() for f in ("label",) if f in each]
            texts += [bytes(each["region"]["name"]) for each in taken.values() if "region" in each]
            assert any(not _is_text(text) for text in texts)
        return
    _compare(message, data)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(st.data())
def test_what_shares_a_signature_decodes_alike(data: st.DataObject) -> None:
    """Pieces of two requests, cut, doubled and swapped."""
    message = data.draw(st.sampled_from(_plain_messages()))
    mutated = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(mutated))] * 2)))
        piece = data.draw(st.sampled_from([b"", bytes(mutated[start:stop]) * 2]) | st.binary(max_size=6))
        mutated[start:stop] = piece
    _compare_parsed(message, bytes(mutated))


@given(st.binary(max_size=64))
@example(b"")
def test_any_bytes_are_read_or_left_to_the_general_way(data: bytes) -> None:
    found = reader(REGISTRY.requests[NORM.name])
    found.read(data)
    found.is_plain(data)
