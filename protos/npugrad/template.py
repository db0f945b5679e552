"""Messages that are serialized once and then sent many times, with other contents each time.

Of the calls of one signature, and of their replies, every byte is the same but the contents of the tensors
and one field: a call's options, a reply's info. What is the same is joined with what is not, which spares
protobuf the building, copying and parsing of the message.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    Content = bytes | memoryview | npt.NDArray[Any]


class Template:
    """A serialized message of which only the contents of some tensors, and one field, differ.

    That field comes first. It has the lowest number of all, so that what is encoded is what protobuf itself
    would write; in what is split, it may come last as well.

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
        nbytes: Length of what is encoded, without the field that differs.
    """

    def __init__(self, message: Any, varying: str, contents: Mapping[str, int]) -> None:
        """The template of messages like this one, which is not kept.

        Args:
            message: What its tensors hold in `data`, and what is in `varying`, does not matter.
            varying: Name of its message field that differs.
            contents: Its tensors whose `data` differs, in the order of their numbers: bytes of it by field.
        """
        self._class, self._varying = type(message), varying
        plain, marked = (_serialized(message, varying, contents, first) for first in (b"\x00", b"\x01"))
        marks = np.flatnonzero(np.frombuffer(plain, np.uint8) != np.frombuffer(marked, np.uint8))
        starts = iter(marks.tolist())  # a mark is the first byte of its content
        slices, heads, places, end = [], [], [], 0
        for length in contents.values():
            start = next(starts) if length else end
            heads.append(plain[end:start])
            places.append(end)
            end = start + length
            slices.append(slice(start, end))
        heads.append(plain[end:])
        places.append(end)
        self._opening = plain[: marks[0]] if marks.size else plain
        self._slices = tuple(slices)
        self._heads = tuple(zip(heads, places, strict=True))
        self._parts: list[Any] = [b"", *chain.from_iterable((head, b"") for head in heads)]
        self.nbytes = len(plain)

    def encode(self, contents: Sequence[Content], varying: bytes = b"") -> bytes:
        """The message with these contents, as protobuf would serialize it.

        Args:
            contents: Contiguous memory for each content, in the template's order.
            varying: A serialized message of which only the field that differs is set.

        Raises:
            ValueError: A content too many or too few, or one of another length than the template has.
        """
        parts = self._parts.copy()
        parts[0], parts[2:-1:2] = varying, contents
        data = b"".join(parts)
        if len(data) != self.nbytes + len(varying):
            raise ValueError(f"found {len(data) - len(varying)} bytes; expected {self.nbytes}")
        return data

    def split(self, data: bytes) -> tuple[list[memoryview], Any] | None:
        """The contents of a message, as views of it, and a message with the field that differs alone.

        Returns:
            None where any other byte is not the template's: it takes protobuf to say what the message is.
        """
        # What opens the template is not the field that differs.
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


def _serialized(message: Any, varying: str, contents: Mapping[str, int], first: bytes) -> bytes:
    """The message with contents of zeros, but for their first byte."""
    filled = type(message)()
    filled.CopyFrom(message)
    filled.ClearField(varying)
    for name, length in contents.items():
        getattr(filled, name).data = first[:length].ljust(length, b"\0")
    return bytes(filled.SerializeToString())
