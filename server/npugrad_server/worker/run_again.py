"""The order for a call whose plan the worker has: a packet of a fixed layout, made and read in place."""

from __future__ import annotations

import math
from struct import Struct

from npugrad.call import MAX_LABEL

_NUMBER, _WORKSPACE = Struct("<Q"), Struct("<q")


class RunAgain(bytes):
    """Run a call that is like an earlier one except for the fields here; it is the packet itself.

    Little-endian: 1, priority, call, plan, offset of the operands, of the results, deadline, workspace; the
    label comes last and ends with the packet. No deadline is NaN, a workspace that is not counted is -1.

    Attributes:
        plan: Number under which the earlier call was to be kept.
        call: Its number, for the answer.
    """

    KIND = 1
    """First byte."""
    _FIELDS = Struct("<BbQQQQdq")

    def __new__(  # noqa: PLR0917 -- in the order of the packet; keywords cost time for each call
        cls,
        call: int,
        plan: int,
        input_offset: int,
        output_offset: int,
        deadline_s: float | None = None,
        workspace_bytes: int | None = None,
        priority: int = 0,
        label: str = "",
    ) -> RunAgain:
        """Packs it.

        Args:
            call: Its number, for the answer.
            plan: Number under which the earlier call was to be kept.
            input_offset: First byte of its operands in their arena, in place of the earlier call's lowest
                offset. Each operand lies as far from it as in that call.
            output_offset: First byte of its wanted outputs, in the results' arena, likewise.
            deadline_s: As in `RunCall`, like the remaining arguments.
            workspace_bytes: Device memory that is set aside for its workspace.
            priority: Option of the call.
            label: Option of the call.
        """
        numbers = cls._FIELDS.pack(
            cls.KIND,
            priority,
            call,
            plan,
            input_offset,
            output_offset,
            math.nan if deadline_s is None else deadline_s,
            -1 if workspace_bytes is None else workspace_bytes,
        )
        return super().__new__(cls, numbers + label.encode())

    @classmethod
    def received(cls, packet: bytes) -> RunAgain:
        """Reads a received packet; raises ValueError if it is malformed."""
        size = cls._FIELDS.size
        if not size <= len(packet) <= size + MAX_LABEL:
            raise ValueError(f"found a packet of {len(packet)} bytes; expected {size} to {size + MAX_LABEL}")
        (workspace_bytes,) = _WORKSPACE.unpack_from(packet, size - _WORKSPACE.size)
        if workspace_bytes < -1:
            raise ValueError(f"found {workspace_bytes} bytes of workspace; expected -1 or more")
        packet[size:].decode()
        return super().__new__(cls, packet)

    def fields(self) -> tuple[int, int, int, int, float | None, int | None, int, str]:
        """The arguments that it was made from."""
        _, priority, call, plan, operands, results, deadline_s, workspace_bytes = self._FIELDS.unpack_from(
            self
        )
        return (
            call,
            plan,
            operands,
            results,
            None if math.isnan(deadline_s) else deadline_s,
            None if workspace_bytes < 0 else workspace_bytes,
            priority,
            self[self._FIELDS.size :].decode(),
        )

    @property
    def call(self) -> int:
        """Its number."""
        (call,) = _NUMBER.unpack_from(self, 2)
        return int(call)

    @property
    def plan(self) -> int:
        """Number of its plan."""
        (plan,) = _NUMBER.unpack_from(self, 2 + _NUMBER.size)
        return int(plan)
