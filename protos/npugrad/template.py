"""Messages that are serialized once and then sent many times with different contents.

In all calls of one signature, and in all their replies, every byte is the same except the contents of the
tensors and one field: a call's options, a reply's info. Joining the constant bytes with the varying ones
saves building, copying and parsing the message with protobuf.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from npugrad.varint import LENGTH_DELIMITED, encode_varint, tag

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    Content = bytes | memoryview | npt.NDArray[Any]


class Template:
    """A serialized message in which only the contents of some tensors, and one field, vary.

    That field comes first: it has the lowest number of all, so that `encode` writes what protobuf would
    write. In a message to `split` it may also come last.

    Thread safety: nothing changes after construction.

    Example:
        >>> from npugrad.v1.operators_pb2 import GridSampler2DBackwardResponse as Response
        >>> template = Template(Response(), "info", {"input_grad": 4})
        >>> data = template.encode([b"1234"], Response(info={"device": "cpu:0"}).SerializeToString())
        >>> Response.FromString(data).input_grad.data
        b'1234'
        >>> [content], rest = template.split(data)
        >>> bytes(content), rest.info.device
        (b'1234', 'cpu:0')

    Attributes:
        nbytes: Length of an encoded message without the varying field.
    """

    def __init__(self, message: Any, varying: str, contents: Mapping[str, int]) -> None:
        """Creates the template of messages like this one, which is not kept.

        Args:
            message: The message; the `data` of its tensors and its field `varying` do not matter.
            varying: Name of its message field that varies.
            contents: Length of `data` by field, for its tensors whose `data` varies, in the order of their
                numbers.
        """
        self._class, self._varying = type(message), varying
        slices, heads, places, end, head = [], [], [], 0, b""
        for before, length in _pieces(message, varying, contents):
            head += before
            if length is not None:
                heads.append(head)
                places.append(end)
                start = end + len(head)
                end, head = start + length, b""
                slices.append(slice(start, end))
        self._opening = (*heads, head)[0]
        self._slices = tuple(slices)
        self._heads = tuple(zip((*heads, head), (*places, end), strict=True))
        self._parts: list[Any] = [b"", *chain.from_iterable((each, b"") for each in heads), head, b""]
        self.nbytes = end + len(head)

    def encode(self, contents: Sequence[Content], varying: bytes = b"") -> bytes:
        """The message with these contents, as protobuf would serialize it.

        Args:
            contents: Contiguous memory for each content, in the template's order.
            varying: A serialized message in which only the varying field is set.

        Raises:
            ValueError: Too many or too few contents, or one whose length differs from the template's.
        """
        parts = self._parts.copy()
        parts[0], parts[2:-1:2] = varying, contents
        data = b"".join(parts)
        if len(data) != self.nbytes + len(varying):
            raise ValueError(f"found {len(data) - len(varying)} bytes; expected {self.nbytes}")
        return data

    def split(self, data: bytes) -> tuple[list[memoryview], Any] | None:
        """Splits a message into its contents, as views of it, and a message with only the varying field.

        Returns:
            None if any other byte differs from the template: protobuf has to parse the message.
        """
        # The template's opening cannot be mistaken for the varying field.
        begin = 0 if data.startswith(self._opening) else len(data) - self.nbytes
        if begin < 0 or len(data) < self.nbytes:
            return None
        for head, place in self._heads:
            if not data.startswith(head, begin + place):
                return None
        try:
            rest = self._class.FromString(data[:begin] or data[self.nbytes :])
        except DecodeError:
            return None
        fields = rest.ListFields()
        if fields and (len(fields) > 1 or fields[0][0].name != self._varying):
            return None
        view = memoryview(data)[begin:]
        return list(map(view.__getitem__, self._slices)), rest


def announce(message: Any, lengths: Mapping[str, int], chunk_from_bytes: int | None) -> dict[str, int]:
    """Announces the contents that are sent in chunks, in a message that has none yet.

    Args:
        message: A typed request or response.
        lengths: Length of each content in bytes.
        chunk_from_bytes: Length from which contents are sent in chunks; None announces none.

    Returns:
        Length of each content to be sent in the message.
    """
    carried = {}
    for name, nbytes in lengths.items():
        if chunk_from_bytes is not None and nbytes >= max(chunk_from_bytes, 1):
            getattr(message, name).chunked_bytes = nbytes
        else:
            carried[name] = nbytes
    return carried


def _pieces(message: Any, varying: str, contents: Mapping[str, int]) -> Iterator[tuple[bytes, int | None]]:
    """Yields the bytes before each content with its length, and all other bytes with None.

    No content is allocated for that, because some are long.
    """
    fields = {field.number: (field.name, value) for field, value in message.ListFields()}
    for name in contents:
        fields[message.DESCRIPTOR.fields_by_name[name].number] = (name, getattr(message, name))
    for number, (name, value) in sorted(fields.items()):
        if name in contents:
            opening, closing = _around(value, contents[name])
            nbytes = len(opening) + contents[name] + len(closing)
            yield (
                encode_varint(tag(number, LENGTH_DELIMITED)) + encode_varint(nbytes) + opening,
                contents[name],
            )
            yield closing, None
        elif name != varying:
            yield type(message)(**{name: value}).SerializeToString(), None


def _around(tensor: Any, length: int) -> tuple[bytes, bytes]:
    """The bytes of a serialized tensor before and after content of this length."""
    bare = type(tensor)(**{field.name: value for field, value in tensor.ListFields() if field.name != "data"})
    bare.data = b"\0"
    plain = bare.SerializeToString()
    bare.data = b"\1"
    marked = bare.SerializeToString()
    at = next(index for index, byte in enumerate(plain) if byte != marked[index])
    return plain[: at - 1] + encode_varint(length), plain[at + 1 :]  # without the length, 1, before the mark
