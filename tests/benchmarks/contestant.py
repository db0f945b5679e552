"""The process of one contestant: makes its calls when told, and times them where they are made.

Run as ``python -m tests.benchmarks.contestant '{"subject": "module:class", ...}'``. Questions on standard
input, one JSON object a line, and their answers:

    {"do": "prepare", "case": {...}}                  {"one_s", "fingerprint"}
    {"do": "time", "calls": N}                        {"median_s"}: of N calls, one after the other
    {"do": "load", "concurrency": N, "seconds": S}    {"per_call_s"}: a closed loop of N threads
    {"do": "errors", "golden": FOLDER}                {result: max|e| / max|g|} against FOLDER/result.npy
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Call = Callable[[], "Mapping[str, npt.NDArray[Any]]"]

_WARM_UP_CALLS = 3
_PROJECTIONS = 3
_BLOCK = 2**20


class Subject(Protocol):
    """What a contestant does; made once per process from keyword arguments."""

    def prepare(self, case: Mapping[str, Any]) -> Call:
        """What makes one call of a case and returns its results by name."""


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
    """max|e| / max|g|, in blocks: neither array is copied whole.

    Args:
        found: A result, of any type.
        golden: What is right, in float64; of the same shape.
    """
    flat, right = found.reshape(-1), golden.reshape(-1)
    error = scale = np.float64(0)
    for start in range(0, right.size, _BLOCK):
        block = np.asarray(right[start : start + _BLOCK])
        # np.maximum, for max would lose a NaN.
        error = np.maximum(error, np.abs(flat[start : start + _BLOCK].astype(np.float64) - block).max())
        scale = np.maximum(scale, np.abs(block).max())
    return float(error / scale if scale else error)


class _Loop:
    """Carries out questions about the case that was prepared last."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._call: Call

    def prepare(self, case: Mapping[str, Any]) -> dict[str, Any]:
        self._call = self._subject.prepare(case)
        found = fingerprint(self._call())
        return {"one_s": min(self._seconds() for _ in range(_WARM_UP_CALLS)), "fingerprint": found}

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
        end = start + seconds

        def work() -> int:
            calls = 0
            while time.perf_counter() < end:
                self._call()
                calls += 1
            return calls

        with ThreadPoolExecutor(concurrency) as threads:
            answered = sum(done.result() for done in [threads.submit(work) for _ in range(concurrency)])
        return {"per_call_s": (time.perf_counter() - start) / max(answered, 1)}


def main() -> None:
    """Answers until standard input ends."""
    arguments = json.loads(sys.argv[1])
    module, _, name = arguments.pop("subject").partition(":")
    loop = _Loop(getattr(importlib.import_module(module), name)(**arguments))
    for line in sys.stdin:
        question = json.loads(line)
        answer = getattr(loop, question.pop("do"))(**question)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
