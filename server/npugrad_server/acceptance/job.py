"""One call with its data, and its outcome."""

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
        deadline_s: `time.monotonic()` after which the result is useless; None for no deadline.
        outputs: Metas of the outputs, None for those not wanted; by default what the record infers.
    """

    record: OpRecord
    call: CallMeta
    arrays: Arrays
    options: CallOptions = field(default_factory=CallOptions)
    deadline_s: float | None = None
    outputs: Mapping[str, TensorMeta | None] | None = None

    def planned(self) -> PlannedCall:
        """Returns the call in the form that the pool takes."""
        outputs = self.record.infer(self.call) if self.outputs is None else self.outputs
        return PlannedCall.alone(self.record, self.call, outputs, self.options, "acceptance", self.deadline_s)

    def write(self, name: str, memory: memoryview) -> None:
        """Writes an operand to memory in the layout of its meta; repeated elements are written once."""
        meta, array = self.call.inputs[name], self.arrays[name]
        if meta is not None and array is not None and meta.size:
            target = view(meta, memory)
            once = tuple(slice(None if step else 1) for step in target.strides)
            target[once] = array[once]


def make_job(record: OpRecord, call: CallMeta, seed: int = 0, **options: Any) -> Job:
    """Creates a call with plausible data from a seed; `options` are those of `CallOptions`.

    An expanded operand repeats elements, so the arrays are views of its actual memory.
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
    """The outcome of a call.

    Attributes:
        outputs: Copies of the wanted outputs by name; empty unless the answer is `CallDone`.
        answer: The worker's answer.
    """

    outputs: dict[str, npt.NDArray[Any]]
    answer: CallDone | CallFailed | DeviceFailed
