"""`npugrad bench`: a closed loop of a fixed number of calls in flight.

A closed loop tells what the callers of such a loop see. It hides queueing that callers with a schedule of
their own would see, because a slow answer delays the next call; the report says so.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from npugrad.products import Product
from npugrad_client import Client
from npugrad_client._cli.files import FileError

if TYPE_CHECKING:
    import numpy.typing as npt
    from hdrh.histogram import HdrHistogram
    from rich.console import Console

    from npugrad.spec import OpSpec

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_LOWEST_US, _HIGHEST_US, _DIGITS = 1, 3_600_000_000, 3
_SHOWN = ("latency_s", "server_mean_s")
_STAGES = ("queued_s", "copy_in_s", "run_s", "copy_out_s")

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "multi_scale_deformable_attention_grad": {
        "small": {"bs": 1, "nq": 32, "nh": 2, "ch": 8, "levels": ((8, 8), (4, 4)), "points": 4},
        "medium": {
            "bs": 2,
            "nq": 300,
            "nh": 8,
            "ch": 32,
            "levels": ((50, 67), (25, 34), (13, 17)),
            "points": 4,
        },
        "large": {
            "bs": 2,
            "nq": 4484,
            "nh": 8,
            "ch": 32,
            "levels": ((50, 67), (25, 34), (13, 17)),
            "points": 4,
        },
    },
    "grid_sampler_2d_backward": {
        "small": {"n": 1, "c": 3, "h": 16, "w": 16, "oh": 16, "ow": 16},
        "medium": {"n": 4, "c": 3, "h": 128, "w": 128, "oh": 128, "ow": 128},
        "large": {"n": 4, "c": 64, "h": 128, "w": 128, "oh": 128, "ow": 128},
    },
    "group_norm_backward": {
        "small": {"n": 2, "c": 32, "hxw": 64, "group": 8},
        "medium": {"n": 2, "c": 128, "hxw": 1024, "group": 32},
        "large": {"n": 8, "c": 320, "hxw": 4096, "group": 32},
    },
    "fused_floyd_attention_grad": {
        "small": {"b": 1, "h": 1, "n": 16, "m": 128, "k": 128, "d": 32},
        "medium": {"b": 1, "h": 1, "n": 64, "m": 128, "k": 128, "d": 32},
        "large": {"b": 1, "h": 1, "n": 128, "m": 128, "k": 128, "d": 64},
    },
}
"""Sizes of the measured calls, by operator."""


@dataclass(frozen=True)
class Plan:
    """What is measured: one call of one operator, so many at a time, for so long or so often."""

    spec: OpSpec
    dtype: str
    size: str
    operands: dict[str, npt.NDArray[Any] | None]
    attrs: dict[str, Any]
    concurrency: int
    duration_s: float
    max_calls: int


def make_plan(
    spec: OpSpec, dtype: str, size: str, concurrency: int, duration_s: float, max_calls: int
) -> Plan:
    """Makes the operands of a measurement.

    Args:
        spec: The operator.
        dtype: Element type; empty for the operator's first one.
        size: ``"small"``, ``"medium"`` or ``"large"``.
        concurrency: Calls in flight.
        duration_s: Seconds to measure.
        max_calls: Calls after which to stop in any case.

    Raises:
        FileError: There is no such size or type, or none that the operator takes.
    """
    sizes = SIZES[spec.name]
    if size not in sizes:
        raise FileError(f"--size: found {size!r}; expected {', '.join(sizes)}")
    supported = [str(d) for d in spec.inputs[0].dtypes[Product.ATLAS_A2]]
    wanted = dtype or supported[0]
    if wanted not in supported:
        raise FileError(f"--dtype: found {wanted!r}; expected {', '.join(supported)}")
    call = spec.build(dtype=wanted, **sizes[size])
    operands = spec.make_inputs(call, np.random.default_rng(7))
    return Plan(spec, wanted, size, operands, dict(call.attrs), concurrency, duration_s, max_calls)


@dataclass
class Report:
    """What was measured.

    Attributes:
        plan: What was asked for.
        elapsed_s: Seconds from the first start to the last answer.
        latency: Round-trip times in microseconds.
        is_interrupted: Whether it was ended before its time.
        stages: Sums of the server's stages in seconds, over all answers.
        errors: Failed calls by reason.
        devices: Answers by device and backend.
    """

    plan: Plan
    elapsed_s: float
    latency: HdrHistogram
    is_interrupted: bool = False
    stages: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    devices: Counter[str] = field(default_factory=Counter)

    @property
    def answered(self) -> int:
        """Calls that came back right."""
        return int(self.latency.get_total_count())

    @property
    def succeeded(self) -> bool:
        """Whether something was measured and nothing failed."""
        return self.answered > 0 and not self.errors

    def as_dict(self) -> dict[str, Any]:
        """The report for scripts; latencies and stages in seconds."""
        count = max(self.answered, 1)
        return {
            "loop": "closed",
            "operator": self.plan.spec.name,
            "dtype": self.plan.dtype,
            "size": self.plan.size,
            "concurrency": self.plan.concurrency,
            "elapsed_s": self.elapsed_s,
            "interrupted": self.is_interrupted,
            "answered": self.answered,
            "errors": dict(self.errors),
            "throughput_per_s": self.answered / self.elapsed_s if self.elapsed_s else 0.0,
            "latency_s": {f"p{p:g}": self.latency.get_value_at_percentile(p) / 1e6 for p in PERCENTILES}
            | {"max": self.latency.get_max_value() / 1e6, "mean": self.latency.get_mean_value() / 1e6},
            "server_mean_s": {stage: self.stages[stage] / count for stage in _STAGES},
            "devices": dict(self.devices),
        }


def measure(plan: Plan, target: str, timeout_s: float) -> Report:
    """Runs the loop; an interrupt ends it early and keeps what was measured.

    Args:
        plan: What to measure.
        target: Address of the server.
        timeout_s: Deadline of each call in seconds.

    Raises:
        NpugradError: The first call failed, so there is nothing to measure.
        FileError: The extra `bench` is not installed.
    """
    try:
        from hdrh.histogram import HdrHistogram
    except ImportError:
        raise FileError("npugrad bench needs the extra `bench`: pip install 'npugrad[bench]'") from None

    report = Report(plan, 0.0, HdrHistogram(_LOWEST_US, _HIGHEST_US, _DIGITS))
    with Client(target, timeout_s=timeout_s) as client:
        _call(client, plan)  # connects and warms up; not counted
        loop = _Loop(client, plan, report)
        report.elapsed_s = loop.run()
    return report


def _call(client: Client, plan: Plan) -> Any:
    return getattr(client, plan.spec.name)(**plan.operands, **plan.attrs, label="bench")


class _Loop:
    """`concurrency` threads, each with one call in flight, until time or count is up."""

    def __init__(self, client: Client, plan: Plan, report: Report) -> None:
        self._client, self._plan, self._report = client, plan, report
        self._lock = threading.Lock()
        self._left = plan.max_calls
        self._end_s = 0.0
        self._stop, self._ended = threading.Event(), threading.Event()
        self._working = plan.concurrency

    def run(self) -> float:
        """Runs to the end; seconds it took."""
        start = time.perf_counter()
        self._end_s = start + self._plan.duration_s
        for _ in range(self._plan.concurrency):
            threading.Thread(target=self._work, daemon=True).start()
        # Not Thread.join: interrupted, it takes a running thread for ended (CPython before 3.13).
        try:
            self._ended.wait()
        except KeyboardInterrupt:
            self._report.is_interrupted = True
            self._stop.set()
            self._ended.wait()  # calls in flight end as they would; a second interrupt gives them up
        return time.perf_counter() - start

    def _work(self) -> None:
        try:
            while self._take():
                self._measure_one()
        finally:
            with self._lock:
                self._working -= 1
                if not self._working:
                    self._ended.set()

    def _take(self) -> bool:
        with self._lock:
            if self._stop.is_set() or self._left == 0 or time.perf_counter() >= self._end_s:
                return False
            self._left -= 1
            return True

    def _measure_one(self) -> None:
        start = time.perf_counter()
        try:
            answer = _call(self._client, self._plan)
        except Exception as error:  # counted, whatever it is: a thread that died would hide it
            with self._lock:
                self._report.errors[getattr(error, "reason", type(error).__name__)] += 1
        else:
            self._record(time.perf_counter() - start, answer.info)

    def _record(self, seconds: float, info: Any) -> None:
        with self._lock:
            self._report.latency.record_value(max(_LOWEST_US, int(seconds * 1e6)))
            self._report.devices[f"{info.device} ({info.backend})"] += 1
            for stage in _STAGES:
                self._report.stages[stage] += getattr(info, stage)


def show(console: Console, report: Report) -> None:
    """Prints the report for a person."""
    plan, values = report.plan, report.as_dict()
    console.print(
        f"{plan.spec.name} {plan.dtype} {plan.size}, {plan.concurrency} in flight (closed loop), "
        f"{report.elapsed_s:.1f} s: {report.answered} answers, {values['throughput_per_s']:.1f} per second",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 3, 0, 0))
    for name in ("latency", "ms", "server stage, mean", "ms"):
        table.add_column(name, justify="right" if name == "ms" else "left")
    latency, stages = ([(n, f"{s * 1e3:.3f}") for n, s in values[key].items()] for key in _SHOWN)
    for left, right in zip_longest(latency, stages, fillvalue=("", "")):
        table.add_row(*left, *right)
    console.print(table)
    for reason, count in report.errors.most_common():
        console.print(f"failed: {count} x {reason}")
    if report.is_interrupted:
        console.print("Interrupted: this is what was measured until then.")
    console.print(
        "A closed loop waits for each answer, so it hides the queueing that callers on a schedule would see.",
        soft_wrap=True,
    )
