"""The operators of the simulator against the float64 references: two derivations of the same documents."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cann_sim.operators import Relayout, as_it_is, compute, make_arrays, transposed
from tests.cann_sim.runtime import Runtime
from tests.derived import told
from tests.operators import FLOYD
from tests.reaches import masked, prove, unlike_samples

from npugrad.coordinates import CoordinateRule
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS, get_operator
from npugrad.products import Product
from npugrad.tolerance import compare

pytestmark = pytest.mark.npu_sim
Array = npt.NDArray[Any]

SOC = {
    Product.ATLAS_TRAINING: "Ascend910A",
    Product.ATLAS_A2: "Ascend910B2",
    Product.ATLAS_A3: "Ascend910_9391",
}


def check(
    runtime: Runtime,
    record: OpRecord,
    call: CallMeta,
    arrays: dict[str, Array | None],
    relayout: Relayout = as_it_is,
) -> None:
    """Compares every wanted output with the reference; a call that writes nothing must leave the zeros.

    Coordinates are those of Atlas A2, whose kernels of attention have the rule that is the service's.
    """
    found = compute(runtime, record, call, arrays, relayout)
    golden = {name: np.zeros(output.shape) for name, output in found.items()}
    record.references_by_rule.get(CoordinateRule.VENDOR_A2, record.reference)(arrays, call.attrs, golden)
    for name, output in found.items():
        comparison = compare(golden[name], output, record.extra_tolerance(arrays, call.attrs, name))
        assert comparison.ok, f"{name}: {comparison}"


@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_every_sample_of_every_record(runtime: Runtime, record: OpRecord) -> None:
    """On the last product that has it."""
    found = {str((s.call.inputs, s.call.attrs)): (p, s) for p in record.products for s in record.samples(p)}
    for product, sample in found.values():
        runtime.set_plan(f"soc={SOC[product]}")
        with told((product, sample.name)):
            check(runtime, record, sample.call, make_arrays(record, sample.call))


@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
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
