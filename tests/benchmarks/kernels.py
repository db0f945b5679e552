"""The compiled kernels against what a user has otherwise on a CPU, and against the limits of the machine.

What is called
    The CPU backend's kernel in a process of its own, outputs allocated inside the timed call as the peers'
    are, against each peer of the case in another process. No service, no copies: those are in `service`.

Roofline
    The same bytes (operands and results once) moved by a triad with non-temporal stores on all threads, into
    memory that is there; where a case tells its floating-point operations, those are also done on registers,
    and the longer of both counts. Its column is the roofline's time over ours: 1 would be the limit.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.benchmarks.contestant import difference
from tests.benchmarks.harness import Effort, Result, compare
from tests.benchmarks.kernel_cases import KernelCase, all_cases
from tests.benchmarks.processes import started
from tests.benchmarks.service import made

from npugrad.ops import get_operator
from npugrad_server.backends.cpu.backend import thread_count
from npugrad_server.backends.cpu.kernels import Kernels, KernelsUnavailable, find_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt
    from tests.benchmarks.processes import Contestant

    Array = npt.NDArray[Any]
    Call = Callable[[], Mapping[str, Array]]

TITLE = "Compiled CPU kernels, each call in process"
OURS, ROOFLINE = "npugrad", "roofline"
_TRIAD_STREAMS, _TRIAD_ITEMSIZE = 3, 4


def _subtitle() -> str:
    try:
        variant = find_library().stem.rpartition("_")[2]
    except KernelsUnavailable as error:
        return f"no kernels: {error}"
    return f"variant {variant}, {thread_count()} threads, outputs allocated inside the call"


SUBTITLE = _subtitle()


class KernelCall:
    """Our kernel, in the caller's process."""

    def __init__(self) -> None:
        """Loads the kernels that fit."""
        self._kernels = Kernels(thread_count())

    def prepare(self, case: Mapping[str, Any]) -> Call:
        """One call into new arrays."""
        call, operands = made(case)
        spec = get_operator(case["operator"])
        metas = {name: meta for name, meta in spec.infer(call).items() if meta is not None}

        def in_process() -> Mapping[str, Array]:
            outputs = {name: np.empty(meta.shape, meta.dtype.numpy) for name, meta in metas.items()}
            self._kernels.run(spec, operands, call.attrs, outputs)
            return outputs

        return in_process


class Roofline:
    """As many bytes and operations as a case cannot do without."""

    def __init__(self) -> None:
        """Loads the probes."""
        self._kernels = Kernels(thread_count())

    def prepare(self, case: Mapping[str, Any]) -> Call:
        """Moves the bytes, or does the operations, whichever takes longer."""
        call, _ = made(case)
        metas = [*call.inputs.values(), *get_operator(case["operator"]).infer(call).values()]
        nbytes = sum(meta.nbytes for meta in metas if meta is not None)
        moved = self._triad(nbytes)
        computed = self._multiply_adds(case["flops"]) if case["flops"] else None
        if computed is None or _seconds(moved) > _seconds(computed):
            return moved
        return computed

    def _triad(self, nbytes: int) -> Call:
        count = max(1, nbytes // (_TRIAD_STREAMS * _TRIAD_ITEMSIZE))
        arrays = [np.ones(count, np.float32) for _ in range(_TRIAD_STREAMS)]
        addresses = [array.ctypes.data for array in arrays]

        def move() -> Mapping[str, Array]:
            self._kernels.functions.npugrad_probe_triad(self._kernels.context, *addresses, arrays[0].size, 1)
            return {}

        return move

    def _multiply_adds(self, flops: float) -> Call:
        once = float(self._kernels.functions.npugrad_probe_fma(self._kernels.context, 1))
        repeats = max(1, round(flops / once))

        def compute() -> Mapping[str, Array]:
            self._kernels.functions.npugrad_probe_fma(self._kernels.context, repeats)
            return {}

        return compute


def _seconds(call: Call) -> float:
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def run(effort: Effort) -> Iterator[Result]:
    """Measures every case; with other peers for some, the processes of all are there from the start."""
    cases = all_cases()[: 1 if effort.quick else None]
    with ExitStack() as stack:
        peers = {name: subject for case in cases for name, subject in case.peers.items()}
        subjects = {OURS: f"{__name__}:KernelCall"}
        subjects |= {name: subject for name, subject in peers.items() if _installed(subject)}
        subjects[ROOFLINE] = f"{__name__}:Roofline"
        contestants = stack.enter_context(
            started(effort, {name: {"subject": subject} for name, subject in subjects.items()})
        )
        for case in cases:
            yield _measured(case, contestants, effort)


def _installed(subject: str) -> bool:
    """Whether there is the package that the peer's module is named after; if not, this says so."""
    needed = subject.partition(":")[0].rpartition(".")[2].removesuffix("_peer")
    found = importlib.util.find_spec(needed) is not None
    if not found:
        sys.stderr.write(f"kernels: {needed} is not installed and takes no part\n")
    return found


def _measured(case: KernelCase, contestants: Mapping[str, Contestant], effort: Effort) -> Result:
    taking_part = {n: c for n, c in contestants.items() if n in (OURS, ROOFLINE) or n in case.peers}
    question = {
        "operator": case.operator,
        "dtype": case.dtype,
        "sizes": dict(case.sizes),
        "flops": case.flops,
    }
    for contestant in taking_part.values():
        contestant.prepare(question)
    for name in case.peers.keys() & taking_part.keys():
        worst = difference(taking_part[OURS].fingerprint, taking_part[name].fingerprint)
        if not worst <= case.tolerance:
            raise RuntimeError(f"{case.operator} {case.name}: {name} differs from ours by about {worst:.1e}")
    slots = {name: contestant.median_s for name, contestant in taking_part.items()}
    return compare(f"{case.operator} {case.name}", case.dtype, slots, effort)
