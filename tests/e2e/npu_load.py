"""Callers of a server whose NPUs fall ill: every answer is compared with the reference, every error kept."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from grpc_status import rpc_status
from tests.calls import Sample, call_execute, call_unary, fill
from tests.e2e.harness import FLOYD, GRID_SAMPLER, GROUP_NORM, MSDA

from npugrad.errors import error_from_details
from npugrad.layout import view
from npugrad.status import decode_status
from npugrad.tolerance import compare

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt
    from tests.fix_server import ServerProcess

    from npugrad.call import ExecutionInfo

WIDE = "wide"
"""A call that needs more pinned memory than those before it."""
END_S = 90.0
"""Seconds that a load has to end once it is told to."""


@dataclass(frozen=True, eq=False)
class Work:
    """A call whose results are known.

    Attributes:
        sample: The call.
        golden: Its float64 results.
        streamed: Whether it goes through Execute.
    """

    sample: Sample
    golden: Mapping[str, npt.NDArray[np.float64]]
    streamed: bool

    @property
    def operator(self) -> str:
        """Name of the operator."""
        return self.sample.record.name

    def send(self, channel: grpc.Channel, timeout_s: float | None) -> tuple[Mapping[str, Any], ExecutionInfo]:
        """Contents of the outputs, and what produced them."""
        if self.streamed:
            reply = call_execute(channel, self.sample.frames(), timeout=timeout_s)
            return reply.contents, reply.result.info
        result = call_unary(channel, self.sample.record, self.sample.message(), timeout=timeout_s)
        return {name: content.data for name, content in result.contents.items()}, result.info

    def is_right(self, contents: Mapping[str, Any]) -> bool:
        """Whether every wanted output is there and within tolerance."""
        sample = self.sample
        return contents.keys() == sample.outputs.keys() and all(
            compare(
                self.golden[name],
                view(meta, contents[name]),
                sample.record.extra_tolerance(sample.arrays, sample.call.attrs, name),
            ).ok
            for name, meta in sample.outputs.items()
        )


@cache
def works() -> Mapping[str, tuple[Work, ...]]:
    """Small calls by operator, in several types, unary and streamed; and `WIDE`."""
    metas = {
        GROUP_NORM.name: (
            GROUP_NORM.build(dtype="float32", n=3, c=10, hxw=7, group=5),
            GROUP_NORM.build(dtype="bfloat16", n=2, c=8, hxw=33, group=2, with_gamma=False),
        ),
        GRID_SAMPLER.name: (
            GRID_SAMPLER.build(dtype="float32", padding_mode=1),
            GRID_SAMPLER.build(dtype="float16", c=4, oh=5, ow=3, output_mask=(True, False)),
        ),
        MSDA.name: (MSDA.build(dtype="float32"), MSDA.build(dtype="float16", nq=7, points=3)),
        FLOYD.name: (FLOYD.build(dtype="float16", with_mask=True), FLOYD.build(dtype="bfloat16")),
        WIDE: (GROUP_NORM.build(dtype="float32", n=1, c=16, hxw=40_000, group=4),) * 2,
    }
    return {
        name: tuple(
            _work(fill(GROUP_NORM if name == WIDE else _SPECS[name], meta, seed), streamed=bool(seed % 2))
            for seed, meta in enumerate(found)
        )
        for name, found in metas.items()
    }


_SPECS = {record.name: record for record in (GROUP_NORM, GRID_SAMPLER, MSDA, FLOYD)}


def _work(sample: Sample, *, streamed: bool) -> Work:
    golden = {name: np.zeros(meta.shape) for name, meta in sample.outputs.items()}
    sample.record.reference(sample.arrays, sample.call.attrs, golden)
    return Work(sample, golden, streamed)


@dataclass(frozen=True)
class Told:
    """The error that a caller got.

    Attributes:
        status: gRPC status.
        reason: Row of the error table; the status again when the call ended without the server's words.
        code: The vendor's number.
        text: For a person.
    """

    status: grpc.StatusCode
    reason: str
    code: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Answer:
    """What became of a call.

    Attributes:
        operator: Its operator.
        sent_s: When it was sent, by `time.monotonic()`.
        info: What produced the result; None without one.
        right: Whether the result was within tolerance.
        told: The error; None with a result.
    """

    operator: str
    sent_s: float
    info: ExecutionInfo | None = None
    right: bool = False
    told: Told | None = None


class Load:
    """Threads that send calls in turn until so many were sent and nobody needs more.

    Attributes:
        answers: Every answer so far.
        sent: Calls sent so far.
        broken: What went wrong in a thread, so that its call has no answer.
    """

    def __init__(
        self,
        running: ServerProcess,
        mix: Sequence[Work],
        *,
        threads: int,
        calls: int,
        timeout_s: float | None,
        more: bool = False,
    ) -> None:
        """Starts nothing yet.

        Args:
            running: The server.
            mix: Calls, taken in turn by all threads.
            threads: How many call at once.
            calls: How many calls to send at least.
            timeout_s: Deadline of each; None for none.
            more: Whether to go on until `enough`.
        """
        self.answers: list[Answer] = []
        self.broken: list[BaseException] = []
        self.sent = 0
        self._running, self._mix, self._calls, self._timeout_s = running, mix, calls, timeout_s
        self._enough = not more
        self._progress = threading.Condition()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.enough()
        self.join()

    def wait(self, answers: int) -> None:
        """Waits until so many calls have an answer."""
        with self._progress:
            reached = self._progress.wait_for(lambda: len(self.answers) >= answers or self.broken, END_S)
            assert reached, f"{len(self.answers)} answers after {END_S:g} s"

    def wait_until(self, reached: Callable[[Answer], bool]) -> None:
        """Waits until there is such an answer."""
        with self._progress:
            found = self._progress.wait_for(lambda: any(map(reached, self.answers)) or self.broken, END_S)
            assert found, f"no such answer among {len(self.answers)} after {END_S:g} s"

    def enough(self) -> None:
        """No more calls than the number given at the start."""
        self._enough = True

    def join(self) -> None:
        """Waits for the end of every call."""
        for thread in self._threads:
            thread.join(END_S)
        assert not any(thread.is_alive() for thread in self._threads), "a call got no answer"
        assert self.broken == []

    def send(self, work: Work) -> Answer:
        """Sends one call more from this thread."""
        with self._progress:
            self.sent += 1
        with self._running.channel() as channel:
            return self._keep(_answer(work, channel, self._timeout_s))

    def _run(self) -> None:
        try:
            with self._running.channel() as channel:
                while (work := self._next()) is not None:
                    self._keep(_answer(work, channel, self._timeout_s))
        except BaseException as error:
            with self._progress:
                self.broken.append(error)
                self._progress.notify_all()

    def _next(self) -> Work | None:
        with self._progress:
            if self.broken or (self._enough and self.sent >= self._calls):
                return None
            self.sent += 1
            return self._mix[self.sent % len(self._mix)]

    def _keep(self, answer: Answer) -> Answer:
        with self._progress:
            self.answers.append(answer)
            self._progress.notify_all()
        return answer


def _answer(work: Work, channel: grpc.Channel, timeout_s: float | None) -> Answer:
    sent_s = time.monotonic()
    try:
        contents, info = work.send(channel, timeout_s)
    except grpc.RpcError as error:
        return Answer(work.operator, sent_s, told=_told(error))
    return Answer(work.operator, sent_s, info, work.is_right(contents))


def _told(error: Any) -> Told:
    status = rpc_status.from_call(error)
    details = None if status is None else decode_status(status)
    if details is None:  # the client's own clock ended it
        return Told(error.code(), error.code().name, text=error.details() or "")
    found = error_from_details(details)
    return Told(error.code(), found.reason, getattr(found, "code", None), str(found))


def spread(names: Sequence[str]) -> list[Work]:
    """Calls of these operators in turn, but for one of Floyd in sixteen: the least that is legal is large."""
    found = works()
    small = [found[name][turn] for turn in (0, 1) for name in names if name != FLOYD.name]
    mix = list(itertools.islice(itertools.cycle(small), 30))
    if FLOYD.name in names:
        mix[7:7], mix[23:23] = found[FLOYD.name][:1], found[FLOYD.name][1:]
    return mix
