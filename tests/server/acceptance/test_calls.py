"""The calls that an acceptance makes: legal where they are to be, illegal in one way where they are not.

Those that take much of the device: their sizes on both sides, and that their results are known.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.acceptance.conftest import bench_on

from npugrad.dtypes import Format
from npugrad.meta import TensorMeta
from npugrad.ops import OPERATORS, get_operator
from npugrad.ops._grid_sampler_2d_backward_workloads import long_call as expanded
from npugrad.products import Product
from npugrad.tolerance import T
from npugrad.validation import validate_call
from npugrad_server.acceptance import extremes
from npugrad_server.acceptance.cases import SIMULATED_BYTES, small_calls
from npugrad_server.acceptance.extremes import HUGE, RECORD, find_long_call, large_call, long_call
from npugrad_server.acceptance.illegal import illegal_calls
from npugrad_server.acceptance.job import Job, Ran, make_job
from npugrad_server.acceptance.known import KnownJob, known
from npugrad_server.acceptance.peers import PeerJob
from npugrad_server.acceptance.rig import Rig
from npugrad_server.acceptance.shapes import float_dtypes, realistic_calls
from npugrad_server.acceptance.step import StepLog, StepSkipped
from npugrad_server.acl.layout import arrange
from npugrad_server.backends.npu.trials.exchange import RawCall, part
from npugrad_server.pool.admission import demand_of
from npugrad_server.worker.protocol import CallDone

A2 = Product.ATLAS_A2
GROUP_NORM, MSDA = (
    get_operator(name) for name in ("group_norm_backward", "multi_scale_deformable_attention_grad")
)


@pytest.mark.parametrize("name", OPERATORS)
def test_calls_are_legal_different_and_in_every_type(name: str) -> None:
    record = get_operator(name)
    for product in record.products:
        calls = list(small_calls(record, product, simulated=False))
        assert all(validate_call(record, small.call).status == 0 for small in calls)
        assert len({(small.name, repr(small.call)) for small in calls}) == len(calls)
        dtypes = [*float_dtypes(record, product)]
        assert {small.dtype for small in calls} == set(dtypes)
        assert len(calls) > len(list(record.samples(product))) or not record.workloads.variants
        for simulated in (False, True):
            sized = list(realistic_calls(record, product, simulated))
            assert all(validate_call(record, call).status == 0 for _, _, call in sized)
            assert [dtype for _, dtype, _ in sized] == dtypes * len(record.workloads.accepted)
    # What a sample of the record already is does not come again under another name.
    calls = list(small_calls(replace(record, samples=lambda product: iter(())), A2, simulated=False))
    for dtype in float_dtypes(record, A2):
        names = [small.name for small in calls if small.dtype is dtype]
        for key, values in record.workloads.variants.items():
            found = {word for n in names for word in n.split() if word.startswith(f"{key}=")}
            assert len(found) == len(values), (dtype, key)


def test_the_simulation_is_spared_the_largest_small_calls() -> None:
    record = get_operator("fused_floyd_attention_grad")
    all_calls, fewer = ([*small_calls(record, A2, simulated)] for simulated in (False, True))
    assert 0 < len(fewer) < len(all_calls)
    for small in fewer:
        assert sum(m.nbytes for m in small.call.inputs.values() if m is not None) <= SIMULATED_BYTES


@pytest.mark.parametrize("name", OPERATORS)
def test_every_constraint_is_broken_except_where_that_takes_another_chip(name: str) -> None:
    record = get_operator(name)
    for constraint in record.constraints:
        product = next(filter(constraint.applies, (A2, *record.products)))
        calls = list(illegal_calls(record, product, constraint))
        assert bool(calls) is (constraint.id != "product.supported"), constraint.id
        for illegal in calls:
            found = validate_call(record, illegal.call).violations
            assert [violation.id for violation in found] == [constraint.id]
            assert list(illegal.case.tensors) == [p.name for p in (*record.inputs, *record.outputs)]


def test_codes_are_those_of_the_vendor_not_of_the_document() -> None:
    codes = {
        constraint.id: {
            c.sample: constraint.vendor_status(c.call) for c in illegal_calls(GROUP_NORM, A2, constraint)
        }
        for constraint in GROUP_NORM.constraints
    }
    assert set(codes["grad_input.not_null"].values()) == {161002}  # 161001 in the document
    assert set(codes["input.rank"].values()) == {0}
    assert set(codes["n.non_negative"].values()) == {161002}  # no check of its own
    # No tensor has a negative number of elements, but without samples none has to.
    assert (codes["hxw.non_negative"]["float32"], codes["hxw.non_negative"]["empty_n"]) == (161002, 0)
    assert set(codes["mean.not_null"].values()) == {161001}


def test_only_what_a_worker_hands_down_unchanged_is_asked_of_it() -> None:
    by_id = {constraint.id: constraint for constraint in MSDA.constraints}

    def by_worker(name: str) -> set[bool]:
        return {illegal.by_worker for illegal in illegal_calls(MSDA, A2, by_id[name])}

    assert by_worker("value.format") == {False}  # a worker says ND, whatever it was told
    assert by_worker("grad_value.not_null") == {False}  # it allocates what is wanted
    assert True in by_worker("channels.limit")


def test_a_case_survives_its_file() -> None:
    strided = TensorMeta("bfloat16", (2, 3), Format.NCHW, (1, 2), 4)
    attrs = {**GROUP_NORM.build().attrs, "output_mask": None}
    case = RawCall(GROUP_NORM.name, attrs, {"input": strided, "gamma": None})
    assert RawCall.from_json(case.to_json()) == case
    masked = replace(case, attrs={"output_mask": (True, False)})
    assert RawCall.from_json(masked.to_json()) == masked


def test_peers_get_the_shapes_of_the_device_and_torch_npus_formats() -> None:
    job = make_job(MSDA, MSDA.build())
    peer = PeerJob("one", job, bound=False)
    plain, named = (peer.case(named=value).tensors for value in (False, True))
    assert {meta.format for meta in plain.values() if meta} == {Format.ND}
    formats = {name: meta.format for name, meta in named.items() if meta}
    assert formats["value"] is Format.NCHW
    assert formats["grad_output"] is Format.NCL
    assert formats["location"] is formats["spatial_shape"] is Format.ND
    grad_output = plain["grad_output"]
    assert grad_output is not None
    assert grad_output.rank == 3
    contents = peer.contents(7)
    assert set(contents) == {part(7, name) for name in job.arrays}
    value = job.arrays["value"]
    assert value is not None
    assert contents[part(7, "value")].tobytes() == value.tobytes()


def test_float_dtypes_are_those_that_have_a_tolerance() -> None:
    assert set(float_dtypes(get_operator("grid_sampler_3d_backward"), A2)) == set(T)
    assert [*float_dtypes(get_operator("fused_floyd_attention_grad"), A2)] == ["float16", "bfloat16"]


# ------------------------------------------------------------- calls that take much of the device

HOST_BYTES = 64 * 1024


def device_bytes(job: Job) -> int:
    return arrange(job.record, job.call).nbytes


@given(nbytes=st.integers(1, 2**40), product=st.sampled_from(Product))
def test_a_large_call_takes_device_memory_and_none_of_the_host(nbytes: int, product: Product) -> None:
    job = large_call(product, nbytes)
    assert device_bytes(job) >= nbytes
    demand = demand_of(job.planned())
    images = job.call.tensor("input").shape[0]
    assert demand.inputs.nbytes <= HOST_BYTES
    assert demand.outputs.nbytes <= 8 * images + HOST_BYTES, "8 bytes for each image of 4 MiB"


def test_both_are_legal_calls() -> None:
    for product in Product:
        long = (long_call(product, size).job.call for size in HUGE.long)
        for call in (large_call(product, 2**36).call, *long):
            assert validate_call(RECORD, call).violations == ()


@pytest.mark.parametrize("size", [(1, 1, 5), (2, 3, 8)])
def test_the_result_of_a_long_call_is_that_of_the_reference(size: tuple[int, int, int]) -> None:
    made = long_call(Product.ATLAS_A2, expanded(*size))
    reference = known("same", made.job)
    assert np.array_equal(reference.golden["input_grad"], made.golden["input_grad"])


def test_sums_of_long_calls_are_exact_in_float32() -> None:
    for size in HUGE.long:
        points = size.sizes["oh"] * size.sizes["ow"]
        total = np.float32(points) * np.float32(2.0**-24)
        assert float(total) == long_call(Product.ATLAS_A2, size).golden["input_grad"][0, 0, 0, 0]
        assert points <= 2**24


def test_operands_in_memory_are_what_the_call_says() -> None:
    job = long_call(Product.ATLAS_A2, expanded(1, 2, 4)).job
    for name, value in (("grad_output", 2.0**-24), ("grid", -1.0)):
        memory = bytearray(job.call.tensor(name).content_bytes)
        assert len(memory) == 4
        job.write(name, memoryview(memory))
        assert np.frombuffer(memory, np.float32)[0] == value


def test_a_call_grows_until_it_is_long_enough() -> None:
    out = StepLog()
    with bench_on("cpu:0") as rig:
        found = find_long_call(rig, out, target_s=0.1, least_s=0.01)
        assert found.known.complaint(rig.run_job(found.known.job)) == ""
    assert found.run_s >= 0.1
    assert out.ok
    (table,) = out.tables
    assert [row[2] for row in table.rows] == ["result"] * len(table.rows)
    assert table.rows[-1][1] == found.run_s


def test_the_time_of_a_long_call_is_that_of_its_fastest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as a run is too short, a longer call is tried."""
    times = iter([0.5, 0.05, 0.5, 0.2, 0.3])
    sizes: list[str] = []

    def grown(_: Rig, tried: KnownJob) -> Ran:
        sizes.append(tried.name)
        return Ran({}, CallDone(0, 0.0, next(times), 0.0, 0, "test"))

    monkeypatch.setattr(extremes, "_grown", grown)
    with bench_on("test:0") as rig:
        found = find_long_call(rig, StepLog(), target_s=0.1, least_s=0.01)
    assert found.run_s == 0.2
    assert [sizes.count(size) for size in dict.fromkeys(sizes)] == [2, 3]


def test_wrong_sums_are_noticed() -> None:
    out = StepLog()
    with bench_on("test:0?ms=20") as rig:  # it answers with zeros
        find_long_call(rig, out, target_s=0.01, least_s=0.01)
    assert [check.name for check in out.checks if not check.ok] == ["the long calls are right"]


def test_without_a_call_that_is_long_enough_there_is_nothing_to_be_cut() -> None:
    out = StepLog()
    with bench_on("test:0?oom=growing") as rig, pytest.raises(StepSkipped, match=r"runs for 0\.5 s"):
        find_long_call(rig, out, target_s=1.0, least_s=0.5)
    assert "DEVICE_OUT_OF_MEMORY" in str(out.tables[0].rows[-1][2])
