"""The calls that an acceptance makes: legal where they are to be, illegal in one way where they are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npugrad.dtypes import Format
from npugrad.meta import TensorMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS, get_operator
from npugrad.products import Product
from npugrad.tolerance import T
from npugrad.validation import validate_call
from npugrad_server.acceptance.cases import SIMULATED_BYTES, small_calls
from npugrad_server.acceptance.illegal import illegal_calls
from npugrad_server.acceptance.job import make_job
from npugrad_server.acceptance.peers import PeerJob
from npugrad_server.acceptance.shapes import float_dtypes, realistic_calls
from npugrad_server.backends.npu.trials.exchange import RawCall, part

EACH = [
    pytest.param(record, product, id=f"{record.name}-{product}")
    for record in OPERATORS.values()
    for product in record.products
]
A2 = Product.ATLAS_A2


@pytest.mark.parametrize(("record", "product"), EACH)
def test_small_calls_are_legal_different_and_in_every_type(record: OpRecord, product: Product) -> None:
    calls = list(small_calls(record, product, simulated=False))
    assert all(validate_call(record, small.call).status == 0 for small in calls)
    assert len({(small.name, repr(small.call)) for small in calls}) == len(calls)
    assert {small.dtype for small in calls} == set(float_dtypes(record, product))
    assert len(calls) > len(list(record.samples(product)))


@pytest.mark.parametrize("name", OPERATORS)
def test_every_value_of_every_variant_is_called_in_every_type(name: str) -> None:
    record = get_operator(name)
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


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize(("record", "product"), EACH)
def test_realistic_calls_are_legal_and_in_every_type(
    record: OpRecord, product: Product, simulated: bool
) -> None:
    calls = list(realistic_calls(record, product, simulated))
    assert all(validate_call(record, call).status == 0 for _, _, call in calls)
    assert [dtype for _, dtype, _ in calls] == [*float_dtypes(record, product)] * len(
        record.workloads.accepted
    )


@pytest.mark.parametrize(("record", "product"), EACH)
def test_every_constraint_is_broken_except_where_that_takes_another_chip(
    record: OpRecord, product: Product
) -> None:
    for constraint in record.constraints:
        if not constraint.applies(product):
            continue
        calls = list(illegal_calls(record, product, constraint))
        if constraint.id == "product.supported":
            assert calls == []
            continue
        assert calls, constraint.id
        for illegal in calls:
            found = validate_call(record, illegal.call).violations
            assert [violation.id for violation in found] == [constraint.id]
            assert list(illegal.case.tensors) == [p.name for p in (*record.inputs, *record.outputs)]


def test_codes_are_those_of_the_vendor_not_of_the_document() -> None:
    record = get_operator("group_norm_backward")
    codes = {
        constraint.id: {
            c.sample: constraint.vendor_status(c.call) for c in illegal_calls(record, A2, constraint)
        }
        for constraint in record.constraints
    }
    assert set(codes["grad_input.not_null"].values()) == {161002}  # 161001 in the document
    assert set(codes["input.rank"].values()) == {0}
    assert set(codes["n.non_negative"].values()) == {161002}  # no check of its own
    # No tensor has a negative number of elements, but without samples none has to.
    assert (codes["hxw.non_negative"]["float32"], codes["hxw.non_negative"]["empty_n"]) == (161002, 0)
    assert set(codes["mean.not_null"].values()) == {161001}


def test_only_what_a_worker_hands_down_unchanged_is_asked_of_it() -> None:
    record = get_operator("multi_scale_deformable_attention_grad")
    by_id = {constraint.id: constraint for constraint in record.constraints}

    def by_worker(name: str) -> set[bool]:
        return {illegal.by_worker for illegal in illegal_calls(record, A2, by_id[name])}

    assert by_worker("value.format") == {False}  # a worker says ND, whatever it was told
    assert by_worker("grad_value.not_null") == {False}  # it allocates what is wanted
    assert True in by_worker("channels.limit")


def test_a_case_survives_its_file() -> None:
    record = get_operator("group_norm_backward")
    strided = TensorMeta("bfloat16", (2, 3), Format.NCHW, (1, 2), 4)
    case = RawCall(
        record.name, {**record.build().attrs, "output_mask": None}, {"input": strided, "gamma": None}
    )
    assert RawCall.from_json(case.to_json()) == case
    masked = replace(case, attrs={"output_mask": (True, False)})
    assert RawCall.from_json(masked.to_json()) == masked


def test_peers_get_the_shapes_of_the_device_and_torch_npus_formats() -> None:
    record = get_operator("multi_scale_deformable_attention_grad")
    job = make_job(record, record.build())
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
