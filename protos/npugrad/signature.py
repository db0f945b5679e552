"""The signature of a serialized request: the part that determines its plan, read without decoding.

The signature has every byte of the request except those that no plan depends on: the bytes of contents,
padding, seeds and digests of recipes, names and offsets of regions, label and priority. Requests with the
same signature therefore decode to the same call apart from these, and reading a signature is much cheaper
than decoding the request.

Why no two calls share a key: all kept bytes are in the key unchanged and in their original order. If bytes
are cut out of a field, its tag and length are kept; if a field is dropped, nothing is, and a second
occurrence of it is refused. A message around such fields is written as its tag, its kept bytes, and a 0,
which is not a valid tag. So a key can be read in only one way, and only as the fields of the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

from npugrad.varint import LENGTH_DELIMITED, VARINT, encode_varint, read_varint, tag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.descriptor import Descriptor

MAX_KEY_BYTES = 4096
"""Maximum length of a key; longer ones belong to calls with long attributes, which cost more to remember."""

_KEEP, _CUT, _DROP, _ENTER = range(4)
"""What is done with a field: keep it, cut its bytes but keep their length, drop it, or enter its message."""
_LEFT_OUT: Mapping[str, Mapping[str, int]] = {
    "npugrad.v1.Tensor": {"data": _CUT, "padding": _DROP},
    "npugrad.v1.Recipe": {"seed": _DROP, "digest": _DROP},
    "npugrad.v1.SharedMemoryRegion": {"name": _DROP, "offset": _DROP},
    "npugrad.v1.CallOptions": {"label": _DROP, "priority": _DROP},
}
"""Fields on which no plan depends, by message and name."""
_WITHOUT_PRESENCE = frozenset({"npugrad.v1.CallOptions"})
"""Messages that mean the same whether unset or empty."""

_FIXED = {
    FieldDescriptorProto.TYPE_DOUBLE: (1, 8),
    FieldDescriptorProto.TYPE_FIXED64: (1, 8),
    FieldDescriptorProto.TYPE_SFIXED64: (1, 8),
    FieldDescriptorProto.TYPE_FLOAT: (5, 4),
    FieldDescriptorProto.TYPE_FIXED32: (5, 4),
    FieldDescriptorProto.TYPE_SFIXED32: (5, 4),
}
"""Wire type and length of the fixed-length types."""
_DELIMITED = frozenset(
    (FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_BYTES, FieldDescriptorProto.TYPE_MESSAGE)
)


class Signature(NamedTuple):
    """The signature of one request, and the fields left out of it.

    Attributes:
        key: Equal for requests with the same plan, different for others.
        taken: Values of the fields left out of the key, by name: numbers, views of the request, and mappings
            for messages; only fields that are set.
    """

    key: bytes
    taken: dict[str, Any]


class SignatureReader:
    """Reads signatures of the requests of one operator.

    Thread safety: nothing changes after construction.
    """

    def __init__(self, request: Descriptor, rpc: str) -> None:
        """Collects the message's fields, once.

        Args:
            request: Descriptor of the operator's request.
            rpc: Distinguishes its keys from those of the same request in another RPC.
        """
        self._fields = _fields_of(request, {})
        self._prefix = f"{request.full_name} {rpc}\0".encode()

    def read(self, data: bytes, start: int = 0) -> Signature | None:
        """Returns the signature of a serialized request; checks only what distinguishes it from others.

        Args:
            data: Bytes that end with the request.
            start: Where the request begins.

        Returns:
            None if protobuf has to parse the request: an unknown field or wire type, a repeated field that
            the key leaves out, a number in more bytes than necessary, a wrong length, or a key longer than
            `MAX_KEY_BYTES`.
        """
        parts = [self._prefix]
        try:
            taken = _read(self._fields, data, start, len(data), parts)
        except (KeyError, IndexError, ValueError):
            return None
        key = b"".join(parts)
        return Signature(key, taken) if len(key) <= MAX_KEY_BYTES else None

    def is_plain(self, data: bytes, start: int = 0) -> bool:
        """Whether each field of a request is known, occurs once and has its numbers in the fewest bytes.

        Requests with the key of a plain one are plain too, so one check for each key is enough.

        Args:
            data: Bytes that end with the request, which protobuf has parsed.
            start: Where the request begins.
        """
        try:
            _check(self._fields, data, start, len(data))
        except (KeyError, IndexError, ValueError):
            return False
        return True


class _Field(NamedTuple):
    name: str
    action: int
    size: int
    """Bytes of the value if its type has a fixed length; else 0 for a varint, -1 for a length prefix."""
    within: dict[int, _Field]
    """Fields of its message."""
    mark: bytes
    """Its tag."""
    stays: bool
    """Whether an empty message differs from an unset one."""
    once: tuple[str, int]
    """What may be set only once: the field, or its oneof."""
    is_packed: bool
    """Whether it is a list of varints."""


def _fields_of(descriptor: Descriptor, known: dict[str, dict[int, _Field]]) -> dict[int, _Field]:
    """Fields of a message by tag."""
    if descriptor.full_name in known:
        return known[descriptor.full_name]
    fields = known[descriptor.full_name] = {}
    proto = DescriptorProto()
    descriptor.CopyToProto(proto)
    for each in proto.field:
        found = descriptor.fields_by_name[each.name].message_type
        within = _fields_of(found, known) if found is not None else {}
        is_list = each.label == FieldDescriptorProto.LABEL_REPEATED
        wire_type, size = _FIXED.get(each.type, (VARINT, 0))
        if is_list or each.type in _DELIMITED:
            wire_type, size = LENGTH_DELIMITED, -1
        number = tag(each.number, wire_type)
        fields[number] = _Field(
            name=each.name,
            action=_action(descriptor.full_name, each.name, found),
            size=size,
            within=within,
            mark=encode_varint(number),
            stays=found is None or found.full_name not in _WITHOUT_PRESENCE,
            once=("oneof", each.oneof_index) if each.HasField("oneof_index") else ("field", each.number),
            is_packed=is_list and each.type not in _DELIMITED and each.type not in _FIXED,
        )
    return fields


def _action(message: str, name: str, found: Descriptor | None) -> int:
    if found is not None:
        return _ENTER if found.full_name in _LEFT_OUT else _KEEP
    return _LEFT_OUT.get(message, {}).get(name, _KEEP)


def _read(  # noqa: C901, PLR0915 -- every call comes here: a function for each part would cost time
    fields: dict[int, _Field], data: bytes, at: int, end: int, parts: list[bytes]
) -> dict[str, Any]:
    """Adds the kept bytes of a message to `parts` and returns the fields left out.

    Runs for each operand of every call, hence no functions for what takes two lines.

    Raises:
        KeyError, IndexError, ValueError: Protobuf has to parse the message.
    """
    taken: dict[str, Any] = {}
    kept = at  # kept bytes are added a run of fields at a time
    value: Any = None
    while at < end:
        begin = body = at
        number = data[at]
        at += 1
        if number > 0x7F:
            number, at = read_varint(data, begin)
        name, action, size, within, mark, stays, _, _ = fields[number]
        if size > 0:
            at += size
        else:
            value = data[at]
            at += 1
            if value > 0x7F:
                if 0 < data[at] <= 0x7F:  # two bytes, like most lengths
                    value += (data[at] - 1) << 7
                    at += 1
                else:
                    value, at = read_varint(data, at - 1)
            if size < 0:
                body = at
                at += value
                if action == _KEEP and value > MAX_KEY_BYTES:
                    raise ValueError(name)
        if action == _KEEP:
            if at - kept > MAX_KEY_BYTES:  # else millions of tiny fields would be read in vain
                raise ValueError(name)
            continue
        if name in taken or at > end:
            raise ValueError(name)
        parts.append(data[kept : body if action == _CUT else begin])
        if action == _ENTER:
            inner: list[bytes] = []
            value = _read(within, data, body, at, inner)
            rest = b"".join(inner)
            if rest or stays:
                parts += (mark, rest, b"\0")
        elif size < 0:
            value = memoryview(data)[body:at]
        taken[name] = value
        kept = at
    if at != end:
        raise ValueError(at)
    parts.append(data[kept:end])
    return taken


def _check(fields: dict[int, _Field], data: bytes, at: int, end: int) -> None:
    """Checks each field of a message; raises as `_read` does."""
    seen = set()
    while at < end:
        number, at = read_varint(data, at)
        field = fields[number]
        if field.once in seen:
            raise ValueError(field.name)
        seen.add(field.once)
        if field.size > 0:
            at += field.size
            continue
        value, at = read_varint(data, at)
        if field.size == 0:
            continue
        begin, at = at, at + value
        if field.within:
            _check(field.within, data, begin, at)
        while field.is_packed and begin < at:
            _, begin = read_varint(data, begin)
    if at != end:
        raise ValueError(at)
