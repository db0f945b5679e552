"""Varints (numbers in protobuf's wire format) and tags, for writing and reading fields by hand."""

from __future__ import annotations

VARINT, LENGTH_DELIMITED = 0, 2
"""Wire types: a number; a length followed by that many bytes."""
MAX_VARINT_BYTES = 10
"""Maximum bytes of a number."""


def tag(number: int, wire_type: int) -> int:
    """Returns the tag of a field: its number in the message, and the wire type of its value."""
    return number << 3 | wire_type


def encode_varint(value: int) -> bytes:
    """Writes a number as protobuf does, in the fewest bytes.

    Raises:
        ValueError: It is not within 0 to 2**64 - 1.
    """
    if value >> 64:
        raise ValueError(f"varint: found {value}; expected 0 to 2**64 - 1")
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Reads a number in the encoding of `encode_varint`.

    Args:
        data: Bytes that contain it.
        at: Index of its first byte, 0 or more; may be beyond the end.

    Returns:
        The number, and the index of the byte after it.

    Raises:
        ValueError: There is none: truncated, above 2**64 - 1, or in more bytes than necessary, which protobuf
            accepts for some fields only.
    """
    value = shift = 0
    for index in range(at, min(at + MAX_VARINT_BYTES, len(data))):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte <= 0x7F:
            if value >> 64 or (shift and not byte):
                break
            return value, index + 1
        shift += 7
    raise ValueError(f"varint: found none at byte {at} of {len(data)}; expected one in its fewest bytes")
