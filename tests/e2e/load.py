"""Load for tests: threads that call one server, compare each result with what is known, and keep each answer.

`Load` is what all have in common. `ClientLoad` calls as users do, and sends again what may be; the load on
sick NPUs, which keeps every error, is in `npu_load`.
"""

from __future__ import annotations

import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import numpy as np
from tests.calls import Sample, fill
from tests.e2e.harness import STREAMED, UNARY, Array, differences, local_results, outputs_of
from tests.operators import FLOYD, GRID_SAMPLER, GROUP_NORM, MSDA

from npugrad.call import ExecutionInfo
from npugrad.errors import ConnectError, NpugradError, ServerDraining
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS
from npugrad_client import Client

CALL_TIMEOUT_S = 90.0
"""Deadline of a call, and what a load has to come as far as a test waits for, or to end."""
_RETRY_WAIT_S = 0.1
_RETRY_LIMIT_S = 60.0


@dataclass(frozen=True, eq=False)
class Work:
    """One call, what must come back bit for bit, and whether it goes through Execute."""

    sample: Sample
    expected: Mapping[str, Array | None]
    streamed: bool

    @property
    def record(self) -> OpRecord:
        return self.sample.record

    def send(self, client: Client, label: str = "") -> Any:
        method = getattr(client, self.record.name)
        return method(**self.sample.arrays, **self.sample.call.attrs, label=label)

    def is_right(self, result: Any) -> bool:
        return not differences(self.expected, outputs_of(self.record, result))


@dataclass(frozen=True)
class Told:
    """The error that a caller got; its reason is the status where there are no words of the server's."""

    status: grpc.StatusCode
    reason: str
    code: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Answer:
    """What became of a call: what produced its result and whether that was right, or the error."""

    operator: str
    sent_s: float
    info: ExecutionInfo | None = None
    right: bool = False
    told: Told | None = None


LoadT = TypeVar("LoadT", bound="Load")


class Load(ABC):
    """Threads that send calls in turn until so many were sent and nobody needs more.

    `finished` counts answers by thread; in `failed` is what went wrong so that a call has no answer, after
    which nothing is sent.
    """

    def __init__(self, mix: Sequence[Work], *, threads: int, calls: int = 0, more: bool = True) -> None:
        """Starts nothing yet; sends so many `calls` at least, and with `more` goes on until `enough`."""
        self.answers: list[Answer] = []
        self.failed: list[str] = []
        self.sent = 0
        self.finished = [0] * threads
        self.progress = threading.Condition()
        self._mix, self._calls = mix, calls
        self._enough = threading.Event()
        if not more:
            self._enough.set()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(threads)
        ]

    @abstractmethod
    def caller(self) -> AbstractContextManager[Callable[[Work], Answer]]:
        """Connects, and gives what sends a call and waits for its answer."""

    def __enter__(self: LoadT) -> LoadT:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def enough(self) -> None:
        self._enough.set()

    def stop(self) -> None:
        """The same, and waits for the end of every call."""
        self.enough()
        for thread in self._threads:
            thread.join(CALL_TIMEOUT_S)
        assert not any(thread.is_alive() for thread in self._threads), "a call got no answer"
        assert self.failed == []

    def wait(self, reached: Callable[[], object], what: str) -> None:
        """Waits until the callers have got so far; `reached` is asked after each answer."""
        with self.progress:
            found = self.progress.wait_for(lambda: reached() or self.failed, CALL_TIMEOUT_S)
            assert found, f"not within {CALL_TIMEOUT_S:g} s: {what}; {len(self.answers)} answers"

    def wait_for_each(self, calls: int = 1) -> None:
        """Waits until every thread has finished so many calls more: the last of them was sent after now."""
        goals = [finished + calls for finished in self.finished]
        self.wait(
            lambda: all(found >= goal for found, goal in zip(self.finished, goals, strict=True)),
            "every thread has finished a call",
        )

    def wait_for_stuck(self, calls: int) -> None:
        """Waits until some thread has not finished a call while the others finished so many."""
        # Not since now: it may well finish one that is on its way before it meets what holds it up.
        seen: dict[int, tuple[int, int]] = {}

        def stuck() -> bool:
            total = sum(self.finished)
            for index, finished in enumerate(self.finished):
                if seen.get(index, (-1, 0))[0] != finished:
                    seen[index] = finished, total
            return any(total - since >= calls for _, since in seen.values())

        self.wait(stuck, "a call is held up while others go on")

    def keep(self, answer: Answer) -> None:
        """Counts an answer; called with `progress` held."""
        self.answers.append(answer)

    def _run(self, number: int) -> None:
        try:
            with self.caller() as send:
                while (work := self._next()) is not None:
                    answer = send(work)
                    with self.progress:
                        self.keep(answer)
                        self.finished[number] += 1
                        self.progress.notify_all()
        except BaseException:
            with self.progress:
                self.failed.append(traceback.format_exc())
                self.progress.notify_all()

    def _next(self) -> Work | None:
        with self.progress:
            if self.failed or (self._enough.is_set() and self.sent >= self._calls):
                return None
            self.sent += 1
            return self._mix[self.sent % len(self._mix)]


# ------------------------------------------------------------------------------------------ as users call


class ClientLoad(Load):
    """Clients that call one address, and send again what may be.

    Guarantees: each call is answered, or one failed; what is retried had said that it may be.
    """

    def __init__(self, address: str, work: list[Work], threads: int) -> None:
        """Starts nothing yet; the server is at the address now or soon."""
        super().__init__(work, threads=threads)
        self.refused: Counter[str] = Counter()
        self._address = address

    @contextmanager
    def caller(self) -> Iterator[Callable[[Work], Answer]]:
        """Connects twice, for either way to call."""
        options: Any = {"timeout_s": CALL_TIMEOUT_S, "retry": None}
        with (
            Client(self._address, stream_from_bytes=UNARY, **options) as unary,
            Client(self._address, stream_from_bytes=STREAMED, **options) as streamed,
        ):
            yield lambda work: self._answer(work, streamed if work.streamed else unary)

    @property
    def right(self) -> list[Answer]:
        """Answers that were right bit for bit."""
        with self.progress:
            return [answer for answer in self.answers if answer.right]

    @property
    def rerun(self) -> int:
        """How many of them needed more than one attempt on the server."""
        return sum(answer.info is not None and answer.info.attempts > 1 for answer in self.right)

    def _answer(self, work: Work, client: Client) -> Answer:
        """The answer, however often it has to be asked for."""
        sent_s = time.monotonic()
        for _ in range(int(_RETRY_LIMIT_S / _RETRY_WAIT_S)):
            try:
                result = work.send(client)
            except NpugradError as error:
                if not (error.retryable and isinstance(error, (ServerDraining, ConnectError))):
                    raise
                with self.progress:
                    self.refused[type(error).__name__] += 1
            else:
                return Answer(work.record.name, sent_s, result.info, work.is_right(result))
            # A server is being started: as long as nobody ends the load, wait and try again.
            self._enough.wait(_RETRY_WAIT_S)
        raise AssertionError(f"{work.record.name}: refused until the time was over")


_OTHERS = [each for each in OPERATORS.values() if each not in (GROUP_NORM, GRID_SAMPLER, MSDA, FLOYD)]


def mixed_work() -> list[Work]:
    """All operators in all dtypes, some kilobytes to some megabytes, unary and streamed; in a mixed order."""
    small: list[tuple[OpRecord, CallMeta]] = []
    for dtype in ("float32", "float16", "bfloat16"):
        small += [
            (GROUP_NORM, GROUP_NORM.build(dtype=dtype)),
            (GROUP_NORM, GROUP_NORM.build(dtype=dtype, n=3, c=32, hxw=500, group=8, with_gamma=False)),
            (GRID_SAMPLER, GRID_SAMPLER.build(dtype=dtype)),
            (GRID_SAMPLER, GRID_SAMPLER.build(dtype=dtype, c=8, h=32, w=32, oh=16, ow=16, padding_mode=2)),
            *((record, record.build(dtype=dtype)) for record in _OTHERS),
            (MSDA, MSDA.build(dtype=dtype)),
            (MSDA, MSDA.build(dtype=dtype, nq=40, nh=4, levels=((12, 12), (6, 6)), points=3)),
        ]
    small.append((GROUP_NORM, GROUP_NORM.build(n=1, c=32, hxw=2**13, group=4)))
    # Beyond what one message may have.
    large = [
        (FLOYD, FLOYD.build(dtype="float16", with_mask=True)),
        (FLOYD, FLOYD.build(dtype="bfloat16")),
    ]
    calls = [(*call, streamed) for call in small for streamed in (False, True) for _ in range(2)]
    calls += [(*call, True) for call in large for _ in range(2)]
    order = np.random.default_rng(20).permutation(len(calls))
    return [_work(*calls[index], seed=int(index)) for index in order]


def _work(record: OpRecord, call: CallMeta, streamed: bool, *, seed: int) -> Work:
    made = fill(record, call, seed)
    return Work(made, local_results(record, call, made.arrays, torch="off"), streamed)
