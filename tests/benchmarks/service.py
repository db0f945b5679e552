"""The service against computing in the caller's own process, and calls per second against bare grpcio.

Operators
    One call through client, server and worker on ``cpu:0``, against (a) the NumPy reference called in the
    caller's process and (b) PyTorch's CPU backward of the same operands in the same type:
    native_group_norm_backward, grid_sampler_2d_backward, and where torch has no operator the autograd
    backward of a composition (MSDA by grid_sample, Floyd by einsum). A composition's forward pass is done
    before the clock starts, though our call has to make up for it: generous to torch. Before it is timed,
    every contestant's result is compared with ours.

    Limits: with compiled kernels the way there and back; without them (backend cpu-reference) every element
    is converted to float64, goes through memory some ten times, and is rounded, while torch runs fused
    float32 kernels on all cores.

    Expected of the reference, before the first run: (a) 0.05 to 0.3 for small calls, where the round trip of
    about 1.5 ms is everything, 0.5 to 0.95 for medium ones, and never above 1. (b) 0.02 to 0.1 for small
    calls, and 0.02 to 0.3 for medium ones. Compiled kernels came later, to change these figures.
    Found wrong: (a) can pass 1, because the worker keeps freed memory and a caller's process does not.

Calls per second
    A call of 1 KiB each way (that of the transport benchmark) with 1, 8 and 32 in flight, in a closed loop of
    threads, against bare grpcio, protobuf bytes, with as many. Ours on a simulated device, which shows the
    service alone, and on ``cpu:0``, which adds an operator's work for one point.

    Limits: the interpreter of the front process. It does for each call what the bare server does, and reads
    and checks the operands, writes shared memory, talks to the worker, counts and logs.
    Client, front process and worker share the cores with each other, the bare server with its client only.

    Expected before the first run: 0.3 to 0.5 with one in flight, 0.2 to 0.4 with 8 and 32.

Cost of metrics
    The same call on a simulated device against a server that is told of every call and counts none. A ratio
    of 0.98 says that counting takes 2 % of the time of a call.

    Expected before the first run: 0.96 to 1. Counting is 7 of about 560 Python frames of such a call.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tests.benchmarks.contestant import difference
from tests.benchmarks.goals import Figure, Goal, at_least, promised
from tests.benchmarks.harness import Effort, Result, compare
from tests.benchmarks.operands import Array, Call, empty_outputs, made, results_of
from tests.benchmarks.processes import Contestant, Entry, Field, bare_server
from tests.benchmarks.service_under_test import service
from tests.operators import FLOYD, GRID_SAMPLER, GROUP_NORM, MSDA

from npugrad.ops import get_operator
from npugrad_client import Client

TITLE = "Service on the CPU device"
SUBTITLE = "whole round trips against computing in the caller's process; calls of 1 KiB against bare grpcio"
OURS, REFERENCE, TORCH, GRPC = "npugrad", "reference in process", "torch backward", "grpcio, protobuf bytes"
UNCOUNTED = "without metrics"
_LEVELS = ((50, 67), (25, 34), (13, 17))
CASES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (GROUP_NORM.name, "2x32x8x8 G8", "float32", {"n": 2, "c": 32, "hxw": 64, "group": 8}),
    (GROUP_NORM.name, "2x128x32x32 G32", "float32", {"n": 2, "c": 128, "hxw": 1024, "group": 32}),
    (GROUP_NORM.name, "2x128x32x32 G32", "bfloat16", {"n": 2, "c": 128, "hxw": 1024, "group": 32}),
    (GRID_SAMPLER.name, "1x3x16x16", "float32", {"n": 1, "c": 3, "h": 16, "w": 16, "oh": 16, "ow": 16}),
    (GRID_SAMPLER.name, "4x3x128x128", "float32", {"n": 4, "c": 3, "h": 128, "w": 128, "oh": 128, "ow": 128}),
    (
        MSDA.name,
        "32 queries",
        "float32",
        {"bs": 1, "nq": 32, "nh": 2, "ch": 8, "levels": ((8, 8), (4, 4)), "points": 4},
    ),
    (
        MSDA.name,
        "decoder",
        "float32",
        {"bs": 2, "nq": 300, "nh": 8, "ch": 32, "levels": _LEVELS, "points": 4},
    ),
    (FLOYD.name, "16x128x128 D32", "bfloat16", {"b": 1, "h": 1, "n": 16, "m": 128, "k": 128, "d": 32}),
    (FLOYD.name, "64x128x128 D32", "bfloat16", {"b": 1, "h": 1, "n": 64, "m": 128, "k": 128, "d": 32}),
)
CONCURRENCY = (1, 8, 32)
LOADED = {"simulated device": "test:1?ms=0", "cpu:0": "cpu:0"}
GOALS: Mapping[str, Mapping[str, Goal]] = {
    f"{MSDA.name} decoder": {TORCH: at_least(0.7, 1)},
    f"{FLOYD.name} 64x128x128 D32": {TORCH: at_least(0.5, 0.8)},
    f"{GRID_SAMPLER.name} 4x3x128x128": {TORCH: at_least(0.25, 0.5)},
    "1 KiB, 32 in flight, simulated device": {GRPC: at_least(0.45, 0.7)},
}
"""What was promised of a case, by peer."""
_ECHO = "tests.benchmarks.transport:ServiceEcho"
_UNCOUNTED_PROGRAM = ("-m", "tests.benchmarks.uncounted")
_METRICS_REPETITIONS = 15
"""More than elsewhere, for a difference of some per cent."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}


class ServiceCall:
    def __init__(self, address: str) -> None:
        self._client = Client(address)

    def prepare(self, case: Mapping[str, Any]) -> Call:
        call, operands = made(case)
        method = getattr(self._client, case["operator"])
        names = results_of(case, call)

        def through_the_service() -> Mapping[str, Array]:
            grads = method(**operands, **call.attrs)
            return {name: getattr(grads, name) for name in names}

        return through_the_service


class ReferenceCall:
    def prepare(self, case: Mapping[str, Any]) -> Call:
        call, operands = made(case)
        record = get_operator(case["operator"])

        def in_process() -> Mapping[str, Array]:
            outputs = empty_outputs(case, call)
            record.reference(operands, call.attrs, outputs)
            return outputs

        return in_process


def run(effort: Effort) -> Iterator[Result | Figure]:
    yield from _operators(effort)
    for label, devices in effort.first(LOADED.items()):
        yield from _throughput(effort, label, devices)
    yield from _cost_of_metrics(effort)


def _operators(effort: Effort) -> Iterator[Result | Figure]:
    entries = {REFERENCE: Entry(f"{__name__}:ReferenceCall")}
    if importlib.util.find_spec("torch") is not None and not effort.quick:
        entries[TORCH] = Entry("tests.benchmarks.torch_peer:TorchCall")
    with service("cpu:0") as address:
        ours = {OURS: Entry(f"{__name__}:ServiceCall", {"address": address})}
        with Field(effort, {**ours, **entries}) as field:
            for operator, sizes_name, dtype, sizes in effort.first(CASES):
                contestants = field.prepared({"operator": operator, "dtype": dtype, "sizes": sizes})
                _check_same(f"{operator} {dtype}", dtype, contestants)
                slots = {name: contestant.median_s for name, contestant in contestants.items()}
                yield from _measured(f"{operator} {sizes_name}", dtype, slots, effort)


def _check_same(case: str, dtype: str, contestants: Mapping[str, Contestant]) -> None:
    """A peer that computes something else is no peer."""
    ours = contestants[OURS].fingerprint
    for name, contestant in contestants.items():
        worst = difference(ours, contestant.fingerprint)
        if not worst <= TOLERANCE[dtype]:
            raise RuntimeError(f"{case}: the results of {name!r} differ from ours by about {worst:.1e}")


def _throughput(effort: Effort, label: str, devices: str) -> Iterator[Result | Figure]:
    with service(devices) as address, bare_server("grpc") as grpc:
        peer = Entry("tests.benchmarks.echo:GrpcEcho", {"address": grpc, "message": "protobuf"})
        entries = {OURS: Entry(_ECHO, {"address": address}), GRPC: peer}
        for count in effort.first(CONCURRENCY):
            yield from _loaded(f"1 KiB, {count} in flight, {label}", entries, count, effort)


def _cost_of_metrics(effort: Effort) -> Iterator[Result | Figure]:
    label, devices = next(iter(LOADED.items()))
    more = effort if effort.quick else replace(effort, repetitions=_METRICS_REPETITIONS)
    with service(devices) as ours, service(devices, program=_UNCOUNTED_PROGRAM) as uncounted:
        entries = {
            name: Entry(_ECHO, {"address": address})
            for name, address in ((OURS, ours), (UNCOUNTED, uncounted))
        }
        for count in effort.first((CONCURRENCY[0], CONCURRENCY[-1])):
            case = f"cost of metrics: 1 KiB, {count} in flight, {label}"
            yield from _loaded(case, entries, count, more)


def _loaded(case: str, entries: Mapping[str, Entry], count: int, effort: Effort) -> Iterator[Result | Figure]:
    with Field(effort, entries) as field:
        contestants = field.prepared({"nbytes": 2**10})
        slots = {name: contestant.loaded_s(count) for name, contestant in contestants.items()}
        yield from _measured(case, "float32", slots, effort)


def _measured(
    case: str, dtype: str, slots: Mapping[str, Callable[[], float]], effort: Effort
) -> Iterator[Result | Figure]:
    result = compare(case, dtype, slots, effort)
    yield result
    yield from promised(result, GOALS.get(case, {}))
