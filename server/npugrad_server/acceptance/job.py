"""One call with its data, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npugrad.call import CallOptions
from npugrad.layout import view
from npugrad_server.pool import PlannedCall

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from npugrad.meta import CallMeta, TensorMeta
    from npugrad.operator import OpRecord
    from npugrad_server.worker.protocol import CallDone, CallFailed, DeviceFailed

    Arrays = Mapping[str, npt.NDArray[Any] | None]


@dataclass(frozen=True)
class Job:
    """One call with its data.

    Attributes:
        record: The operator.
        call: Metas and attributes, legal or not.
        arrays: Operands by name, of the metas' shapes; None for null.
        options: Options of the call.
        deadline_s: `time.monotonic()` from which on the result is of no use; None for never.
        outputs: Metas of the outputs, None for those not wanted; by default what the record infers.
    """

    record: OpRecord
    call: CallMeta
    arrays: Arrays
    options: CallOptions = field(default_factory=CallOptions)
    deadline_s: float | None = None
    outputs: Mapping[str, TensorMeta | None] | None = None

    def planned(self) -> PlannedCall:
        """As the pool takes it."""
        outputs = self.record.infer(self.call) if self.outputs is None else self.outputs
        return PlannedCall.alone(self.record, self.call, outputs, self.options, "acceptance", self.deadline_s)

    def write(self, name: str, memory: memoryview) -> None:
        """Lays an operand out in memory as its meta says; of elements that repeat one, the first is taken."""
        meta, array = self.call.inputs[name], self.arrays[name]
        if meta is not None and array is not None and meta.size:
            target = view(meta, memory)
            once = tuple(slice(None if step else 1) for step in target.strides)
            target[once] = array[once]


def make_job(record: OpRecord, call: CallMeta, seed: int = 0, **options: Any) -> Job:
    """A call with plausible data from a seed; `options` are those of `CallOptions`.

    An expanded operand repeats elements, so the arrays are what its memory really holds.
    """
    made = record.make_inputs(call, np.random.default_rng(seed))
    arrays: dict[str, npt.NDArray[Any] | None] = {}
    for name, meta in call.inputs.items():
        arrays[name] = None
        if meta is not None:
            array = arrays[name] = view(meta, bytearray(meta.content_bytes))
            array[...] = made[name]
    return Job(record, call, arrays, CallOptions(**options))


class Ran(NamedTuple):
    """What came of a call.

    Attributes:
        outputs: Wanted outputs by name, arrays of their own; empty unless the answer is `CallDone`.
        answer: What the worker said.
    """

    outputs: dict[str, npt.NDArray[Any]]
    answer: CallDone | CallFailed | DeviceFailed
