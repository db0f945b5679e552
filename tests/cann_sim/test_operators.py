"""The operators of the simulator against the float64 references: two derivations of the same documents.

Generated operators compute by the references, so of these it is shown that every operand and attribute
arrives, and every result comes back.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cann_sim.build import Installation, written_here
from tests.cann_sim.fixtures import Ended
from tests.cann_sim.operators import as_it_is, check, compute, make_arrays, transposed
from tests.cann_sim.runtime import Runtime
from tests.derived import drawn, told
from tests.operators import FLOYD
from tests.reaches import masked, prove, unlike_samples

from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS, get_operator
from npugrad.products import Product
from npugrad.validation import validate_call

pytestmark = pytest.mark.npu_sim
Array = npt.NDArray[Any]

GENERATED = [record for record in OPERATORS.values() if record.aclnn_name not in written_here()]
RANDOM_CALLS = 40
SOC = {
    Product.ATLAS_TRAINING: "Ascend910A",
    Product.ATLAS_A2: "Ascend910B2",
    Product.ATLAS_A3: "Ascend910_9391",
}


@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_every_sample_of_every_record(runtime: Runtime, record: OpRecord) -> None:
    """On the last product that has it."""
    found = {str((s.call.inputs, s.call.attrs)): (p, s) for p in record.products for s in record.samples(p)}
    for product, sample in found.values():
        runtime.set_plan(f"soc={SOC[product]}")
        with told((product, sample.name)):
            check(runtime, record, sample.call, make_arrays(record, sample.call))


def check_random_calls(runtime: Runtime, record: OpRecord, count: int) -> None:
    """Compares so many legal calls of any sizes and types, with every tensor in a layout of its own."""
    drawn_calls = ((seed, *drawn(record, seed)) for seed in itertools.count())
    legal = (each for each in drawn_calls if not validate_call(record, each[1]).status)
    for seed, call, operands in itertools.islice(legal, count):
        rng = np.random.default_rng(seed)
        layouts = {name: (as_it_is, transposed)[rng.integers(2)] for name in (*call.inputs, "outputs")}
        call = call.with_inputs(**{name: meta and layouts[name](meta) for name, meta in call.inputs.items()})
        arrays = make_arrays(record, call, seed)
        for name, array in arrays.items():
            if array is not None:
                array[...] = operands[name]
        with told((seed, call)):
            check(runtime, record, call, arrays, layouts["outputs"])


@pytest.mark.parametrize("record", GENERATED, ids=lambda record: record.name)
def test_random_calls_of_generated_operators(runtime: Runtime, record: OpRecord) -> None:
    check_random_calls(runtime, record, RANDOM_CALLS)


def test_a_generated_operator_takes_the_place_of_one_written_here(
    install_cann_sim: Callable[..., Installation], run_on_sim: Callable[..., Ended]
) -> None:
    """In a process of its own: libraries of two simulators do not go together."""
    record = get_operator("layer_norm_backward")
    generated = install_cann_sim(generate=(record.aclnn_name,))
    code = (
        "from tests.cann_sim.observations import start; from tests.cann_sim.test_operators import *;"
        "runtime = start(); runtime.call('aclrtSetDevice', 0);"
        f"check_random_calls(runtime, get_operator({record.name!r}), RANDOM_CALLS)"
    )
    ended = run_on_sim("-c", code, installation=generated)
    assert (ended.status, ended.report.violations()) == (0, []), ended.errors
    assert ended.report.counters()[f"kernels.{record.aclnn_name}"] > RANDOM_CALLS / 2  # others are empty


def test_wrong_records_are_noticed(run_on_sim: Callable[..., Ended]) -> None:
    """Two parameters swapped, and a type too many: the stubs know the pages only."""
    ended = run_on_sim("tests.cann_sim.observations", "wrong_records", plan="poisoned=code")
    assert ended.status == 0, ended.errors
    found = json.loads(ended.output)
    assert found.keys() == {record.name for record in GENERATED}
    for name, (swapped, retyped) in found.items():
        assert re.search("outside tolerance|error code (161002|561000)", swapped), name
        assert "the dtype is not in the page's table (error code 161002)" in retyped, name


@pytest.mark.parametrize(
    "record",
    [record for record in OPERATORS.values() if record not in GENERATED],
    ids=lambda record: record.name,
)
def test_an_output_depends_on_what_the_record_says_and_on_nothing_else(
    runtime: Runtime, record: OpRecord
) -> None:
    """Under every mask; of Floyd attention, of which no legal call is small, one call will do."""

    def simulated(record: OpRecord, call: CallMeta, arrays: Mapping[str, Array | None]) -> dict[str, Array]:
        return {} if record.accepts_unchecked(call) else compute(runtime, record, call, arrays)

    runtime.set_plan("sums=ordered")  # else no two launches have the same bits
    calls = [call for call in unlike_samples(record) if record is not FLOYD or call.inputs["atten_mask"]]
    for call in calls[:1] if record is FLOYD else calls:
        for one in masked(record, call):
            prove(record, one, simulated)


@pytest.mark.parametrize("name", ["grid_sampler_2d_backward", "grid_sampler_3d_backward"])
def test_grids_on_pixel_edges(runtime: Runtime, name: str) -> None:
    """Where the rules differ, results are those of the vendor's; a quadratic input names the pixel."""
    record = get_operator(name)
    size, turns = 49, 40
    sizes = {"n": 1, "c": 1, "h": 1, "w": size, "oh": turns, "ow": size}
    depth = {"d": 1, "od": 1} if "3d" in name else {}
    for padding, aligned in itertools.product((0, 1, 2), (False, True)):
        call = record.build(**sizes, **depth, padding_mode=padding, align_corners=aligned)
        arrays = make_arrays(record, call)
        image, grid = arrays["input"], arrays["grid"]
        assert image is not None
        assert grid is not None
        image[...] = np.arange(size, dtype=np.float32) ** 2
        pixels = np.linspace(-1, 1, size) if aligned else (2 * np.arange(size) + 1) / size - 1
        grid[...] = 0
        grid[..., 0] = pixels + 2 * (np.arange(turns) - turns // 2)[:, np.newaxis]
        with told((padding, aligned)):
            check(runtime, record, call, arrays)


@pytest.mark.parametrize("name", OPERATORS)
def test_outputs_are_written_through_their_strides(runtime: Runtime, name: str) -> None:
    record = get_operator(name)
    call = record.build()
    check(runtime, record, call, make_arrays(record, call), transposed)


@st.composite
def group_norm_calls(draw: st.DrawFn) -> CallMeta:
    group, per_group = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    n, hxw = draw(st.integers(0, 3)), draw(st.integers(0, 7))
    return get_operator("group_norm_backward").build(
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        n=n,
        c=group * per_group,
        hxw=hxw,
        group=group,
        with_gamma=draw(st.booleans()),
        output_mask=tuple(draw(st.lists(st.booleans(), min_size=3, max_size=3))),
    )


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=group_norm_calls(), seed=st.integers(0, 2**16))
def test_group_norm_of_any_size(runtime: Runtime, call: CallMeta, seed: int) -> None:
    record = get_operator("group_norm_backward")
    check(runtime, record, call, make_arrays(record, call, seed))


def test_threads_with_streams_of_their_own(runtime: Runtime) -> None:
    """Four threads run calls of all operators at once; each result is right, and nothing is left."""
    runtime.set_plan("threads=strict")
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            runtime.call("aclrtSetDevice", 0)
            record = get_operator(name)
            call = record.build()
            for seed in range(2 if record is FLOYD else 20):
                check(runtime, record, call, make_arrays(record, call, seed))
            runtime.call("aclrtResetDevice", 0)
        except BaseException as error:  # for the main thread to raise
            failures.append(error)

    threads = [threading.Thread(target=work, args=[name]) for name in OPERATORS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
