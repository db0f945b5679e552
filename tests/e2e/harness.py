"""What the end-to-end tests share: calls by hand over raw stubs, operands in any layout, local results."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.calls import (
    TIMEOUT_S,
    Sample,
    arrays_of,
    call_execute,
    call_unary,
    chunk,
    cpu_run,
    failure_of,
    header_frame,
    registry_of,
)
from tests.fix_server import ServerProcess, run_server

from npugrad import codec, layout
from npugrad.errors import NpugradError
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS
from npugrad.registry import REGISTRY, Registry
from npugrad.v1 import backward_pb2, backward_pb2_grpc, server_pb2, server_pb2_grpc, validation_pb2_grpc

Array = npt.NDArray[Any]
Operands = Mapping[str, Array | None]
Frames = Iterable[backward_pb2.ExecuteRequest | bytes]

RECORDS = list(OPERATORS.values())
each_operator = pytest.mark.parametrize("record", RECORDS, ids=list(OPERATORS))
CALL_TIMEOUT_S = 60.0
_PAUSE_S = 0.02
VICTIM_INPUT_ARENA, VICTIM_OUTPUT_ARENA = 64 * 2**20, 32 * 2**20
"""Bytes of operands, and of results, that the servers of the hostile tests have room for."""
UNARY, STREAMED = 2**40, 0
"""Values of `Client(stream_from_bytes=...)` that force one way or the other."""


def own_threads() -> dict[str, str]:
    """Environment that gives workers PyTorch, and as many threads for linear algebra as this process has.

    Results are the same bit for bit only under the same number.
    """
    own = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    threads = own or str(len(os.sched_getaffinity(0)))
    return {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads, "NPUGRAD_KERNELS_TORCH": "auto"}


@contextmanager
def run_victim(folder: Path, *flags: str, **options: Any) -> Iterator[ServerProcess]:
    """Runs a server for hostile tests, with small arenas; see `run_server` for flags and options."""
    inputs, outputs = str(VICTIM_INPUT_ARENA), str(VICTIM_OUTPUT_ARENA)
    arenas = ("--input-arena-bytes", inputs, "--output-arena-bytes", outputs)
    with run_server(folder / "server.log", *arenas, *flags, env=own_threads(), **options) as running:
        yield running


@contextmanager
def case(*what: object) -> Iterator[None]:
    """Says of what fails in a block which of many cases it was, from Python 3.11 on."""
    try:
        yield
    except BaseException as error:
        if hasattr(error, "add_note"):
            error.add_note(f"case: {', '.join(map(str, what))}")
        raise


# ------------------------------------------------------------------------------------------- results


def local_results(
    record: OpRecord, call: CallMeta, operands: Operands, torch: str = "auto"
) -> dict[str, Array | None]:
    """What the CPU backend computes in this process, into arrays of the outputs' own types."""
    metas = record.infer(call)
    wanted, _ = cpu_run(record, call, operands, metas, torch)
    return {name: wanted.get(name) for name in metas}


def differences(expected: Mapping[str, Array | None], found: Mapping[str, Any]) -> list[str]:
    """Names of the outputs that are not the same bit for bit, with what differs; empty when all are."""
    problems = [f"outputs {list(found)}"] if list(expected) != list(found) else []
    for name, array in expected.items():
        got = found.get(name)
        if array is None or got is None:
            if array is not got:
                problems.append(f"{name}: one of them is None")
        elif (got.dtype, got.shape) != (array.dtype, array.shape):
            problems.append(f"{name}: {got.dtype}{got.shape}, expected {array.dtype}{array.shape}")
        elif got.tobytes() != array.tobytes():
            unlike = np.flatnonzero(_bits(got) != _bits(array))
            problems.append(f"{name}: {unlike.size} of {got.size} elements differ, first {unlike[:3]}")
    return problems


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.itemsize}")


def outputs_of(record: OpRecord, result: Any) -> dict[str, Any]:
    return {param.name: getattr(result, param.name) for param in record.outputs}


# ------------------------------------------------------------------------------------------- layouts


def wire_layout(array: Array, kind: str, rng: np.random.Generator) -> tuple[TensorMeta, memoryview]:
    """Lays an array out as a foreign client might; bytes between its elements are random.

    Args:
        array: The values.
        kind: ``"contiguous"``, ``"offset"``, ``"reversed"`` (first axis innermost), ``"gaps"`` (every
            stride tripled, after an offset) or ``"expanded"`` (an axis whose values are all the same has
            stride 0).
        rng: Source of the bytes in between.
    """
    shape = array.shape
    contiguous = TensorMeta(array.dtype, shape).contiguous_strides
    reversed_strides = TensorMeta(array.dtype, shape[::-1]).contiguous_strides[::-1]
    strides, offset = {
        "contiguous": (None, 0),
        "offset": (None, 5),
        "reversed": (reversed_strides, 0),
        "gaps": (tuple(3 * step for step in reversed_strides), 7),
        "expanded": (tuple(0 if _is_repeated(array, axis) else s for axis, s in enumerate(contiguous)), 1),
    }[kind]
    meta = TensorMeta(array.dtype, shape, strides=strides, storage_offset=offset)
    buffer = bytearray(rng.bytes(meta.content_bytes))
    layout.view(meta, buffer)[...] = array
    return meta, memoryview(buffer)


def _is_repeated(array: Array, axis: int) -> bool:
    first = np.take(array, [0], axis) if array.shape[axis] else array
    return bool(array.shape[axis] > 1 and (array == first).all())


def expanded(array: Array) -> Array:
    """The array with its first sample repeated along the first axis, at the memory of one sample."""
    return np.broadcast_to(array[:1], array.shape) if array.ndim else array


# ---------------------------------------------------------------------------------------------- wire


@dataclass(frozen=True)
class Wire:
    """A channel with raw stubs."""

    channel: grpc.Channel
    backward: backward_pb2_grpc.BackwardServiceStub
    validation: validation_pb2_grpc.ValidationServiceStub
    server: server_pb2_grpc.ServerServiceStub

    @classmethod
    def of(cls, channel: grpc.Channel) -> Wire:
        return cls(
            channel,
            backward_pb2_grpc.BackwardServiceStub(channel),
            validation_pb2_grpc.ValidationServiceStub(channel),
            server_pb2_grpc.ServerServiceStub(channel),
        )

    def unary(self, record: OpRecord, message: Any) -> dict[str, Array | None]:
        result = call_unary(self.channel, record, message)
        return arrays_of(result, {name: found.data or b"" for name, found in result.contents.items()})

    def execute(self, frames: Frames, registry: Registry = REGISTRY) -> dict[str, Array | None]:
        reply = call_execute(self.channel, frames, registry=registry)
        return arrays_of(reply.result, reply.contents)

    def info(self) -> server_pb2.GetServerInfoResponse:
        return self.server.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=CALL_TIMEOUT_S)


def encode(
    record: OpRecord,
    call: CallMeta,
    packed: Mapping[str, tuple[TensorMeta, memoryview]],
    *,
    chunk_from_bytes: int | None = None,
) -> tuple[Any, list[tuple[int, memoryview]]]:
    """The typed request of a call whose operands are laid out as given, and the contents that follow."""
    metas = {name: packed[name][0] if name in packed else None for name in call.inputs}
    contents = {name: content for name, (_, content) in packed.items()}
    return codec.encode_request(
        metas, contents, record, call.attrs, call.outputs, chunk_from_bytes=chunk_from_bytes
    )


def interleaved(
    follow: list[tuple[int, memoryview]], chunk_bytes: int
) -> Iterator[backward_pb2.ExecuteRequest]:
    """Chunks of all operands, one of each in turn, as a client with several uploads at once would send."""
    parts = [[(i, o, bytes(p)) for o, p in layout.chunks(d, chunk_bytes)] for i, d in follow]
    for turn in range(max(map(len, parts), default=0)):
        for part in parts:
            if turn < len(part):
                yield chunk(*part[turn])


def both_ways(channel: grpc.Channel, record: OpRecord, message: Any) -> list[NpugradError]:
    failures = [
        failure_of(lambda: call_unary(channel, record, message)),
        failure_of(
            lambda: call_execute(channel, [header_frame(record, message)], registry=registry_of(record))
        ),
    ]
    return [failure.error for failure in failures]


def eventually(
    condition: Callable[[], Any], what: str, running: ServerProcess, timeout_s: float = 120.0
) -> Any:
    """Asks a server until something is so, at most fifty times a second, and returns what was found."""
    end, pause = time.monotonic() + timeout_s, threading.Event()
    while not (found := condition()):
        if time.monotonic() > end:
            pytest.fail(f"not within {timeout_s:g} s: {what}; the log ends:\n{running.log_text()[-4000:]}")
        pause.wait(_PAUSE_S)
    return found


# ------------------------------------------------------------------------------------------- health


def assert_unharmed(victim: ServerProcess, channel: grpc.Channel, normal: Sample) -> None:
    """The server is the same, healthy, holds nothing, and answers a normal call right."""
    assert victim.process.poll() is None
    wire, health = Wire.of(channel), health_pb2_grpc.HealthStub(channel)
    # A call whose client vanished ends when its worker is done with it; each look is a round trip.
    info = eventually(lambda: idle(wire.info()), "no arena byte in use", victim)
    ready = server_pb2.DeviceState.DEVICE_STATE_READY
    assert [(device.state, device.restarts) for device in info.devices] == [(ready, 0)]
    answer = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)  # type: ignore[attr-defined]
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    expected, registry = normal.reference(), registry_of(normal.record)
    assert call_execute(channel, normal.frames(), registry=registry).contents == expected
    contents = call_unary(channel, normal.record, normal.message()).contents
    assert {name: content.data for name, content in contents.items()} == expected
    log = victim.later_log_text()
    assert "unexpected error" not in log
    assert "Traceback" not in log


def idle(info: server_pb2.GetServerInfoResponse) -> server_pb2.GetServerInfoResponse | None:
    """The description of a server that holds nothing; None while it does."""
    used = info.input_arena_used_bytes or info.output_arena_used_bytes or info.queue_depth
    return None if used else info


# --------------------------------------------------------------------------------------- processes


def workers_of(pid: int) -> list[int]:
    """Worker processes of a server, as the kernel sees them."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that ended meanwhile; its children are another's now
            children += map(int, (task / "children").read_text().split())
    return [child for child in children if _is_worker(child)]


def _is_worker(pid: int) -> bool:
    """Whether it runs a worker's program; a fork has another command line, and is called as its device."""
    try:
        command, name = (Path(f"/proc/{pid}/{file}").read_bytes() for file in ("cmdline", "comm"))
    except OSError:  # it ended meanwhile
        return False
    return b"\0npugrad_server.worker\0" in command or name.startswith((b"cpu:", b"npu:", b"test:"))
