"""Step 6: the device really runs out of memory, and then works on as if nothing had happened."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from npugrad_server.acceptance.extremes import HUGE, MOST_BYTES, large_call, needs_operator
from npugrad_server.acceptance.job import make_job
from npugrad_server.acceptance.known import known, words
from npugrad_server.acceptance.step import Step, StepSkipped
from npugrad_server.acl.faults import Action, fault_of
from npugrad_server.worker.protocol import CallDone, CallFailed, DeviceFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad_server.acceptance.report import Cell
    from npugrad_server.acceptance.rig import Rig
    from npugrad_server.acceptance.step import StepLog

    RunAnswer = CallDone | CallFailed | DeviceFailed

_MIB = 2**20
_FIRST_SHARE = 16
"""The first call needs the free memory divided by this."""
_TIMES = 2
"""A call that needs this many times the device's memory must be refused."""
_REPEATS = 4
"""How often the device must refuse, so that leaks of each refusal would add up."""
_MARGIN_BYTES = 16 * _MIB
"""Memory that may be missing afterwards, for kernels loaded meanwhile and other processes on the device."""
_LIMIT_S = 120.0


def run(rig: Rig, out: StepLog) -> None:
    """Grows a call until the device has no memory for it, then checks what that left behind."""
    needs_operator(rig)
    pid, first = rig.pid, rig.memory(give_back=True)
    if first.free_bytes is None or first.total_bytes is None:
        raise StepSkipped("the device has no memory of its own")
    _check_small_calls(rig, out, "before")  # they load their kernels, which stay
    start_bytes = min(MOST_BYTES, max(HUGE.unit_bytes, first.free_bytes // _FIRST_SHARE))
    out.check("a call with room for it is answered", *_answered(_ask(rig, start_bytes)))
    before = rig.memory(give_back=True)
    refused_bytes = _grow(rig, out, start_bytes, first.total_bytes)
    if refused_bytes is not None:
        refusals = [_ask(rig, refused_bytes) for _ in range(_REPEATS - 1)]
        wrong = [words(answer) for answer in refusals if not _is_refusal(answer)]
        out.check(
            "it is refused every time",
            not wrong,
            f"DEVICE_OUT_OF_MEMORY {_REPEATS} times",
            wrong[0] if wrong else f"DEVICE_OUT_OF_MEMORY {_REPEATS} times",
        )
    alive = rig.alive and rig.pid == pid
    out.check(
        "the worker keeps running",
        alive,
        f"process {pid}",
        f"process {rig.pid}" if rig.alive else "the worker ended",
    )
    if not alive:
        return
    _check_small_calls(rig, out, "after")
    after = rig.memory(give_back=True)
    _check_memory(out, before.free_bytes or 0, after.free_bytes or 0)


def _grow(rig: Rig, out: StepLog, start_bytes: int, total_bytes: int) -> int | None:
    """Grows a call until the device refuses it; returns the bytes it needed, None if it was not refused."""
    rows: list[tuple[Cell, ...]] = []
    answer: RunAnswer | None = None
    nbytes = 0
    for nbytes in needs(start_bytes, total_bytes):
        out.progress(len(rows), len(rows) + 1, f"a call that needs {nbytes / _MIB:,.0f} MiB of the device")
        start = time.monotonic()
        answer = _ask(rig, nbytes)
        rows.append((nbytes / _MIB, time.monotonic() - start, words(answer)))
        if not isinstance(answer, CallDone):
            break
    out.table(
        "Calls until the device ran out of memory", ("needs at least [MiB]", "took [s]", "answer"), rows
    )
    refused = _is_refusal(answer)
    out.check(
        "a call that the device has no memory for is refused",
        refused,
        "DEVICE_OUT_OF_MEMORY with a number of the vendor that means so",
        words(answer) if answer is not None else "",
        f"{nbytes / _MIB:,.0f} MiB requested, {total_bytes / _MIB:,.0f} MiB in all",
    )
    return nbytes if refused else None


def needs(start_bytes: int, total_bytes: int) -> Iterator[int]:
    """Yields the bytes that calls need: doubling up to `MOST_BYTES`, then more than the device has."""
    nbytes = start_bytes
    while nbytes < _TIMES * total_bytes:
        yield nbytes
        nbytes = 2 * nbytes if 2 * nbytes <= MOST_BYTES else _TIMES * total_bytes
    yield nbytes


def _ask(rig: Rig, nbytes: int) -> RunAnswer:
    job = large_call(rig.settings.product, nbytes)
    return rig.run_job(replace(job, deadline_s=time.monotonic() + _LIMIT_S)).answer


def _answered(answer: RunAnswer) -> tuple[bool, str, str]:
    return isinstance(answer, CallDone), "a result", words(answer)


def _is_refusal(answer: RunAnswer | None) -> bool:
    if not isinstance(answer, CallFailed) or answer.reason != "DEVICE_OUT_OF_MEMORY":
        return False
    return fault_of(int(answer.metadata.get("code", "0"))).action is Action.OUT_OF_MEMORY


def _check_small_calls(rig: Rig, out: StepLog, when: str) -> None:
    for record in rig.operators:
        job = known(record.name, make_job(record, next(rig.samples(record)).call))
        ran = rig.run_job(job.job)
        complaint = job.complaint(ran)
        if complaint:
            out.keep_call(f"{when}: {record.name}", job.job, ran)
        out.check(f"a small call {when}: {record.name}", not complaint, "right", complaint or "right")


def _check_memory(out: StepLog, before_bytes: int, after_bytes: int) -> None:
    missing = before_bytes - after_bytes
    out.check(
        "no device memory is lost",
        missing <= _MARGIN_BYTES,
        f"at least {(before_bytes - _MARGIN_BYTES) / _MIB:,.1f} MiB free, as before the refusals, "
        f"less {_MARGIN_BYTES // _MIB} MiB",
        f"{after_bytes / _MIB:,.1f} MiB free, {missing / _MIB:,.1f} MiB less than before",
        "after the worker freed what it keeps for later calls",
    )


STEP = Step(
    6,
    "memory",
    "Out of memory",
    "The device runs out of memory, reports it, and keeps working without a leak.",
    run,
)
"""The step."""
