"""Callers of a server whose NPUs fall ill: every answer is compared with the reference, every error kept."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import grpc
import numpy as np
from grpc_status import rpc_status
from tests.calls import Sample, call_execute, call_unary, fill
from tests.e2e.load import Answer, Load, Told, Work
from tests.fix_server import ServerProcess
from tests.operators import FLOYD, GRID_SAMPLER, GROUP_NORM, MSDA

from npugrad.agreement import agreement
from npugrad.call import ExecutionInfo
from npugrad.errors import error_from_details
from npugrad.layout import view
from npugrad.ops import OPERATORS
from npugrad.status import decode_status

WIDE = "wide"
"""A call that needs more pinned memory than those before it."""
LARGE = "large"
"""A call with tensors larger than any block of device memory that small calls leave in torch_npu's cache."""


def send(
    work: Work, channel: grpc.Channel, timeout_s: float | None
) -> tuple[Mapping[str, Any], ExecutionInfo]:
    """Contents of the outputs, and what produced them."""
    made = work.sample
    if work.streamed:
        reply = call_execute(channel, made.frames(), timeout=timeout_s)
        return reply.contents, reply.result.info
    result = call_unary(channel, made.record, made.message(), timeout=timeout_s)
    return {name: content.data for name, content in result.contents.items()}, result.info


def is_right(work: Work, contents: Mapping[str, Any]) -> bool:
    """Whether every wanted output is there and within tolerance of the float64 results."""
    made, expected = work.sample, {n: a for n, a in work.expected.items() if a is not None}
    if contents.keys() != made.outputs.keys():
        return False
    results = {name: view(meta, contents[name]) for name, meta in made.outputs.items()}
    return agreement(made.record, made.arrays, made.call.attrs, results, expected).ok


@cache
def works() -> Mapping[str, tuple[Work, ...]]:
    """Small calls by operator, in several types, unary and streamed; and `WIDE` and `LARGE`."""
    further = {WIDE: GROUP_NORM, LARGE: GRID_SAMPLER}
    metas = {
        **{
            record.name: (record.build(dtype="float32"), record.build(dtype="float16"))
            for record in OPERATORS.values()
        },
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
        WIDE: (GROUP_NORM.build(dtype="float32", n=1, c=16, hxw=40_000, group=4),),
        LARGE: (GRID_SAMPLER.build(dtype="float32", n=1, c=1, h=2600, w=2600, oh=1, ow=1),),
    }
    return {
        name: tuple(
            _work(
                fill(OPERATORS.get(name) or further[name], meta, seed),
                streamed=name not in OPERATORS or bool(seed % 2),
            )
            for seed, meta in enumerate(found)
        )
        for name, found in metas.items()
    }


def _work(sample: Sample, *, streamed: bool) -> Work:
    golden = {name: np.zeros(meta.shape) for name, meta in sample.outputs.items()}
    sample.record.reference(sample.arrays, sample.call.attrs, golden)
    return Work(sample, golden, streamed)


class NpuLoad(Load):
    """Raw calls of a server, each of them once."""

    def __init__(
        self, running: ServerProcess, mix: Sequence[Work], *, timeout_s: float | None, **options: Any
    ) -> None:
        """Starts nothing yet; each call has the deadline, None for none. See `Load` for the options."""
        super().__init__(mix, **options)
        self._running, self._timeout_s = running, timeout_s

    @contextmanager
    def caller(self) -> Iterator[Callable[[Work], Answer]]:
        with self._running.channel() as channel:
            yield lambda work: _answer(work, channel, self._timeout_s)

    def wait_until(self, reached: Callable[[Answer], bool]) -> None:
        self.wait(lambda: any(map(reached, self.answers)), "such an answer")

    def send(self, work: Work, timeout_s: float | None) -> None:
        """Sends one call more from this thread, with a deadline of its own."""
        with self.progress:
            self.sent += 1
        with self._running.channel() as channel:
            answer = _answer(work, channel, timeout_s)
        with self.progress:
            self.keep(answer)
            self.progress.notify_all()


def _answer(work: Work, channel: grpc.Channel, timeout_s: float | None) -> Answer:
    sent_s = time.monotonic()
    try:
        contents, info = send(work, channel, timeout_s)
    except grpc.RpcError as error:
        return Answer(work.record.name, sent_s, told=_told(error))
    return Answer(work.record.name, sent_s, info, is_right(work, contents))


def _told(error: Any) -> Told:
    status = rpc_status.from_call(error)
    details = None if status is None else decode_status(status)
    if details is None:  # the client's own clock ended it
        return Told(error.code(), error.code().name, text=error.details() or "")
    found = error_from_details(details)
    return Told(error.code(), found.reason, getattr(found, "code", None), str(found))


def spread(names: Sequence[str]) -> list[Work]:
    """Calls of these operators in turn, but for one of Floyd in 32: the least that is legal is large."""
    found = works()
    small = [found[name][turn] for turn in (0, 1) for name in names if name != FLOYD.name]
    mix = list(itertools.islice(itertools.cycle(small), 62))
    if FLOYD.name in names:
        mix[7:7], mix[39:39] = found[FLOYD.name][:1], found[FLOYD.name][1:]
    return mix
