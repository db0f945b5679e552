"""Calls with known results, and descriptions of their outcomes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.agreement import agreement, computed, unwritten
from npugrad_server.worker.protocol import CallDone, CallFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy.typing as npt

    from npugrad_server.acceptance.job import Job, Ran
    from npugrad_server.acceptance.rig import Pending, Rig
    from npugrad_server.worker.protocol import DeviceFailed


@dataclass(frozen=True)
class KnownJob:
    """A call with its right results.

    Attributes:
        name: Readable name.
        job: The call with its data.
        golden: Right values of each wanted output, in float64.
    """

    name: str
    job: Job
    golden: Mapping[str, npt.NDArray[np.float64]]

    def complaint(self, ran: Ran) -> str:
        """Returns what is wrong with the outcome of the call; empty if its results are right."""
        if not isinstance(ran.answer, CallDone):
            return words(ran.answer)
        return self.wrong(ran.outputs)

    def wrong(self, outputs: Mapping[str, npt.NDArray[Any]]) -> str:
        """Returns what is outside its tolerance; empty if nothing is."""
        if outputs.keys() != self.golden.keys():
            return f"found outputs {sorted(outputs)}; expected {sorted(self.golden)}"
        with np.errstate(invalid="ignore"):  # a faulty device may return signaling NaNs
            job = self.job
            found = agreement(job.record, job.arrays, job.call.attrs, outputs, self.golden)
        return "" if found.ok else str(found)


def known(name: str, job: Job) -> KnownJob:
    """Computes a call with the float64 reference of its record."""
    metas = {output: meta for output, meta in job.planned().plan.outputs.items() if meta is not None}
    like = {output: unwritten(meta) for output, meta in metas.items()}
    golden = computed(job.record, job.arrays, job.call.attrs, like) if like else {}
    return KnownJob(name, job, golden)


def words(answer: CallDone | CallFailed | DeviceFailed) -> str:
    """Describes a worker's answer."""
    if isinstance(answer, CallDone):
        return "a result"
    if isinstance(answer, CallFailed):
        code = answer.metadata.get("code")
        return f"{answer.reason}{f' {code}' if code else ''}: {answer.message}"
    return f"the worker ended{f' with {answer.code}' if answer.code else ''}: {answer.message}"


def in_flight(rig: Rig, jobs: Iterable[KnownJob], window: int) -> Iterator[tuple[KnownJob, Ran]]:
    """Runs jobs with up to `window` of them in flight; yields each with its outcome, in order."""
    flying: deque[tuple[KnownJob, Pending]] = deque()
    try:
        for job in jobs:
            flying.append((job, rig.submit(job.job)))
            if len(flying) >= window:
                sent, pending = flying.popleft()
                yield sent, pending()
        while flying:
            sent, pending = flying.popleft()
            yield sent, pending()
    finally:
        for _, pending in flying:  # a caller that stops early leaves no call behind
            pending()
