"""A call of 3 GiB: 1 GiB each of gradient, input and result. Run by `make test-large`, not by `make test`.

Data are made and checked group by group, so this process holds the three arrays and little else.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.benchmarks.resident import status_bytes
from tests.calls import call_execute, call_unary, failure_of, header_frame, sample
from tests.e2e.harness import Array, Wire
from tests.fix_server import ServerProcess, run_server
from tests.operators import GROUP_NORM
from tests.summary import Tally

from npugrad import codec
from npugrad.tolerance import compare
from npugrad_client import CallTooLarge, Client

pytestmark = pytest.mark.large

GIB, MIB = 2**30, 2**20
NEEDED_BYTES = 16 * GIB
N, C, HXW, GROUP = 4, 64, 2**20, 8
CHANNELS = C // GROUP
OPERAND_BYTES = N * C * HXW * 4
ARENAS = ("--input-arena-bytes", "2100MiB", "--output-arena-bytes", "1100MiB")
"""The least that the call fits into; the defaults of a host with 16 GiB are 4 GiB and 2 GiB."""
FRONT_LIMIT_BYTES = 256 * MIB
"""What the front process may take beyond the arenas, whatever the size of a call."""
_PAUSE_S = 0.02


def available_bytes() -> int:
    """Memory that can be had now: of the machine, and of the control group where there is a limit."""
    available: int = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(available, int(limit) - int(used))
    except (OSError, ValueError):  # no control groups of version 2, or "max"
        return available


@pytest.fixture(autouse=True)
def enough_memory() -> None:
    """Skip, saying so, where the machine is too small."""
    found = available_bytes()
    if found < NEEDED_BYTES:
        pytest.skip(f"found {found / GIB:.1f} GiB of free memory; expected {NEEDED_BYTES / GIB:.0f} GiB")


# ---------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Operands:
    """The call's operands: (N, C, HXW), statistics (N, GROUP), gamma (C); all float32."""

    grad_out: Array
    input: Array
    mean: Array
    rstd: Array
    gamma: Array


def groups() -> Iterator[tuple[int, int, slice]]:
    """Sample, group and channels of each group."""
    for sample_, group in np.ndindex(N, GROUP):
        yield sample_, group, slice(group * CHANNELS, (group + 1) * CHANNELS)


def make_operands() -> Operands:
    """Normal data with the statistics that a forward pass would leave, one group at a time."""
    rng = np.random.default_rng(1)
    made = Operands(
        grad_out=np.empty((N, C, HXW), np.float32),
        input=np.empty((N, C, HXW), np.float32),
        mean=np.empty((N, GROUP), np.float32),
        rstd=np.empty((N, GROUP), np.float32),
        gamma=rng.standard_normal(C, np.float32) + 1,
    )
    for n, group, channels in groups():
        rng.standard_normal(dtype=np.float32, out=made.grad_out[n, channels])
        block = made.input[n, channels]
        rng.standard_normal(dtype=np.float32, out=block)
        block += np.float32(0.5 * group)
        made.mean[n, group] = block.mean(dtype=np.float64)
        made.rstd[n, group] = 1 / math.sqrt(block.var(dtype=np.float64) + 1e-5)
    return made


@dataclass(frozen=True)
class Golden:
    """One group in float64: grad_input (CHANNELS, HXW), its part of grad_gamma and grad_beta (CHANNELS)."""

    grad_input: Array
    grad_gamma: Array
    grad_beta: Array
    extra: float


def golden(operands: Operands, n: int, group: int, channels: slice) -> Golden:
    """The textbook formula, which is not the one that the reference is written with."""
    rstd = float(operands.rstd[n, group])
    normalised = (operands.input[n, channels].astype(np.float64) - float(operands.mean[n, group])) * rstd
    grad_out = operands.grad_out[n, channels].astype(np.float64)
    grad_gamma, grad_beta = (grad_out * normalised).sum(axis=1), grad_out.sum(axis=1)
    gamma = operands.gamma[channels].astype(np.float64)
    count = CHANNELS * HXW
    grad_out *= gamma[:, None]
    # Terms of this size cancel in grad_input.
    extra = 8 * float(np.finfo(np.float32).eps) * rstd * float(np.abs(grad_out).max())
    normalised *= -(gamma @ grad_gamma) / count
    grad_out += normalised
    grad_out -= (gamma @ grad_beta) / count
    grad_out *= rstd
    return Golden(grad_out, grad_gamma, grad_beta, extra)


def check(operands: Operands, grads: Any) -> float:
    """Compares every element; the worst error as a part of the tolerance."""
    worst, sums = 0.0, {"grad_gamma": np.zeros(C), "grad_beta": np.zeros(C)}
    for n, group, channels in groups():
        expected = golden(operands, n, group, channels)
        found = compare(expected.grad_input, grads.grad_input[n, channels], expected.extra)
        assert found.ok, f"grad_input of sample {n}, group {group}: {found}"
        worst = max(worst, found.worst)
        sums["grad_gamma"][channels] += expected.grad_gamma
        sums["grad_beta"][channels] += expected.grad_beta
    for name, values in sums.items():
        found = compare(values, getattr(grads, name))
        assert found.ok, f"{name}: {found}"
        worst = max(worst, found.worst)
    return worst


# -------------------------------------------------------------------------------------------- figures


@dataclass
class Peaks:
    """The highest figures while a call ran, in bytes."""

    front_anon: int = 0
    input_arena: int = 0
    output_arena: int = 0


@contextmanager
def watched(running: ServerProcess) -> Iterator[Peaks]:
    """Looks at the front process and its arenas some fifty times a second for as long as the block runs."""
    peaks, stop = Peaks(), threading.Event()

    def look(wire: Wire) -> None:
        while not stop.wait(_PAUSE_S):
            info = wire.info()
            peaks.front_anon = max(peaks.front_anon, anonymous_bytes(running.process.pid))
            peaks.input_arena = max(peaks.input_arena, info.input_arena_used_bytes)
            peaks.output_arena = max(peaks.output_arena, info.output_arena_used_bytes)

    with running.channel() as channel:
        watcher = threading.Thread(target=look, args=(Wire.of(channel),), daemon=True)
        watcher.start()
        try:
            yield peaks
        finally:
            stop.set()
            watcher.join(60)


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is neither file nor shared: what it took for itself."""
    return status_bytes("RssAnon", pid)


def assert_healthy(running: ServerProcess) -> None:
    """Nothing is in use, and a normal call is answered right."""
    running.assert_nothing_leaked()
    made = sample()
    with running.channel() as channel:
        contents = call_unary(channel, made.record, made.message()).contents
    assert {name: content.data for name, content in contents.items()} == made.reference()


# --------------------------------------------------------------------------------------------- tests


@pytest.mark.timeout(900)
def test_a_call_of_3_gib(tmp_path: Path, tally: Tally) -> None:
    operands = make_operands()
    result = np.empty((N, C, HXW), np.float32)
    assert operands.grad_out.nbytes == operands.input.nbytes == result.nbytes == OPERAND_BYTES == GIB
    with (
        run_server(tmp_path / "server.log", *ARENAS) as running,
        Client(running.address, timeout_s=600) as client,
    ):
        limits = running.info().limits
        before = anonymous_bytes(running.process.pid)
        with watched(running) as peaks:
            grads = client.group_norm_backward(
                **vars(operands),
                n=N,
                c=C,
                hxw=HXW,
                group=GROUP,
                output_mask=(True, True, True),
                out={"grad_input": result},
            )
        assert grads.grad_input is result
        after = anonymous_bytes(running.process.pid)
        assert_healthy(running)
    front = ", ".join(f"{found / MIB:.0f} MiB" for found in (before, peaks.front_anon, after))
    tally("large: RssAnon of the front process before, at its peak, after", front)
    for name in ("input", "output"):
        size, used = getattr(limits, f"{name}_arena_bytes"), getattr(peaks, f"{name}_arena")
        tally(f"large: {name} arena, size and most in use", f"{size / MIB:.0f} MiB, {used / MIB:.0f} MiB")
    info = grads.info
    seconds = ", ".join(f"{s:.2f}" for s in (info.queued_s, info.copy_in_s, info.run_s, info.copy_out_s))
    tally("large: seconds queued, copying in, running, copying out", seconds)
    assert peaks.input_arena >= 2 * GIB
    assert peaks.output_arena >= GIB
    assert peaks.front_anon - before < FRONT_LIMIT_BYTES, "the front process holds parts of the call itself"
    tally("large: worst error as a part of the tolerance", f"{check(operands, grads):.1e}")


def test_a_call_of_3_gib_is_refused_where_it_cannot_fit(tmp_path: Path) -> None:
    """At the header, before any payload; by the client's method and by hand."""
    call = GROUP_NORM.build(n=N, c=C, hxw=HXW, group=GROUP)
    arrays = {name: None if m is None else np.zeros(m.shape, np.float32) for name, m in call.inputs.items()}
    with run_server(tmp_path / "server.log") as running:
        before = anonymous_bytes(running.process.pid)
        with Client(running.address, timeout_s=60) as client, pytest.raises(CallTooLarge) as caught:
            client.group_norm_backward(**arrays, **call.attrs)  # type: ignore[arg-type]
        assert f"found {2 * GIB + 512} bytes of operands; expected at most {256 * MIB}" in str(caught.value)
        assert not caught.value.retryable
        with running.channel() as channel:
            for _ in range(20):
                failure = failure_of(lambda: call_execute(channel, [announced(call)]))
                assert failure.error.reason == "CALL_TOO_LARGE"
        assert_healthy(running)
        assert anonymous_bytes(running.process.pid) - before < FRONT_LIMIT_BYTES


def announced(call: Any) -> Any:
    """The header of a call whose operands all come in chunks."""
    message, _ = codec.encode_request(call.inputs, {}, GROUP_NORM, call.attrs)
    for name, meta in call.inputs.items():
        getattr(message, name).chunked_bytes = meta.content_bytes
    return header_frame(GROUP_NORM, message)
