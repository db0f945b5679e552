"""Calls that take much of the device and next to nothing of the host.

Their operands repeat one element (stride 0), so that neither host memory nor copies grow with them. The
output that grows is masked out: the operator needs device memory for it, but it is not copied back.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.call import CallOptions
from npugrad.dtypes import DType
from npugrad.meta import TensorMeta
from npugrad.ops import OPERATORS
from npugrad_server.acceptance.job import Job
from npugrad_server.acceptance.known import KnownJob, words
from npugrad_server.acceptance.step import StepSkipped
from npugrad_server.acl.layout import arrange
from npugrad_server.worker.protocol import CallDone

if TYPE_CHECKING:
    from npugrad.operator import OpRecord
    from npugrad.products import Product
    from npugrad.workloads import Expanded, Huge
    from npugrad_server.acceptance.job import Ran
    from npugrad_server.acceptance.report import Cell
    from npugrad_server.acceptance.rig import Rig
    from npugrad_server.acceptance.step import StepLog

MOST_BYTES = 4 * 2**30
"""Kernels may miscount from 2^31 elements on; a larger `large_call` is for devices without room for it."""
_CALL_LIMIT_S = 60.0
_RUNS = 3
"""How often a long call is run: its time is that of the fastest run, as a busy host only adds to it."""


def _first() -> tuple[OpRecord, Huge]:
    return next(
        (record, record.workloads.huge) for record in OPERATORS.values() if record.workloads.huge is not None
    )


RECORD, HUGE = _first()
"""The first operator that has such calls, and how they are made."""


def needs_operator(rig: Rig) -> None:
    """Checks that the device has the operator.

    Raises:
        StepSkipped: It does not.
    """
    missing = rig.ready.unavailable.get(RECORD.name)
    if missing is not None:
        raise StepSkipped(f"needs {RECORD.name}, which the device does not have: {missing}")


def large_call(product: Product, nbytes: int) -> Job:
    """Returns a call that needs at least `nbytes` of device memory, in whole units."""
    return _expanded(product, HUGE.large(max(1, -(-nbytes // HUGE.unit_bytes))), "large")


def long_call(product: Product, expanded: Expanded) -> KnownJob:
    """Returns a call that takes long, with its exact results."""
    golden = expanded.expected()
    job = _expanded(product, expanded, "long")
    return KnownJob(f"{RECORD.name} {expanded.name}", job, golden)


def _expanded(product: Product, expanded: Expanded, label: str) -> Job:
    """Returns a job whose operands each have one element in memory, repeated to their shapes."""
    call = RECORD.build(dtype=DType.FLOAT32, product=product, **expanded.sizes)
    metas: dict[str, TensorMeta | None] = {}
    arrays: dict[str, Any] = {}
    for name, value in expanded.values.items():
        shape = call.tensor(name).shape
        metas[name] = TensorMeta(DType.FLOAT32, shape, strides=(0,) * len(shape))
        arrays[name] = np.broadcast_to(np.float32(value), shape)
    return Job(RECORD, call.with_inputs(**metas), arrays, CallOptions(label=label))


@dataclass(frozen=True)
class LongCall:
    """A call that runs long enough, with its measured time.

    Attributes:
        known: The call.
        run_s: Seconds its operator ran, the fastest of its runs.
    """

    known: KnownJob
    run_s: float


def find_long_call(rig: Rig, out: StepLog, target_s: float, least_s: float) -> LongCall:
    """Grows a call until it runs for `target_s`, or the device has no room for it, and logs every size.

    Args:
        rig: Runs it.
        out: Receives the table, and a check that every result was right.
        target_s: Seconds to reach.
        least_s: Seconds that suffice if no call reaches `target_s`.

    Raises:
        StepSkipped: No call runs for `least_s`.
    """
    needs_operator(rig)
    rows: list[tuple[Cell, ...]] = []
    found, wrong = None, ""
    for size in HUGE.long:
        out.progress(len(rows), len(rows) + 1, f"growing a call: {size.name}")
        tried = long_call(rig.settings.product, size)
        if not _leaves_room(rig, tried.job):
            rows.append((size.name, None, "not tried: it needs more than half of the device's memory"))
            break
        runs = _runs(rig, tried, target_s)
        times = [ran.answer.run_s for ran in runs if isinstance(ran.answer, CallDone)]
        wrong = next(filter(None, (wrong, *map(tried.complaint, runs[: len(times)]))), "")
        if len(times) < len(runs):
            rows.append((size.name, None, words(runs[-1].answer)))
            break
        found = LongCall(tried, min(times))
        rows.append((size.name, found.run_s, "result"))
        if found.run_s >= target_s:
            break
    out.table("Growing a call until it takes long", ("operands, expanded", "run [s]", "answer"), rows)
    if found is None or found.run_s < least_s:
        raise StepSkipped(f"no call here runs for {least_s:g} s, so none can be interrupted while it runs")
    out.check("the long calls are right", not wrong, "exact sums", wrong or "exact sums")
    return found


def _runs(rig: Rig, tried: KnownJob, target_s: float) -> list[Ran]:
    """Runs a call up to `_RUNS` times, as long as each run takes `target_s`: the first may load kernels."""
    runs = [_grown(rig, tried)]
    while len(runs) < _RUNS and isinstance(answer := runs[-1].answer, CallDone) and answer.run_s >= target_s:
        runs.append(_grown(rig, tried))
    return runs


def _grown(rig: Rig, tried: KnownJob) -> Ran:
    return rig.run_job(replace(tried.job, options=CallOptions(label="growing"), deadline_s=_limit()))


def _leaves_room(rig: Rig, job: Job) -> bool:
    """Whether the pool, which keeps some memory back and reserves the workspace, takes the call as well."""
    memory_bytes = rig.ready.memory_bytes
    return memory_bytes is None or arrange(job.record, job.call).nbytes <= memory_bytes // 2


def _limit() -> float:
    return time.monotonic() + _CALL_LIMIT_S
