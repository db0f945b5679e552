"""Contestants and bare servers as processes that talk in lines of JSON.

Each contestant's client has a process of its own. The allocator decides how fast large messages are, and
its state (glibc moves its mapping threshold with what was freed before), garbage and idle threads of one
library would otherwise be measured with another one. In a quick run, whose figures mean nothing, those that
need no environment of their own share the benchmark's process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.contestant import Loop
from tests.benchmarks.harness import Effort

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = tuple(ROOT / name for name in ("protos", "server", "client"))
ANSWER_TIMEOUT_S = 120.0
"""A process that says nothing for so long is ended, and the benchmark with it."""
_END_TIMEOUT_S = 10.0
_WARM_UP_CALLS = 3


class ProcessEnded(RuntimeError):
    """A process ended, by itself or because it said nothing for too long."""


def import_path() -> dict[str, str]:
    """The environment in which any interpreter finds our packages and the tests."""
    given = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*map(str, (ROOT, *_PACKAGES)), *([given] if given else [])])}


class LineProcess:
    """A module of ours run as a process, one line of JSON in, one line out; a context that ends it."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = " ".join((module, *arguments))
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **import_path(), **(environment or {})},
        )

    def __enter__(self) -> LineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """Ends it by the end of its standard input."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # it is dead already
                    stream.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Entry:
    """How a contestant is started: "module:class" of what it calls, and what that is made from."""

    subject: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)

    def process(self) -> LineProcess:
        made = json.dumps({"subject": self.subject, **self.arguments})
        return LineProcess(
            "tests.benchmarks.contestant", made, python=self.python, environment=self.environment
        )


class Contestant:
    """One contestant's client.

    Attributes:
        fingerprint: What identifies the results of the case that was prepared last.
    """

    def __init__(self, entry: Entry, effort: Effort) -> None:
        self._effort, self._calls = effort, 0
        is_alone = not effort.quick or bool(entry.environment) or entry.python != sys.executable
        self._process = entry.process() if is_alone else None
        self._ask = self._process.ask if self._process else Loop(entry.subject, **entry.arguments).answer
        self.fingerprint: dict[str, list[float]] = {}

    def prepare(self, case: Mapping[str, Any]) -> None:
        """Makes the operands, calls some times to warm up, and settles how many calls fill a slot."""
        warm_up = 1 if self._effort.quick else _WARM_UP_CALLS
        answer = self._ask({"do": "prepare", "case": case, "warm_up": warm_up})
        self._calls, self.fingerprint = self._effort.calls(answer["one_s"]), answer["fingerprint"]

    def median_s(self) -> float:
        return float(self._ask({"do": "time", "calls": self._calls})["median_s"])

    def loaded_s(self, concurrency: int) -> Callable[[], float]:
        """What measures one slot with so many calls in flight: seconds divided by calls answered."""
        question = {"do": "load", "concurrency": concurrency, "seconds": self._effort.slot_s * 2}
        return lambda: float(self._ask(question)["per_call_s"])

    def errors(self, golden: Path) -> dict[str, float]:
        """The largest error of each result of a call against a folder of `.npy` files, as a share."""
        found: dict[str, float] = self._ask({"do": "errors", "golden": str(golden)})
        return found

    def close(self) -> None:
        if self._process:
            self._process.close()


class Field:
    """Contestants by name that start when they are first needed, and once more after they died."""

    def __init__(self, effort: Effort, entries: Mapping[str, Entry]) -> None:
        self._effort, self._entries = effort, entries
        self._running: dict[str, Contestant] = {}

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._running):
            self.end(name)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Contestant:
        if name not in self._running:
            self._running[name] = Contestant(self._entries[name], self._effort)
        return self._running[name]

    def prepared(self, case: Mapping[str, Any], names: Iterable[str] = ()) -> dict[str, Contestant]:
        """Those of the names, or all, with a case to call."""
        found = {name: self[name] for name in names or self._entries}
        for contestant in found.values():
            contestant.prepare(case)
        return found

    def end(self, name: str) -> None:
        self._running.pop(name).close()


@contextmanager
def bare_server(kind: str) -> Iterator[str]:
    """A server of `tests.benchmarks.echo` on loopback, ``"grpc"`` or ``"tcp"``; yields its address."""
    with LineProcess("tests.benchmarks.echo", kind) as process:
        yield process.read()["address"]
