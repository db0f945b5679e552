"""The kernel of fused_floyd_attention_grad against the float64 reference: its bounds and its own kinks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.derived import told
from tests.interpreter import printed
from tests.server.kernels.compare import (
    DTYPES,
    Inputs,
    assert_errors_below,
    assert_right,
    assert_same_bits,
    bits_at_bounds,
    computed,
    given_array,
    golden,
)
from tests.server.kernels.conftest import ROOT, VARIANTS

from npugrad import OPERATORS
from npugrad.dtypes import DType
from npugrad.meta import CallMeta
from npugrad_server.backends.cpu.kernels import Kernels

FLOYD = OPERATORS["fused_floyd_attention_grad"]


def made(call: CallMeta, seed: int = 0) -> Inputs:
    return FLOYD.make_inputs(call, np.random.default_rng(seed))


# Sizes around every bound of the kernel: rows, tiles and ranges, few or many, either of n and m longer.
BOUNDS = [
    dict(n=16, m=128, k=128, d=32, with_mask=True),
    dict(n=130, m=33, k=97, d=64, with_mask=True),
    dict(n=33, m=200, k=161, d=32, with_mask=True),
    dict(b=3, h=5, n=20, m=18, k=40, d=8, with_mask=True),
    dict(b=2, h=2, n=193, m=5, k=33, d=128, with_mask=True),
    dict(n=330, m=3, k=135, d=8, with_mask=True),
]


@pytest.mark.parametrize(
    "sizes",
    [dict(n=96, m=160, k=130, d=64), pytest.param(dict(n=128, m=128, k=128, d=32), marks=pytest.mark.deep)],
)
def test_errors_stay_below_two_millionths(kernels: Kernels, sizes: dict[str, int]) -> None:
    call = FLOYD.build(dtype=DType.FLOAT32, **sizes)
    assert_errors_below(kernels, FLOYD, call, made(call, 7), 2e-6)


test_bits_do_not_depend_on_threads = bits_at_bounds(FLOYD, BOUNDS, lambda call, _: made(call, 2))


def test_a_row_without_keys_passes_its_gradient_through_the_mask(kernels: Kernels) -> None:
    for dtype, (n, m) in zip(DTYPES, [(48, 33), (33, 48), (48, 33)], strict=True):
        call = FLOYD.build(dtype=dtype, b=2, h=2, n=n, m=m, k=40, d=32, with_mask=True)
        inputs = made(call, 5)
        mask = given_array(inputs, "atten_mask")
        mask[0, 0, 3], mask[1] = True, True
        for name, value in (("softmax_max", np.finfo(np.float32).min), ("softmax_sum", 40)):
            statistics = given_array(inputs, name)
            statistics[0, :, 3], statistics[1] = value, value
        found = computed(kernels, FLOYD, call, inputs)
        with told((dtype, n, m)):
            assert_right(FLOYD, call, inputs, found)
            assert np.abs(found["dq"][1].astype(np.float32)).max() > 0


def test_gradients_beyond_float16_are_infinite(kernels: Kernels) -> None:
    """Operands like those of the official example, which no forward pass made."""
    call = FLOYD.build(n=16, m=32, k=64, d=128)
    inputs: Inputs = {
        name: None if meta is None else np.full(meta.shape, 3 if "softmax" in name else 1, meta.dtype.numpy)
        for name, meta in call.inputs.items()
    }
    found = computed(kernels, FLOYD, call, inputs)
    assert_right(FLOYD, call, inputs, found)
    assert np.isinf(found["dv1"]).all()


# Calls of several callers, given up at random moments while threads wait for each other's tasks. In a process
# of its own: what hangs in a kernel cannot be stopped otherwise.
_GIVEN_UP = """
import random, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np
from tests.benchmarks.resident import status_bytes
from npugrad import OPERATORS
from npugrad_server.backends.cpu.kernels import Kernels

class Gone(Exception):
    pass

record = OPERATORS["fused_floyd_attention_grad"]
rounds = int(sys.argv[2])
sizes = dict(n=192, m=40, k=200, d=8), dict(n=40, m=300, k=130, d=8), dict(h=6, n=64, m=64, k=64, d=8)
calls = [record.build(**s) for s in sizes]

def make(seed):
    call = calls[seed]
    inputs = record.make_inputs(call, np.random.default_rng(seed))
    outputs = {n: np.empty(m.shape, m.dtype.numpy) for n, m in record.infer(call).items()}
    return call, inputs, outputs

def run(job, check=None):
    call, inputs, outputs = job
    kernels.run(record, inputs, call.attrs, outputs, check)
    return [outputs[name].tobytes() for name in sorted(outputs)]

def caller(seed):
    rng, job, given_up = random.Random(seed), make(seed), 0
    expected = run(job)
    for turn in range(rounds):
        end = time.monotonic() + rng.uniform(0, 2) * seconds * (turn > 0)
        def wanted():
            if time.monotonic() > end:
                raise Gone
        try:
            assert run(job, wanted) == expected
        except Gone:
            given_up += 1
    assert run(job) == expected
    return given_up

for threads in map(int, sys.argv[3:]):
    kernels = Kernels(threads, Path(sys.argv[1]))
    run(make(0))
    start = time.monotonic()
    run(make(0))
    seconds = max(time.monotonic() - start, 0.01) * len(calls)
    with ThreadPoolExecutor(len(calls)) as callers:
        print(threads, sum(callers.map(caller, range(len(calls)))))
    kernels.close()
"""


@pytest.mark.parametrize(
    ("tested", "rounds", "threads"),
    [
        (VARIANTS[0], 6, "2 7"),
        pytest.param(VARIANTS[0], 20, "1 7 16", marks=pytest.mark.deep),
        # Every variant has the same order of tasks.
        *(pytest.param(variant, 6, "7", marks=pytest.mark.deep) for variant in VARIANTS[1:]),
    ],
    indirect=["tested"],
)
def test_calls_given_up_at_any_moment_end_and_leave_nothing_behind(
    library: Path, rounds: int, threads: str
) -> None:
    lines = printed(_GIVEN_UP, library, rounds, *threads.split(), cwd=ROOT, timeout_s=480)
    given_up = dict(line.split() for line in lines.splitlines())
    assert list(given_up) == threads.split()
    assert min(map(int, given_up.values())) >= 3, "each caller gives up its first call at once"


def test_no_scratch_memory_is_an_answer(make_kernels: Callable[[int], Kernels]) -> None:
    """More than there are addresses for: refused before a task that others would wait for has begun."""
    kernels = make_kernels(3)
    huge = FLOYD.build(n=2**21, m=2**21, k=1, d=8)
    inputs: Inputs = {
        name: None if meta is None else np.broadcast_to(meta.dtype.numpy.type(1), meta.shape)
        for name, meta in huge.inputs.items()
    }
    call = FLOYD.build(n=70, m=40, k=40, d=8)
    wanted = made(call, 11)
    expected = computed(kernels, FLOYD, call, wanted)
    for _ in range(3):
        with pytest.raises(MemoryError, match="no scratch memory"):
            kernels.run(FLOYD, inputs, huge.attrs, {})
        assert_same_bits(computed(kernels, FLOYD, call, wanted), expected)


def test_statistics_of_no_forward_pass(kernels: Kernels) -> None:
    for total, largest in itertools.product((0.0, -1.0, 1e-45, 3e38), (-3e38, 3e38)):
        call = FLOYD.build(dtype=DType.BFLOAT16, n=34, m=33, k=35, d=8)
        inputs = made(call, 15)
        given_array(inputs, "softmax_sum")[0, 0, 3] = total
        given_array(inputs, "softmax_max")[0, 0, 4] = largest
        found = computed(kernels, FLOYD, call, inputs)
        others = [row for row in range(34) if row not in (3, 4)]
        expected = golden(FLOYD, call, inputs)["dq"][0, 0, others]
        errors = np.abs(found["dq"][0, 0, others].astype(np.float64) - expected)
        with told((total, largest)):
            assert_same_bits(found, computed(kernels, FLOYD, call, inputs))
            assert errors.max() < 0.02 * np.abs(expected).max()


# What a fresh process needs beyond its operands, in bytes.
_PEAK = """
import sys
from pathlib import Path
import numpy as np
from tests.benchmarks.resident import status_bytes
from npugrad import OPERATORS
from npugrad_server.backends.cpu.kernels import Kernels

record = OPERATORS["fused_floyd_attention_grad"]
call = record.build(dtype=sys.argv[2], n=256, m=256, k=256, d=32)
inputs = {n: None if m is None else np.ones(m.shape, m.dtype.numpy) for n, m in call.inputs.items()}
kernels = Kernels(2, Path(sys.argv[1]))
before = status_bytes("VmRSS")
outputs = {n: np.empty(m.shape, m.dtype.numpy) for n, m in record.infer(call).items()}
kernels.run(record, inputs, call.attrs, outputs)
print(status_bytes("VmHWM") - before)
"""


@pytest.mark.parametrize(
    ("dtype", "most"), [("float32", 7.75), pytest.param("bfloat16", 5.25, marks=pytest.mark.deep)]
)
def test_memory_does_not_grow_with_the_scores(library: Path, dtype: str, most: float) -> None:
    """Outputs included, in float32 operands; one tensor of scores would take 8 of them."""
    assert int(printed(_PEAK, library, dtype, cwd=ROOT)) < most * 256 * 256 * 32 * 4
