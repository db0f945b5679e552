"""Memory of server and client: the peak of one large call, and what stays of very many.

Peak
    One call of 64 MiB each way after one of 4 MiB, to a server and from a client that are new. Theirs is the
    growth of the resident memory over what was there before, as a multiple of the contents that it had to
    make room for: 128 MiB in the server, operands and results; 64 MiB in the client, whose operands were
    there. The server is its front process and its worker, their peaks added as if they came at once, and what
    both map counted once. No arena is filled at start, so that every page shows. A second such call meets
    what malloc and the arenas have kept of the first.

Growth
    The resident memory of front process, worker and client after very many calls, 8 in flight, over that
    after the first hundreds: calls of one signature; of signatures that all differ; of 4 MiB each way. What
    both processes of the server map counts twice, if it grows at all.

    As many calls as were promised take an hour or two: `--whole`. Without it fewer are made, and what
    grows with each call shows as well: 1 KiB for each of 20,000 is 20 MiB.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.benchmarks.goals import Figure, Goal, at_most, figure
from tests.benchmarks.harness import Effort
from tests.benchmarks.processes import Entry, LineProcess
from tests.benchmarks.resident import restart_peak, status_bytes
from tests.benchmarks.service_under_test import running_service
from tests.benchmarks.transport import DEVICES, arguments
from tests.e2e.harness import workers_of
from tests.fix_server import ServerProcess

from npugrad_client import Client

TITLE = "Memory of server and client"
SUBTITLE = "resident, simulated device; the peak of a call of 64 MiB each way, and what stays of very many"
PEAK = "64 MiB, peak over content"
SERVER, CLIENT = "server", "client"
SAME, SIGNATURES, STREAMED = "calls of one signature", "signatures", "calls of 4 MiB"
GOALS: Mapping[str, Mapping[str, Goal]] = {
    PEAK: {SERVER: at_most(1.3, 1.1), CLIENT: at_most(1.2, 1.1)},
    **{kind: {who: at_most(32, 4) for who in (SERVER, CLIENT)} for kind in (SAME, SIGNATURES, STREAMED)},
}
"""What was promised, in MiB for what stays; flat is what malloc moves by."""
_PEAK_BYTES, _STREAMED_BYTES, _MIB = 2**26, 2**22, 2**20
_IN_FLIGHT = 8
_PEAKS = 3
_AT_ONCE = 500


@dataclass(frozen=True)
class _Load:
    """How many calls of a kind are made: before memory is looked at first, and then by default, or in all.

    Before the figures mean anything, a tenth of the first will do.
    """

    before: int
    reduced: int
    whole: int


_LOADS = {
    SAME: _Load(500, 20_000, 1_000_000),
    SIGNATURES: _Load(500, 20_000, 1_000_000),
    STREAMED: _Load(200, 1_000, 100_000),
}


def run(effort: Effort, *, whole: bool = False) -> Iterator[Figure]:
    peaks = [_peak() for _ in range(1 if effort.quick else _PEAKS)]
    for who, content in ((SERVER, 2 * _PEAK_BYTES), (CLIENT, _PEAK_BYTES)):
        first, later = ([peak[call][who] / content for peak in peaks] for call in (0, 1))
        found = {"the second such call": statistics.median(later)}
        yield figure((PEAK, "float32"), f"{who}'s growth", first, GOALS[PEAK][who], peers=found)
    for kind, load in _LOADS.items():
        before = load.before // 10 if effort.quick else load.before
        count = before if effort.quick else load.whole if whole else load.reduced
        grown = _growth(kind, before, count)
        for who in (SERVER, CLIENT):
            what = f"{who}'s growth over {count:,} calls"
            yield figure((kind, "float32"), what, [grown[who] / _MIB], GOALS[kind][who], unit="MiB")


def _peak() -> list[dict[str, int]]:
    with running_service(DEVICES, "--prefault-bytes", "0") as server, _caller(server) as caller:
        caller.ask({"do": "large", "nbytes": _STREAMED_BYTES})
        return [_large(caller, _pids(server)) for _ in range(2)]


def _caller(server: ServerProcess) -> LineProcess:
    """A contestant of its own, which is asked for nothing but what `Caller` can be."""
    return Entry(f"{__name__}:Caller", {"address": server.address}).process()


def _large(caller: LineProcess, pids: list[int]) -> dict[str, int]:
    before = [restart_peak(pid) for pid in pids]
    shared = [status_bytes("RssShmem", pid) for pid in pids]
    grown = caller.ask({"do": "large", "nbytes": _PEAK_BYTES})["growth_bytes"]
    peaks = sum(status_bytes("VmHWM", pid) - had for pid, had in zip(pids, before, strict=True))
    twice = min(status_bytes("RssShmem", pid) - had for pid, had in zip(pids, shared, strict=True))
    return {SERVER: peaks - twice, CLIENT: grown}


def _growth(kind: str, before: int, calls: int) -> dict[str, int]:
    with running_service(DEVICES) as server, _caller(server) as caller:
        had = _after(caller, server, kind, before)
        has = _after(caller, server, kind, calls)
    return {who: has[who] - had[who] for who in has}


def _after(caller: LineProcess, server: ServerProcess, kind: str, calls: int) -> dict[str, int]:
    """Resident memory when so many more calls were made."""
    # Not all at once: who says nothing for long is ended.
    for made in range(0, calls, _AT_ONCE):
        question = {"do": "many", "kind": kind, "calls": min(_AT_ONCE, calls - made)}
        resident = caller.ask(question)["resident_bytes"]
    return {SERVER: sum(status_bytes("VmRSS", pid) for pid in _pids(server)), CLIENT: resident}


def _pids(server: ServerProcess) -> list[int]:
    return [server.process.pid, *workers_of(server.process.pid)]


# ------------------------------------------------------------------------------------ the caller's process


class Caller:
    """Makes calls when told."""

    def __init__(self, address: str) -> None:
        self._client = Client(address)
        self._made = 0

    def large(self, nbytes: int) -> dict[str, int]:
        """One call whose operands are there; by how much memory exceeded what was there."""
        given = arguments(nbytes)
        before = restart_peak()
        self._client.grid_sampler_2d_backward(**given)
        return {"growth_bytes": status_bytes("VmHWM") - before}

    def many(self, kind: str, calls: int) -> dict[str, int]:
        """So many calls, some in flight; the resident memory then."""
        given = {SAME: arguments(2**10), STREAMED: arguments(_STREAMED_BYTES)}.get(kind)
        method, numbers = self._client.grid_sampler_2d_backward, iter(range(self._made, self._made + calls))
        self._made += calls

        def work() -> None:
            for number in numbers:
                method(**(signature(number) if given is None else given))

        with ThreadPoolExecutor(_IN_FLIGHT) as threads:
            for done in [threads.submit(work) for _ in range(_IN_FLIGHT)]:
                done.result()
        return {"resident_bytes": status_bytes("VmRSS")}


_ZEROS = np.zeros(2**12, np.float32)
_DIGITS = (2, 3, 2, 2, 8, 10, 10, 10, 10)


def signature(number: int) -> dict[str, Any]:
    """A call of a few KiB whose signature is another one for each number below 1.9 million."""
    digits = []
    for base in _DIGITS:
        number, digit = divmod(number, base)
        digits.append(digit)
    interpolation, padding, corners, *sizes = digits
    n, c, h, w, oh, ow = (size + 1 for size in sizes)
    return {
        "grad_output": _zeros(n, c, oh, ow),
        "input": _zeros(n, c, h, w),
        "grid": _zeros(n, oh, ow, 2),
        "interpolation_mode": interpolation,
        "padding_mode": padding,
        "align_corners": bool(corners),
        "output_mask": (True, True),
    }


def _zeros(*shape: int) -> Any:
    return _ZEROS[: int(np.prod(shape))].reshape(shape)
