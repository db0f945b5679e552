"""Operands on whose values no wanted result depends: they hardly travel, and take no memory of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.benchmarks.resident import restart_peak, status_bytes
from tests.calls import Sample, fill
from tests.e2e.harness import (
    STREAMED,
    UNARY,
    VICTIM_INPUT_ARENA,
    Wire,
    differences,
    each_operator,
    local_results,
    run_victim,
    workers_of,
)
from tests.fix_server import ServerProcess
from tests.operators import GRID_SAMPLER
from tests.reaches import MASK, every_sample, masked

from npugrad.errors import CallTooLarge
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord
from npugrad_client import Client

NEAREST = {"interpolation_mode": 1, "output_mask": (False, True)}
"""Attributes of GridSampler2D under which no operand is used: the gradient of the grid is 0 everywhere."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with run_victim(tmp_path_factory.mktemp("small")) as running:
        yield running


def shrunk(made: Sample) -> Sample:
    """The call as the client sends it: what is not used is one repeated 0."""
    given = {name: made.call.tensor(name) for name in made.record.unused(made.call)}
    metas = {
        n: TensorMeta(meta.dtype, meta.shape, meta.format, (0,) * meta.rank) for n, meta in given.items()
    }
    zeros = {name: memoryview(bytes(meta.dtype.itemsize)) for name, meta in metas.items()}
    return replace(made, call=made.call.with_inputs(**metas), contents={**made.contents, **zeros})


def unused_calls(record: OpRecord) -> Iterator[CallMeta]:
    """Calls with unused operands, one for each set of them and mask."""
    seen = set()
    for of, call in (param.values for param in every_sample(with_large=False)):
        for one in masked(record, call) if of is record else ():
            unused = frozenset(record.unused(one)), one.attrs.get(MASK)
            if unused[0] and unused not in seen and not record.accepts_unchecked(one):
                seen.add(unused)
                yield one


@each_operator
def test_results_are_the_same_whether_their_contents_travel(small: ServerProcess, record: OpRecord) -> None:
    calls = list(unused_calls(record))
    is_masked = any(output.masked_by is not None for output in record.outputs)
    assert calls or not is_masked, "every operand is always used"
    with small.channel() as channel:
        wire = Wire.of(channel)
        for one in calls:
            made = fill(record, one, seed=3)
            expected = local_results(record, one, made.arrays)
            for sent in (made, shrunk(made)):
                assert not differences(expected, wire.unary(record, sent.message())), one
                assert not differences(expected, wire.execute(sent.frames(chunk_bytes=1021))), one


def grid_call(size: int, **attrs: Any) -> dict[str, Any]:
    """Arguments of GridSampler2D with an input of so many squares of 1 MiB, of which 64 points are taken."""
    rng = np.random.default_rng(1)
    return {
        "grad_output": rng.standard_normal((1, size, 8, 8), dtype=np.float32),
        "input": np.ones((1, size, 512, 512), np.float32),
        "grid": rng.uniform(-1, 1, (1, 8, 8, 2)).astype(np.float32),
        "interpolation_mode": 0,
        "padding_mode": 0,
        "align_corners": False,
        **attrs,
    }


@pytest.mark.parametrize("stream_from_bytes", [UNARY, STREAMED])
def test_the_client_sends_one_element_of_them(small: ServerProcess, stream_from_bytes: int) -> None:
    """96 MiB of input, to a server that takes 64 MiB of operands."""
    with Client(small.address, timeout_s=60, stream_from_bytes=stream_from_bytes) as client:
        found = client.grid_sampler_2d_backward(**grid_call(96, **NEAREST))
        assert found.grid_grad is not None
        assert found.input_grad is None
        assert not found.grid_grad.any()
        call = grid_call(96, output_mask=(False, True))
        with pytest.raises(CallTooLarge, match="input_arena_bytes"):  # in bilinear mode it is used
            client.grid_sampler_2d_backward(**call)


def test_a_content_that_is_sent_all_the_same_takes_no_arena(small: ServerProcess) -> None:
    meta = GRID_SAMPLER.build(n=1, c=96, h=512, w=512, oh=2, ow=2, **NEAREST)
    assert meta.tensor("input").nbytes > VICTIM_INPUT_ARENA
    with small.channel() as channel:
        found = Wire.of(channel).execute(fill(GRID_SAMPLER, meta).frames())
    assert found["grid_grad"] is not None
    assert not found["grid_grad"].any()


def peak_growth(pid: int, act: Callable[[], object]) -> int:
    """Bytes by which the memory of a process exceeded, meanwhile, what it had."""
    before = restart_peak(pid)
    act()
    return status_bytes("VmHWM", pid) - before


def test_they_take_no_memory_of_the_worker(small: ServerProcess) -> None:
    (worker,) = workers_of(small.process.pid)
    with Client(small.address, timeout_s=60) as client:
        client.grid_sampler_2d_backward(**grid_call(1, **NEAREST))
        large = grid_call(128, **NEAREST)  # 128 MiB of input, of which the kernel reads nothing
        assert peak_growth(worker, lambda: client.grid_sampler_2d_backward(**large)) < 2**24
        spread = np.broadcast_to(np.float32(1), (1, 4, 2**22))
        means = np.ones((1, 2), np.float32)
        # 64 MiB of input, all of which the kernel reads: the sum of grad_out comes on the way.
        beta: dict[str, Any] = {"n": 1, "c": 4, "hxw": 2**22, "group": 2, "output_mask": (False, False, True)}
        found: list[Any] = []

        def call() -> None:
            operands: dict[str, Any] = {"grad_out": spread, "input": spread, "mean": means, "rstd": means}
            found.append(client.group_norm_backward(**operands, **beta).grad_beta)

        assert peak_growth(worker, call) < 2**26 + 2**24  # grad_out, which came as one element, becomes whole
        np.testing.assert_array_equal(found[0], np.full(4, 2.0**22, np.float32))
