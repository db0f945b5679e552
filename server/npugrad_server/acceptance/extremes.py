"""Calls that take much of the device and next to nothing of the host.

Their operands repeat one element (stride 0), so that neither host memory nor copies grow with them, and the
output that grows is masked out: the operator needs device memory for it, but nobody copies it back.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.call import CallOptions
from npugrad.dtypes import DType
from npugrad.meta import TensorMeta
from npugrad.ops import get_operator
from npugrad_server.acceptance.job import Job
from npugrad_server.acceptance.known import KnownJob, words
from npugrad_server.acceptance.step import StepSkipped
from npugrad_server.acl.layout import arrange
from npugrad_server.worker.protocol import CallDone

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npugrad.meta import CallMeta
    from npugrad.products import Product
    from npugrad_server.acceptance.bench import Bench
    from npugrad_server.acceptance.job import Ran
    from npugrad_server.acceptance.report import Cell
    from npugrad_server.acceptance.step import StepLog

OPERATOR = "grid_sampler_2d_backward"
"""It needs memory for outputs that are masked out, and takes expanded operands."""
_IMAGE = {"c": 16, "h": 256, "w": 256}
IMAGE_BYTES = 4 * math.prod(_IMAGE.values())
"""Device memory that each image of `large_call` needs at least."""
MOST_BYTES = 4 * 2**30
"""With 2^31 elements a kernel may count wrongly: a larger `large_call` is for devices without room for it."""
_MOST_POINTS = 2**24
"""So many equal float32 values can be added one by one without rounding, in whatever order."""
_CALL_LIMIT_S = 60.0


def needs_operator(bench: Bench) -> None:
    """Makes sure that the device has the operator.

    Raises:
        StepSkipped: It has not.
    """
    missing = bench.ready.unavailable.get(OPERATOR)
    if missing is not None:
        raise StepSkipped(f"needs {OPERATOR}, which the device does not have: {missing}")


def large_call(product: Product, nbytes: int) -> Job:
    """A call that needs at least so many bytes of device memory, in whole images of 4 MiB."""
    images = max(1, -(-nbytes // IMAGE_BYTES))
    record = get_operator(OPERATOR)
    call = record.build(
        dtype=DType.FLOAT32, product=product, n=images, **_IMAGE, oh=1, ow=1, output_mask=(False, True)
    )
    return _expanded(call, {"grad_output": 1.0, "input": 1.0, "grid": 0.0}, "large")


@dataclass(frozen=True)
class Size:
    """Size of a long call.

    Attributes:
        n: Images.
        c: Channels.
        points: Sampling points on each axis.
    """

    n: int
    c: int
    points: int

    def __str__(self) -> str:
        """The shape of gradOutput."""
        return f"{self.n} x {self.c} x {self.points} x {self.points}"


def sizes() -> Iterator[Size]:
    """Sizes of long calls, each two to four times the one before; none has 2^31 elements."""
    for points in (256, 512, 1024, 1448, 2048, 2896):
        yield Size(1, 1, points)
    for n, c in ((1, 1), (1, 4), (1, 16), (2, 32)):
        yield Size(n, c, math.isqrt(_MOST_POINTS))


def long_call(product: Product, size: Size) -> KnownJob:
    """A call that adds up many equal values at one pixel of each channel; the sum is exact."""
    record, value = get_operator(OPERATOR), 1.0 / _MOST_POINTS
    call = record.build(
        dtype=DType.FLOAT32,
        product=product,
        **{"n": size.n, "c": size.c, "h": 2, "w": 2, "oh": size.points, "ow": size.points},
        align_corners=True,
        output_mask=(True, False),
    )
    # Every point lies on the centre of the first pixel, whose weight is 1.
    job = _expanded(call, {"grad_output": value, "input": 0.0, "grid": -1.0}, "long")
    golden = np.zeros((size.n, size.c, 2, 2))
    golden[..., 0, 0] = value * size.points**2
    return KnownJob(f"{OPERATOR} {size}", job, {"input_grad": golden}, {"input_grad": 0.0})


def _expanded(call: CallMeta, values: Mapping[str, float], label: str) -> Job:
    """A job whose operands have one element in memory each, repeated to their shapes."""
    metas: dict[str, TensorMeta | None] = {}
    arrays: dict[str, Any] = {}
    for name, value in values.items():
        shape = call.tensor(name).shape
        metas[name] = TensorMeta(DType.FLOAT32, shape, strides=(0,) * len(shape))
        arrays[name] = np.broadcast_to(np.float32(value), shape)
    record = get_operator(OPERATOR)
    return Job(record, call.with_inputs(**metas), arrays, CallOptions(label=label))


@dataclass(frozen=True)
class LongCall:
    """A call that runs long enough, measured.

    Attributes:
        known: The call.
        run_s: Seconds its operator ran.
    """

    known: KnownJob
    run_s: float


def find_long_call(bench: Bench, out: StepLog, target_s: float, least_s: float) -> LongCall:
    """Grows a call until it runs so long, or the device has no room for it, and writes down what it tried.

    Args:
        bench: Runs it.
        out: Gets the table, and a check that every result was right.
        target_s: Seconds to come to.
        least_s: Seconds that do when no call comes to that.

    Raises:
        StepSkipped: No call takes that long.
    """
    needs_operator(bench)
    rows: list[tuple[Cell, ...]] = []
    found, wrong = None, ""
    for size in sizes():
        out.progress(len(rows), len(rows) + 1, f"growing a call: {size}")
        tried = long_call(bench.settings.product, size)
        if not _leaves_room(bench, tried.job):
            rows.append((str(size), None, "not tried: half of the device's memory is left for other things"))
            break
        ran = _grown(bench, tried)
        if isinstance(ran.answer, CallDone) and ran.answer.run_s >= target_s:
            ran = _grown(bench, tried)  # perhaps it was only the first one, which loads its kernels
        if not isinstance(ran.answer, CallDone):
            rows.append((str(size), None, words(ran.answer)))
            break
        wrong = wrong or tried.complaint(ran)
        found = LongCall(tried, ran.answer.run_s)
        rows.append((str(size), ran.answer.run_s, "result"))
        if found.run_s >= target_s:
            break
    out.table("Growing a call until it takes long", ("gradOutput, expanded", "run [s]", "answer"), rows)
    if found is None or found.run_s < least_s:
        raise StepSkipped(f"no call here runs for {least_s:g} s, so none can be stopped in its middle")
    out.check("the long calls are right", not wrong, "exact sums", wrong or "exact sums")
    return found


def _grown(bench: Bench, tried: KnownJob) -> Ran:
    return bench.run_job(replace(tried.job, options=CallOptions(label="growing"), deadline_s=_limit()))


def _leaves_room(bench: Bench, job: Job) -> bool:
    """Whether the pool takes the call as well, which keeps some memory back and sets the workspace aside."""
    memory_bytes = bench.ready.memory_bytes
    return memory_bytes is None or arrange(job.record, job.call).nbytes <= memory_bytes // 2


def _limit() -> float:
    return time.monotonic() + _CALL_LIMIT_S
