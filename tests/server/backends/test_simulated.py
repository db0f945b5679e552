from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from npugrad import Product, get_operator
from npugrad.call import CallOptions
from npugrad_server.backends.base import CallAbandoned, DeviceCall
from npugrad_server.backends.test import TestBackend, TestOptions
from npugrad_server.devices import parse_device

RECORD = get_operator("group_norm_backward")


def opened(options: str) -> TestBackend:
    backend = TestBackend()
    backend.open(parse_device(f"test:0?{options}"), Product.ATLAS_A2, 1)
    return backend


def run(options: str, label: str = "", dtype: str = "float32") -> dict[str, npt.NDArray[Any]]:
    meta = RECORD.build(dtype=dtype)
    inputs = RECORD.make_inputs(meta, np.random.default_rng(0))
    outputs = {k: np.full(m.shape, 7, m.dtype.numpy) for k, m in RECORD.infer(meta).items() if m is not None}
    opened(options).run(RECORD, DeviceCall(meta, inputs, outputs, CallOptions(label=label), 0))
    return outputs


def test_results_are_zeros_and_take_the_service_time() -> None:
    start = time.perf_counter()
    assert all(not array.any() for array in run("ms=30").values())
    assert time.perf_counter() - start >= 0.03


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_corrupt_result_differs_in_one_bit_and_by_much(dtype: str) -> None:
    right, wrong = run("compute=1", dtype=dtype), run("compute=1&corrupt=x", "x", dtype)
    bits = [
        np.unpackbits(right[k].reshape(-1).view(np.uint8) ^ wrong[k].reshape(-1).view(np.uint8))
        for k in right
    ]
    assert sum(int(found.sum()) for found in bits) == 1
    assert run("compute=1&corrupt=x", "y", dtype)["grad_input"].tobytes() == right["grad_input"].tobytes()


@pytest.mark.parametrize(("failure", "error"), [("oom", MemoryError), ("bug", RuntimeError)])
def test_only_calls_with_the_label_meet_a_failure(failure: str, error: type[Exception]) -> None:
    run(f"{failure}=x", "y")
    with pytest.raises(error, match="options"):
        run(f"{failure}=x", "x")


@pytest.mark.parametrize("options", ["nothing=1", "compute=2", "open=maybe", "ms=soon"])
def test_an_option_that_makes_no_sense_does_not_open(options: str) -> None:
    with pytest.raises(ValueError, match=r"option|expected|could not convert"):
        opened(options)


def test_defaults_are_harmless() -> None:
    options = TestOptions.parse({})
    assert (options.service_s, options.open_s, options.compute, options.opening) == (0, 0, False, "ok")
    assert not options.meets("crash", "")


def call_of(**changes: Any) -> DeviceCall:
    meta = RECORD.build()
    inputs = RECORD.make_inputs(meta, np.random.default_rng(0))
    outputs = {k: np.empty(m.shape, m.dtype.numpy) for k, m in RECORD.infer(meta).items() if m is not None}
    return DeviceCall(meta, inputs, outputs, CallOptions(label="x"), 0, **changes)


def test_a_device_with_memory_of_its_own_says_what_it_has_and_asks_for_workspace() -> None:
    asked: list[int] = []
    backend = opened("memory=100000&workspace=5000")
    assert (backend.memory_bytes, backend.workspace_bytes(RECORD, RECORD.build())) == (100000, 5000)
    assert backend.run(RECORD, call_of(reserve_workspace=asked.append)).workspace_bytes == 5000
    assert opened("memory=100000&workspace=5000&big=x").run(RECORD, call_of()).workspace_bytes == 10000
    assert asked == [5000]
    assert (opened("").memory_bytes, opened("").workspace_bytes(RECORD, RECORD.build())) == (None, None)


def test_calls_that_exceed_the_memory_are_refused_and_leave_nothing_behind() -> None:
    call = call_of()
    tensors = sum(a.nbytes for a in (*call.inputs.values(), *call.outputs.values()) if a is not None)
    backend = opened(f"memory={tensors + 99}&workspace=100")
    for _ in range(2):
        with pytest.raises(MemoryError, match="wanted 100 more"):
            backend.run(RECORD, call)
    opened(f"memory={tensors + 100}&workspace=100").run(RECORD, call)


def test_a_call_that_nobody_waits_for_ends_long_before_its_service_time() -> None:
    looks = 0

    def check_wanted() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise CallAbandoned

    start = time.perf_counter()
    with pytest.raises(CallAbandoned):
        opened("ms=60000").run(RECORD, call_of(check_wanted=check_wanted))
    assert time.perf_counter() - start < 10
