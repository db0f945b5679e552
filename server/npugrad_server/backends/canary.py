"""Canaries: tiny calls with known results that expose a device that computes wrongly.

A device that fails says so; one that computes wrongly does not. A canary runs like any call and is compared
as `verify` compares: a device that follows another coordinate rule, as the vendor's kernels do, is right.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.agreement import agreement, computed, unwritten
from npugrad.call import CallOptions
from npugrad.validation import validate_call
from npugrad_server.backends.base import DeviceCall, DeviceLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad.products import Product
    from npugrad_server.backends.base import Backend, Timings

    Run = Callable[[OpRecord, DeviceCall], Timings]

LIMIT_S = 60.0
"""Time limit of a canary in seconds; an operator's first one loads its kernels."""


class CanaryResult(str, Enum):
    """How a canary ended; compares equal to its name."""

    OK = "ok"
    MISMATCH = "mismatch"
    ERROR = "error"
    """The device failed and said so: not a silent error, and the calls that hit it are told."""

    def __str__(self) -> str:
        """The name."""
        return str(self.value)


@dataclass(frozen=True)
class CanaryFinding:
    """What a canary found.

    Attributes:
        operator: Name of the operator.
        result: How it ended.
        detail: The figures of a wrong result, or what failed; never a tensor's values.
    """

    operator: str
    result: CanaryResult
    detail: str = ""


class Canary:
    """One tiny call of an operator: made once, run any number of times, by one thread at a time.

    Attributes:
        operator: Name of the operator.
    """

    def __init__(self, record: OpRecord, product: Product, *, legal: bool) -> None:
        """Draws the operands; the reference results are computed when first needed.

        Args:
            record: The operator.
            product: Product the device stands for.
            legal: Whether the device refuses what its product refuses.
        """
        self.operator = record.name
        self._record = record
        self._meta = canary_call(record, product, legal=legal)
        self._inputs = record.make_inputs(self._meta, np.random.default_rng(0))
        self._golden: Mapping[str, npt.NDArray[np.float64]] | None = None

    def run(self, run: Run, stream: int = 0) -> CanaryFinding:
        """Runs it on a stream and compares; raises DeviceLost if the process must exit."""
        try:
            return self.judge(self.results(run, stream))
        except DeviceLost:
            raise
        except Exception as error:
            return CanaryFinding(self.operator, CanaryResult.ERROR, f"{type(error).__name__}: {error}")

    def results(self, run: Run, stream: int = 0) -> dict[str, npt.NDArray[Any]]:
        """Runs it on a stream and returns the results; errors as for `Backend.run`."""
        outputs = {
            name: unwritten(wanted)
            for name, wanted in self._record.infer(self._meta).items()
            if wanted is not None
        }
        give_up_s = time.monotonic() + LIMIT_S
        run(
            self._record,
            DeviceCall(self._meta, self._inputs, outputs, CallOptions(), stream, give_up_s, is_canary=True),
        )
        return outputs

    def judge(self, results: Mapping[str, npt.NDArray[Any]]) -> CanaryFinding:
        """Compares results with the reference."""
        record, attrs = self._record, self._meta.attrs
        if self._golden is None:
            self._golden = computed(record, self._inputs, attrs, results)
        found = agreement(record, self._inputs, attrs, results, self._golden)
        if found.ok:
            return CanaryFinding(self.operator, CanaryResult.OK)
        return CanaryFinding(self.operator, CanaryResult.MISMATCH, str(found))


def canary_call(record: OpRecord, product: Product, *, legal: bool) -> CallMeta:
    """Returns the smallest call of an operator that tells a right device from a wrong one.

    Args:
        record: The operator.
        product: Product it is for.
        legal: Whether it must stay within the product's limits, which references and CPU kernels exceed.
    """
    workloads = record.workloads
    call = record.build(**(workloads.canary or workloads.uneven), product=product)
    if not legal or not validate_call(record, call).status:
        return call
    return record.build(**workloads.named["tiny"].sizes, product=product)


class Canaries:
    """The canaries of one device, in the order of its operators."""

    def __init__(self, backend: Backend, product: Product) -> None:
        """Makes one for each operator that an open device runs; none if it computes nothing.

        Args:
            backend: Drives the device.
            product: Product it stands for.
        """
        self._backend = backend
        records = [record for record in backend.records.values() if product in record.products]
        self._canaries = [
            Canary(record, product, legal=backend.is_limited)
            for record in records
            if backend.computes and record.name not in backend.unavailable
        ]

    def __len__(self) -> int:
        """How many there are."""
        return len(self._canaries)

    def run(self, number: int, stream: int = 0) -> CanaryFinding:
        """Runs one; numbers count from 0 and wrap around. Raises DeviceLost if the process must exit."""
        return self._canaries[number % len(self._canaries)].run(self._backend.run, stream)

    def first(self, rounds: int) -> list[int]:
        """Numbers of those to run before the device is ready: without the deferred ones in a single round."""
        deferred = self._backend.deferred if rounds == 1 else ()
        return [number for number, each in enumerate(self._canaries) if each.operator not in deferred]

    def first_wrong(self, rounds: int) -> CanaryFinding | None:
        """Runs the first `rounds` times, up to one that is wrong twice in a row; returns that, if any."""
        for number in self.first(rounds) * rounds:
            if self.run(number).result is CanaryResult.MISMATCH:
                again = self.run(number)
                if again.result is CanaryResult.MISMATCH:
                    return again
        return None
