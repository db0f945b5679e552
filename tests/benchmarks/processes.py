"""Contestants and bare servers as processes that talk in lines of JSON.

Each contestant's client has a process of its own. The allocator decides how fast large messages are, and
its state (glibc moves its mapping threshold with what was freed before), garbage and idle threads of one
library would otherwise be measured with another one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.harness import Effort

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = tuple(ROOT / name for name in ("protos", "server", "client"))
ANSWER_TIMEOUT_S = 120.0
"""A process that says nothing for so long is ended, and the benchmark with it."""
_END_TIMEOUT_S = 10.0


class ProcessEnded(RuntimeError):
    """A process ended, by itself or because it said nothing for too long."""


def import_path() -> dict[str, str]:
    """The environment in which any interpreter finds our packages and the tests."""
    given = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*map(str, (ROOT, *_PACKAGES)), *([given] if given else [])])}


class LineProcess:
    """A module of ours run as a process: one line of JSON in, one line out."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts it; it ends when its standard input does.

        Args:
            module: What runs.
            arguments: Of its command line.
            python: The interpreter. Another one finds our packages too.
            environment: Variables beside those of this process.
        """
        self._name = " ".join((module, *arguments))
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **import_path(), **(environment or {})},
        )

    def read(self) -> Any:
        """Its next answer.

        Raises:
            ProcessEnded: It ended, or said nothing in time; what it had to say is on standard error.
        """
        assert self._process.stdout is not None
        watchdog = threading.Timer(ANSWER_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise ProcessEnded(f"{self._name}: ended without an answer, exit code {self._process.wait()}")
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
                with suppress(BrokenPipeError):  # it is dead already
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

    def errors(self, golden: Path) -> dict[str, float]:
        """The largest error of each result of a call, as a share of its largest element.

        Args:
            golden: Folder with the right results, one `.npy` file for each.
        """
        found = self._process.ask({"do": "errors", "golden": str(golden)})
        return {name: float(error) for name, error in found.items()}

    def close(self) -> None:
        """Ends its process."""
        self._process.close()


@dataclass(frozen=True)
class Entry:
    """How a contestant is started.

    Attributes:
        subject: "module:class" of what it calls.
        python: Its interpreter.
        environment: Variables beside those of this process.
    """

    subject: str
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


class Field:
    """Contestants that start when they are first needed, and once more after they died."""

    def __init__(self, effort: Effort, entries: Mapping[str, Entry]) -> None:
        """Starts none yet.

        Args:
            effort: How long to measure.
            entries: By name, how each is started.
        """
        self._effort, self._entries = effort, entries
        self._running: dict[str, Contestant] = {}

    def __enter__(self) -> Field:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends them all."""
        for name in list(self._running):
            self.end(name)

    def __contains__(self, name: str) -> bool:
        """Whether there is such a contestant."""
        return name in self._entries

    def __getitem__(self, name: str) -> Contestant:
        """The contestant, started if it does not run."""
        if name not in self._running:
            entry = self._entries[name]
            process = LineProcess(
                "tests.benchmarks.contestant",
                json.dumps({"subject": entry.subject}),
                python=entry.python,
                environment=entry.environment,
            )
            self._running[name] = Contestant(process, self._effort)
        return self._running[name]

    def end(self, name: str) -> None:
        """Ends a contestant; the next use starts it again."""
        self._running.pop(name).close()


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
