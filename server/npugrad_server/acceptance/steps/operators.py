"""Step 3: every operator computes what its reference computes, however the call is made."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npugrad.call import CallOptions
from npugrad.meta import TensorMeta
from npugrad_server.acceptance.cases import SIMULATED_BYTES, small_calls
from npugrad_server.acceptance.job import make_job
from npugrad_server.acceptance.numerics import COLUMNS, Accuracy
from npugrad_server.acceptance.peers import check_peers
from npugrad_server.acceptance.probes import check_probes
from npugrad_server.acceptance.shapes import factor, float_dtypes, realistic_calls
from npugrad_server.acceptance.step import Step
from npugrad_server.worker.protocol import CallDone

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npugrad.operator import OpRecord
    from npugrad_server.acceptance.job import Job
    from npugrad_server.acceptance.rig import Rig
    from npugrad_server.acceptance.step import StepLog


_AT_ONCE = 16
"""Number of small calls whose data are in memory at once."""


def run(rig: Rig, out: StepLog) -> None:
    """Checks results first, then layouts, probes, and other ways of making the same call."""
    accuracy = Accuracy()
    for record in rig.operators:
        _small(rig, out, record, accuracy)
        if not rig.settings.quick:
            _realistic(rig, out, record, accuracy)
        with rig.deterministic():
            _strided(rig, out, record)
    out.table("Errors against the float64 reference", COLUMNS, accuracy.rows())
    check_probes(rig, out)
    check_peers(rig, out)
    if rig.settings.simulated:
        factors = [
            f"{record.name} {workload.name} {factor(record, workload):.0f} times"
            for record in rig.operators
            for workload in record.workloads.accepted
        ]
        out.note(
            f"On the simulation calls of more than {SIMULATED_BYTES >> 20} MiB are left out, and realistic "
            f"sizes are smaller: {', '.join(factors)}."
        )


def _small(rig: Rig, out: StepLog, record: OpRecord, accuracy: Accuracy) -> None:
    calls = list(small_calls(record, rig.settings.product, rig.settings.simulated))
    for start in range(0, len(calls), _AT_ONCE):
        some = calls[start : start + _AT_ONCE]
        out.progress(start, len(calls), f"{record.name}: {some[0].name}")
        jobs = [make_job(record, small.call, start + seed) for seed, small in enumerate(some)]
        for small, job, ran in zip(some, jobs, rig.run_many(jobs), strict=True):
            accuracy.check(out, f"{record.name}: {small.name}", "small", str(small.dtype), job, ran)


def _realistic(rig: Rig, out: StepLog, record: OpRecord, accuracy: Accuracy) -> None:
    calls = list(realistic_calls(record, rig.settings.product, rig.settings.simulated))
    for done, (size, dtype, call) in enumerate(calls):
        out.progress(done, len(calls), f"{record.name}: {size.name} {dtype}")
        job = make_job(record, call, seed=done)
        name = f"{record.name}: {dtype} {size.name}"
        accuracy.check(out, name, size.name, str(dtype), job, rig.run_job(job))


def _strided(rig: Rig, out: StepLog, record: OpRecord) -> None:
    """Checks operands with their axes reversed in memory, one by one and all at once."""
    product = rig.settings.product
    out.progress(0, 1, f"{record.name}: strided operands")
    call = record.build(dtype=float_dtypes(record, product)[0], product=product)
    deterministic = not rig.why_not_deterministic(record, call)
    plain = replace(make_job(record, call), options=CallOptions(deterministic=deterministic))
    golden = rig.run_job(plain)
    if not Accuracy().check(out, f"{record.name}: contiguous operands", "strided", "", plain, golden):
        return
    for names in _chosen(record, call.inputs):
        ran = rig.run_job(_turned(plain, names))
        title = f"{record.name}: strided {', '.join(names)}"
        if not isinstance(ran.answer, CallDone):
            out.check(title, False, "a result", ran.answer.message)
        elif deterministic:
            same = [n for n in golden.outputs if ran.outputs[n].tobytes() == golden.outputs[n].tobytes()]
            others = [n for n in golden.outputs if n not in same]
            out.check(title, not others, "the bits of contiguous operands", _differ(others))
        else:
            Accuracy().check(out, title, "strided", "", plain, ran)


def _differ(names: list[str]) -> str:
    return f"different bits in {', '.join(names)}" if names else "the same"


def _chosen(record: OpRecord, inputs: Mapping[str, TensorMeta | None]) -> Iterator[tuple[str, ...]]:
    names = tuple(param.name for param in record.inputs)
    present = tuple(name for name in names if inputs[name] is not None)
    yield from ((name,) for name in present)
    yield present


def _turned(job: Job, names: tuple[str, ...]) -> Job:
    """Returns the same call and values, with some operands in column-major order."""
    turned = {name: _column_major(job.call.tensor(name)) for name in names}
    return replace(job, call=job.call.with_inputs(**turned))


def _column_major(meta: TensorMeta) -> TensorMeta:
    strides, step = [], 1
    for size in meta.shape:
        strides.append(step)
        step *= max(size, 1)
    return TensorMeta(meta.dtype, meta.shape, meta.format, strides)


STEP = Step(
    3,
    "operators",
    "Operators",
    "All operators, types, modes and masks, small and realistic, against float64 references and torch_npu.",
    run,
)
