"""Load for reliability tests: threads that call, compare each result bit for bit, and retry what may be."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.e2e.harness import (
    FLOYD,
    GRID_SAMPLER,
    GROUP_NORM,
    MSDA,
    STREAMED,
    UNARY,
    differences,
    local_results,
    outputs_of,
)

from npugrad.errors import ConnectError, NpugradError, ServerDraining
from npugrad_client import Client

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.e2e.harness import Array

    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord

CALL_TIMEOUT_S = 90.0
_RETRY_WAIT_S = 0.1
_RETRY_LIMIT_S = 60.0


@dataclass(frozen=True, eq=False)
class Work:
    """One call whose results are known.

    Attributes:
        record: The operator.
        operands: Its data.
        attrs: Its attributes.
        expected: What must come back, bit for bit.
        stream_from_bytes: Forces it to be unary or streamed.
    """

    record: OpRecord
    operands: Mapping[str, Array | None]
    attrs: Mapping[str, Any]
    expected: Mapping[str, Array | None]
    stream_from_bytes: int

    def send(self, client: Client, label: str = "") -> Any:
        """The typed result."""
        return getattr(client, self.record.name)(**self.operands, **self.attrs, label=label)

    def is_right(self, result: Any) -> bool:
        """Whether a result is the expected one."""
        return not differences(self.expected, outputs_of(self.record, result))


def mixed_work() -> list[Work]:
    """All operators in all dtypes, some kilobytes to some megabytes, unary and streamed; in a mixed order."""
    small: list[tuple[OpRecord, CallMeta]] = []
    for dtype in ("float32", "float16", "bfloat16"):
        small += [
            (GROUP_NORM, GROUP_NORM.build(dtype=dtype)),
            (GROUP_NORM, GROUP_NORM.build(dtype=dtype, n=3, c=32, hxw=500, group=8, with_gamma=False)),
            (GRID_SAMPLER, GRID_SAMPLER.build(dtype=dtype)),
            (GRID_SAMPLER, GRID_SAMPLER.build(dtype=dtype, c=8, h=32, w=32, oh=16, ow=16, padding_mode=2)),
            (MSDA, MSDA.build(dtype=dtype)),
            (MSDA, MSDA.build(dtype=dtype, nq=40, nh=4, levels=((12, 12), (6, 6)), points=3)),
        ]
    large = [
        (GROUP_NORM, GROUP_NORM.build(n=1, c=32, hxw=2**13, group=4)),
        (FLOYD, FLOYD.build(dtype="float16", with_mask=True)),
        (FLOYD, FLOYD.build(dtype="bfloat16")),
    ]
    rng = np.random.default_rng(20)
    made = [
        _work(record, call, way, rng) for record, call in small for way in (UNARY, STREAMED) for _ in range(2)
    ]
    made += [_work(record, call, way, rng) for record, call in large for way in (UNARY, STREAMED)]
    return [made[index] for index in rng.permutation(len(made))]


def _work(record: OpRecord, call: CallMeta, stream_from_bytes: int, rng: np.random.Generator) -> Work:
    operands = record.make_inputs(call, rng)
    return Work(record, operands, call.attrs, local_results(record, call, operands), stream_from_bytes)


@dataclass
class Caller:
    """One thread's calls.

    Attributes:
        finished: Calls that have their answer.
    """

    finished: int = 0


@dataclass
class Counts:
    """What became of the calls.

    Attributes:
        sent: Calls sent, every retry counted.
        right: Answers that were right bit for bit.
        wrong: Answers that were not.
        refused: Errors that said the call may be retried, by class.
        failed: Other errors: each is a call lost.
        rerun: Right answers that needed more than one attempt on the server.
        by_operator: Right answers by operator.
    """

    sent: int = 0
    right: int = 0
    wrong: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    rerun: int = 0
    by_operator: Counter[str] = field(default_factory=Counter)


class Load:
    """Threads that call one address until they are stopped.

    Guarantees: each call is answered, or counted as failed; what is retried had said that it may be.
    """

    def __init__(self, address: str, work: list[Work], threads: int) -> None:
        """Starts nothing yet.

        Args:
            address: Where the server is, now or soon.
            work: Calls, taken in turn by all threads.
            threads: How many call at once.
        """
        self.counts = Counts()
        self.callers = [Caller() for _ in range(threads)]
        self._address = address
        self._work = itertools.cycle(work)
        self._stop = threading.Event()
        self._progress = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(caller,), name=f"caller-{index}", daemon=True)
            for index, caller in enumerate(self.callers)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Lets every thread finish its call."""
        self._stop.set()
        for thread in self._threads:
            thread.join(CALL_TIMEOUT_S)
        assert not any(thread.is_alive() for thread in self._threads), "a call got no answer"

    def wait(self, reached: Any, what: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Waits until the callers have got so far; `reached` is asked after each answer."""
        with self._progress:
            if not self._progress.wait_for(lambda: reached() or self.counts.failed, timeout_s):
                raise AssertionError(f"not within {timeout_s:g} s: {what}; {self.counts}")

    def wait_for_each(self, calls: int = 1) -> None:
        """Waits until every thread has finished so many calls more: the last of them was sent after now."""
        goals = [caller.finished + calls for caller in self.callers]
        self.wait(
            lambda: all(c.finished >= goal for c, goal in zip(self.callers, goals, strict=True)),
            "every thread has finished a call",
        )

    def wait_for_stuck(self, calls: int) -> None:
        """Waits until some thread has not finished a call while the others finished so many."""
        # Not since now: it may well finish one that is on its way before it meets what holds it up.
        seen: dict[int, tuple[int, int]] = {}

        def stuck() -> bool:
            total = sum(caller.finished for caller in self.callers)
            for index, caller in enumerate(self.callers):
                if seen.get(index, (-1, 0))[0] != caller.finished:
                    seen[index] = caller.finished, total
            return any(total - since >= calls for _, since in seen.values())

        self.wait(stuck, "a call is held up while others go on")

    def _run(self, caller: Caller) -> None:
        with (
            Client(self._address, timeout_s=CALL_TIMEOUT_S, stream_from_bytes=UNARY, retry=None) as unary,
            Client(
                self._address, timeout_s=CALL_TIMEOUT_S, stream_from_bytes=STREAMED, retry=None
            ) as streamed,
        ):
            while not self._stop.is_set():
                with self._progress:
                    work = next(self._work)
                result = self._answer(work, streamed if work.stream_from_bytes == STREAMED else unary)
                right = result is not None and work.is_right(result)
                with self._progress:
                    self._count(work, result, right)
                    caller.finished += 1
                    self._progress.notify_all()

    def _answer(self, work: Work, client: Client) -> Any:
        """The result, however often it has to be asked for; None when the call is lost."""
        for _ in range(int(_RETRY_LIMIT_S / _RETRY_WAIT_S)):
            with self._progress:
                self.counts.sent += 1
            try:
                return work.send(client)
            except NpugradError as error:
                if not (error.retryable and isinstance(error, (ServerDraining, ConnectError))):
                    self._lose(work, f"{type(error).__name__} {error.reason}: {error}")
                    return None
                with self._progress:
                    self.counts.refused[type(error).__name__] += 1
            # A server is being started: as long as nobody ends the load, wait and try again.
            self._stop.wait(_RETRY_WAIT_S)
        self._lose(work, "refused until the time was over")
        return None

    def _lose(self, work: Work, why: str) -> None:
        with self._progress:
            self.counts.failed.append(f"{work.record.name}: {why}")

    def _count(self, work: Work, result: Any, right: bool) -> None:
        if result is None:
            return
        self.counts.right += right
        self.counts.wrong += not right
        self.counts.rerun += right and result.info.attempts > 1
        self.counts.by_operator[work.record.name] += right
