"""What an announced call still waits for, and the rules for its chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad.codec import MAX_CHUNK_BYTES
from npugrad.errors import MalformedRequest, MalformedTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.operator import OpRecord
    from npugrad_server.plans import Request


class Upload:
    """What an announced call still waits for; checks chunks against the rules, moves no bytes.

    Attributes:
        missing_bytes: Announced bytes that have not arrived yet.
    """

    def __init__(self, record: OpRecord, announced: Mapping[str, int]) -> None:
        """Starts with nothing received.

        Args:
            record: The operator.
            announced: Content length of each operand that comes in chunks.
        """
        self._record = record
        self._announced = {record.param_index(name): (name, nbytes) for name, nbytes in announced.items()}
        self._received = dict.fromkeys(self._announced, 0)
        self.missing_bytes = sum(announced.values())

    @classmethod
    def of(cls, request: Request) -> Upload:
        """The upload that a request announces."""
        return cls(request.plan.record, request.known.announced)

    def place(self, operand: int, offset: int, nbytes: int) -> str:
        """Checks a chunk, counts it and returns the name of its operand.

        Raises:
            MalformedRequest: The operand was not announced.
            MalformedTensor: The length or the offset breaks the rules.
        """
        if operand not in self._announced:
            names = ", ".join(f"{index} ({name})" for index, (name, _) in self._announced.items()) or "none"
            raise MalformedRequest(
                f"{self._record.name}: chunk: found operand {operand}; expected an announced one: {names}",
                operator=self._record.name,
            )
        name, announced = self._announced[operand]
        received = self._received[operand]
        if not 1 <= nbytes <= MAX_CHUNK_BYTES:
            raise self._malformed(name, f"a chunk of {nbytes} bytes", f"1 to {MAX_CHUNK_BYTES}")
        if offset != received:
            raise self._malformed(
                name, f"a chunk at offset {offset}", f"offset {received}, where the last one ended"
            )
        if nbytes > announced - received:
            raise self._malformed(name, f"{received + nbytes} bytes in chunks", f"the announced {announced}")
        self._received[operand] = received + nbytes
        self.missing_bytes -= nbytes
        return name

    def finish(self) -> None:
        """Checks that the upload is complete at the end of the stream.

        Raises:
            MalformedTensor: An operand is not complete.
        """
        for operand, (name, announced) in self._announced.items():
            if self._received[operand] != announced:
                raise self._malformed(
                    name,
                    f"the end of the stream after {self._received[operand]} bytes",
                    f"the announced {announced}",
                )

    def _malformed(self, name: str, found: str, expected: str) -> MalformedTensor:
        text = f"{self._record.name}: {name}: found {found}; expected {expected}"
        return MalformedTensor(text, operator=self._record.name, operand=name)
