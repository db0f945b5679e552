"""The same calls made in other ways: in other formats, and through torch_npu's own bindings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from npugrad.call import CallOptions
from npugrad.dtypes import Format
from npugrad.meta import TensorMeta
from npugrad_server.acceptance.job import make_job
from npugrad_server.acceptance.shapes import build, float_dtypes
from npugrad_server.acl.layout import arrange
from npugrad_server.backends.npu.trials.exchange import RawCall, part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from npugrad_server.acceptance.job import Job
    from npugrad_server.acceptance.report import Cell
    from npugrad_server.acceptance.rig import Rig
    from npugrad_server.acceptance.step import StepLog

    Bytes = npt.NDArray[np.uint8]

NAMED_FORMATS = {3: Format.NCL, 4: Format.NCHW, 5: Format.NCDHW}
"""Formats that torch_npu's bindings give tensors of these ranks; all others are ND."""


@dataclass(frozen=True)
class PeerJob:
    """One call to be run in several ways.

    Attributes:
        name: Readable name.
        job: The job as the worker runs it, deterministic if the operator can be.
        bound: Whether torch_npu binds the operator and passes this call down unchanged.
    """

    name: str
    job: Job
    bound: bool

    @property
    def deterministic(self) -> bool:
        """Whether bitwise equal results can be expected."""
        return self.job.options.deterministic

    def case(self, *, named: bool) -> RawCall:
        """Returns all tensors as passed to CANN: in the device's shapes, in ND or in named formats."""
        arranged = arrange(self.job.record, self.job.call)
        tensors = dict.fromkeys((p.name for p in (*self.job.record.inputs, *self.job.record.outputs)), None)
        metas = {slot.name: slot.meta for slot in arranged.inputs + arranged.outputs}
        return RawCall(
            self.job.record.name,
            self.job.call.attrs,
            {**tensors, **{name: _formatted(meta, named) for name, meta in metas.items()}},
        )

    def contents(self, index: int) -> dict[str, Bytes]:
        """Returns the contiguous bytes of the operands."""
        return {
            part(index, name): np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for name, array in self.job.arrays.items()
            if array is not None
        }


def _formatted(meta: TensorMeta, named: bool) -> TensorMeta:
    found = NAMED_FORMATS.get(meta.rank, Format.ND) if named else Format.ND
    return TensorMeta(meta.dtype, meta.shape, found)


def peer_jobs(rig: Rig) -> Iterator[PeerJob]:
    """Yields one small and, unless the acceptance is quick, one realistic call of each operator and type."""
    settings = rig.settings
    for record in rig.operators:
        for dtype in float_dtypes(record, settings.product):
            made = [("small", make_job(record, record.build(dtype=dtype, product=settings.product)))]
            for workload in () if settings.quick else record.workloads.accepted[:1]:
                call = build(record, workload, settings.simulated, dtype=dtype, product=settings.product)
                made.append((workload.name, make_job(record, call)))
            for name, job in made:
                options = CallOptions(deterministic=not rig.why_not_deterministic(record, job.call))
                binding = record.binding
                bound = binding is not None and binding.is_compared and binding.takes(job.call)
                yield PeerJob(f"{record.name} {dtype} {name}", replace(job, options=options), bound)


def check_peers(rig: Rig, out: StepLog) -> None:
    """Runs each call on the worker, in ND and in named formats, and through torch_npu's binding."""
    jobs = list(peer_jobs(rig))
    with rig.deterministic():
        ours = [
            {name: array.tobytes() for name, array in ran.outputs.items()}
            for ran in (rig.run_job(peer.job) for peer in jobs)
        ]
    out.progress(0, 3, "the same calls in ND and in named formats")
    rows = [*_formats(rig, out, jobs, ours)]
    out.progress(1, 3, "the same calls by torch_npu's bindings")
    bound = [(peer, results) for peer, results in zip(jobs, ours, strict=True) if peer.bound]
    rows += _bindings(rig, out, bound)
    out.table("The same call in other ways", ("call", "way", "determinism", "equal bits", "words"), rows)
    records = {peer.job.record.name: peer.job.record for peer in jobs}
    unbound = sorted(name for name, record in records.items() if record.binding is None)
    if unbound:
        out.note(f"torch_npu has no binding for {', '.join(unbound)}, so there is no peer on the device.")
    others = [peer.name for peer in jobs if not peer.bound and peer.job.record.name not in unbound]
    if others:
        out.note(f"torch_npu's bindings make different calls for {', '.join(others)}, so these have no peer.")


def _formats(
    rig: Rig, out: StepLog, jobs: Sequence[PeerJob], ours: Sequence[dict[str, bytes]]
) -> Iterator[tuple[Cell, ...]]:
    cases = [peer.case(named=named) for peer in jobs for named in (False, True)]
    contents: dict[str, Bytes] = {}
    for index, peer in enumerate(jobs):
        contents |= peer.contents(2 * index) | peer.contents(2 * index + 1)
    order = {
        "device": rig.settings.index,
        "launch": True,
        "deterministic": [peer.deterministic for peer in jobs for _ in range(2)],
        "cases": [case.to_json() for case in cases],
    }
    with rig.trial("phases") as trial:
        answers, results = trial.run(order, contents), trial.results
    for index, (peer, expected) in enumerate(zip(jobs, ours, strict=True)):
        for named in (False, True):
            place = 2 * index + named
            way = "named formats (NCL, NCHW, NCDHW)" if named else "ND, as the worker does"
            answer, found = answers[place], _outputs(results, place, expected)
            equal = not answer["status"] and found == expected
            yield peer.name, way, _mode(peer), equal, answer["words"]
            if answer["status"] is None or (answer["status"] and not named):
                out.check(f"{peer.name}: {way}", False, "accepted", answer["words"])
            elif answer["status"]:
                # The service needs only ND.
                out.check(f"{peer.name}: {way}", True, "ND serves", answer["words"], "only ND is accepted")
            elif peer.deterministic:
                out.check(
                    f"{peer.name}: {way}",
                    equal,
                    "the worker's bits",
                    "the same" if equal else "different bits",
                )


def _bindings(
    rig: Rig, out: StepLog, bound: Sequence[tuple[PeerJob, dict[str, bytes]]]
) -> Iterator[tuple[Cell, ...]]:
    contents: dict[str, Bytes] = {}
    for index, (peer, _) in enumerate(bound):
        contents |= peer.contents(index)
    order = {
        "device": rig.settings.index,
        "deterministic": [peer.deterministic for peer, _ in bound],
        "cases": [peer.case(named=False).to_json() for peer, _ in bound],
    }
    with rig.trial("bindings") as trial:
        answers, results = trial.run(order, contents), trial.results
    for index, (peer, expected) in enumerate(bound):
        error = answers[index]["error"]
        equal = not error and _outputs(results, index, expected) == expected
        yield peer.name, "torch_npu's binding", _mode(peer), equal, error
        name = f"{peer.name}: torch_npu's binding"
        if error:
            out.check(name, False, "a result", error)
        elif peer.deterministic:
            out.check(name, equal, "the worker's bits", "the same" if equal else "different bits")


def _outputs(results: dict[str, Bytes], index: int, like: dict[str, bytes]) -> dict[str, bytes]:
    found = {name: results.get(part(index, name)) for name in like}
    return {name: content.tobytes() for name, content in found.items() if content is not None}


def _mode(peer: PeerJob) -> str:
    return "on" if peer.deterministic else "not offered"
