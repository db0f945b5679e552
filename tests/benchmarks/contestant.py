"""The process of one contestant: makes its calls when told, and times them where they are made.

Run as ``python -m tests.benchmarks.contestant '{"subject": "module:class", ...}'``. Questions on standard
input, one JSON object a line, and their answers:

    {"do": "prepare", "case": {...}, "warm_up": N}    {"one_s", "fingerprint"}
    {"do": "time", "calls": N}                        {"median_s"}: of N calls, one after the other
    {"do": "load", "concurrency": N, "seconds": S}    {"per_call_s"}: a closed loop of N threads
    {"do": "errors", "golden": FOLDER}                {result: max|e| / max|g|} against FOLDER/result.npy
    {"do": "memory", "case": {...}}                   {"extra_bytes"}: once only, in a new process
    {"do": "start", "case": {...}}                    {"import_s", "first_s"}: the same

Whatever else is asked, a method of the subject answers.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Call = Callable[[], "Mapping[str, npt.NDArray[Any]]"]

_PROJECTIONS = 3
_BLOCK = 2**20


def fingerprint(results: Mapping[str, npt.NDArray[Any]]) -> dict[str, list[float]]:
    """Scaled projections of each result onto fixed signs, so that processes can compare what they computed.

    An error of a share e of a result's root mean square in every element moves a projection by about e.
    """
    found = {}
    for name, array in results.items():
        flat = np.asarray(array, np.float64).reshape(-1)
        rng = np.random.default_rng(0)
        scale = float(np.linalg.norm(flat)) or 1.0
        signs = (rng.integers(0, 2, flat.size) * 2 - 1 for _ in range(_PROJECTIONS))
        found[name] = [float(flat @ sign) / scale for sign in signs] + [scale / max(1.0, flat.size**0.5)]
    return found


def difference(ours: Mapping[str, list[float]], theirs: Mapping[str, list[float]]) -> float:
    """How far results are apart, by their fingerprints: about the relative error of the worst one.

    Raises:
        KeyError: They do not have the same names.
    """
    pairs = [pair for name, values in ours.items() for pair in zip(values, theirs[name], strict=True)]
    return max(abs(theirs - ours) / max(1.0, abs(ours)) for ours, theirs in pairs)


def largest_error(found: npt.NDArray[Any], golden: npt.NDArray[Any]) -> float:
    """max|e| / max|g| against float64 of the same shape, in blocks: neither array is copied whole."""
    flat, right = found.reshape(-1), golden.reshape(-1)
    error = scale = np.float64(0)
    for start in range(0, right.size, _BLOCK):
        block = np.asarray(right[start : start + _BLOCK])
        # np.maximum, for max would lose a NaN.
        error = np.maximum(error, np.abs(flat[start : start + _BLOCK].astype(np.float64) - block).max())
        scale = np.maximum(scale, np.abs(block).max())
    return float(error / scale if scale else error)


class Loop:
    """Carries out questions about the case that was prepared last."""

    def __init__(self, subject: str, **arguments: Any) -> None:
        module, _, name = subject.partition(":")
        self._subject: Any = getattr(importlib.import_module(module), name)(**arguments)
        self._call: Call

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """What comes of a question, as above."""
        given = dict(question)
        what = given.pop("do")
        found: dict[str, Any] = getattr(self if hasattr(self, what) else self._subject, what)(**given)
        return found

    def prepare(self, case: Mapping[str, Any], warm_up: int) -> dict[str, Any]:
        self._call = self._subject.prepare(case)
        found = fingerprint(self._call())
        return {"one_s": min(self._seconds() for _ in range(warm_up)), "fingerprint": found}

    def _seconds(self) -> float:
        start = time.perf_counter()
        self._call()
        return time.perf_counter() - start

    def time(self, calls: int) -> dict[str, float]:
        return {"median_s": statistics.median(self._seconds() for _ in range(calls))}

    def errors(self, golden: str) -> dict[str, float]:
        return {
            name: largest_error(found, np.load(Path(golden) / f"{name}.npy", mmap_mode="r"))
            for name, found in self._call().items()
        }

    def load(self, concurrency: int, seconds: float) -> dict[str, float]:
        start = time.perf_counter()

        def work() -> int:
            calls = 0
            while time.perf_counter() < start + seconds:
                self._call()
                calls += 1
            return calls

        with ThreadPoolExecutor(concurrency) as threads:
            answered = sum(done.result() for done in [threads.submit(work) for _ in range(concurrency)])
        return {"per_call_s": (time.perf_counter() - start) / max(answered, 1)}

    def memory(self, case: Mapping[str, Any]) -> dict[str, float]:
        """The peak of resident memory over what was there with the operands.

        It is that of all that a caller has to do, in torch the forward pass that keeps what the backward
        pass needs. Libraries are loaded before.
        """
        from tests.benchmarks.operands import made
        from tests.benchmarks.resident import restart_peak, status_bytes

        call, operands = made(case)
        # What was freed while making the operands goes back, or the call would find it there.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = restart_peak()
        self._subject.on(case, call, operands)()
        return {"extra_bytes": status_bytes("VmHWM") - before}

    def start(self, case: Mapping[str, Any]) -> dict[str, float]:
        """Seconds that the kernels add to a process that has NumPy and the contract.

        First those of importing the loader, then of loading the library, starting threads and the first call.
        """
        from tests.benchmarks.operands import empty_outputs, made

        from npugrad.ops import get_operator

        call, operands = made(case)
        outputs, record = empty_outputs(case, call), get_operator(case["operator"])
        np.ones(1).sum()
        began = time.perf_counter()
        loader = importlib.import_module("npugrad_server.backends.cpu.kernels")
        imported = time.perf_counter()
        kernels = loader.Kernels(2)
        kernels.run(record, operands, call.attrs, outputs)
        done = time.perf_counter()
        kernels.close()
        return {"import_s": imported - began, "first_s": done - imported}


def tell(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def answer_all(answer: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Answers questions until standard input ends."""
    for line in sys.stdin:
        tell(answer(json.loads(line)))


if __name__ == "__main__":
    answer_all(Loop(**json.loads(sys.argv[1])).answer)
