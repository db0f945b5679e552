"""Contestants and bare servers as processes that talk in lines of JSON.

Each contestant's client has a process of its own. The allocator decides how fast large messages are, and
its state (glibc moves its mapping threshold with what was freed before), garbage and idle threads of one
library would otherwise be measured with another one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.benchmarks.harness import Effort

ROOT = Path(__file__).resolve().parents[2]
ANSWER_TIMEOUT_S = 120.0
"""A process that says nothing for so long is ended, and the benchmark with it."""
_END_TIMEOUT_S = 10.0


class LineProcess:
    """A module of ours run as a process: one line of JSON in, one line out."""

    def __init__(self, module: str, *arguments: str) -> None:
        """Starts it; it ends when its standard input does."""
        self._name = " ".join((module, *arguments))
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def read(self) -> Any:
        """Its next answer.

        Raises:
            RuntimeError: It ended, or said nothing in time; what it had to say is on standard error.
        """
        assert self._process.stdout is not None
        watchdog = threading.Timer(ANSWER_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise RuntimeError(f"{self._name}: ended without an answer, exit code {self._process.wait()}")
        return json.loads(line)

    def ask(self, question: Mapping[str, Any]) -> Any:
        """Sends a question and returns the answer; errors as in `read`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """Ends it."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Contestant:
    """One contestant's client in its own process; see `tests.benchmarks.contestant`.

    Attributes:
        fingerprint: What identifies the results of the case that was prepared last.
    """

    def __init__(self, process: LineProcess, effort: Effort) -> None:
        self._process, self._effort = process, effort
        self._calls = 0
        self.fingerprint: dict[str, list[float]] = {}

    def prepare(self, case: Mapping[str, Any]) -> None:
        """Makes the operands, calls some times to warm up, and settles how many calls fill a slot."""
        answer = self._process.ask({"do": "prepare", "case": case})
        self._calls, self.fingerprint = self._effort.calls(answer["one_s"]), answer["fingerprint"]

    def median_s(self) -> float:
        """One slot of calls, one after the other: median seconds of a call."""
        return float(self._process.ask({"do": "time", "calls": self._calls})["median_s"])

    def loaded_s(self, concurrency: int) -> Callable[[], float]:
        """What measures one slot with so many calls in flight: seconds divided by calls answered."""

        def slot() -> float:
            question = {"do": "load", "concurrency": concurrency, "seconds": self._effort.slot_s * 2}
            return float(self._process.ask(question)["per_call_s"])

        return slot


@contextmanager
def started(effort: Effort, subjects: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Contestant]]:
    """Contestants by name, ended after the block.

    Args:
        effort: How long to measure.
        subjects: By name, `subject` ("module:class") and the class's keyword arguments.
    """
    with ExitStack() as stack:
        running = {}
        for name, arguments in subjects.items():
            process = LineProcess("tests.benchmarks.contestant", json.dumps(arguments))
            stack.callback(process.close)
            running[name] = Contestant(process, effort)
        yield running


@contextmanager
def bare_server(kind: str) -> Iterator[str]:
    """A server of `tests.benchmarks.echo` on loopback; yields its address.

    Args:
        kind: ``"grpc"`` or ``"tcp"``.
    """
    process = LineProcess("tests.benchmarks.echo", kind)
    try:
        yield process.read()["address"]
    finally:
        process.close()
