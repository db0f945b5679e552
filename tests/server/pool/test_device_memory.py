from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.pool.pools import altered, make_job

from npugrad import OPERATORS, Product, TensorMeta
from npugrad.call import CallOptions
from npugrad_server.pool import PlannedCall
from npugrad_server.pool.device_memory import (
    DeviceNeed,
    LearnedWorkspaces,
    budget,
    footprint,
    largest_workspace,
    need_of,
    workspace_footprint,
)

MIB = 2**20


@pytest.mark.parametrize(
    ("nbytes", "taken"),
    [(0, 512), (1, 512), (480, 512), (481, 1024), (512, 1024), (992, 1024), (993, 1536), (MIB, MIB + 512)],
)
def test_a_buffer_takes_whole_blocks_and_some_spare_bytes(nbytes: int, taken: int) -> None:
    assert footprint(nbytes) == taken


@given(st.integers(0, 2**40))
def test_the_largest_workspace_of_a_room_fits_it_and_one_byte_more_does_not(room: int) -> None:
    largest = largest_workspace(room)
    assert workspace_footprint(largest) <= room
    assert workspace_footprint(largest + 1) > room
    assert workspace_footprint(0) == 0


@pytest.mark.parametrize(
    ("free", "streams", "left"),
    [
        (64 * 1024 * MIB, 1, (64 * 1024 - 2048 - 22) * MIB),
        (64 * 1024 * MIB, 4, (64 * 1024 - 2048 - 88) * MIB),
        (32 * MIB, 8, 24 * MIB),
        (0, 1, 0),
    ],
)
def test_a_part_of_the_memory_is_left_out_of_the_budget(free: int, streams: int, left: int) -> None:
    assert budget(free, streams) == left


@pytest.mark.parametrize("name", list(OPERATORS))
def test_the_tensors_of_a_call_are_counted_as_they_lie_on_the_device(name: str) -> None:
    record = OPERATORS[name]
    call = record.build()
    planned = PlannedCall.alone(record, call, record.infer(call), CallOptions(), "", None)
    need = need_of(planned)
    metas = [meta for meta in (*call.inputs.values(), *planned.plan.outputs.values()) if meta is not None]
    assert need.tensor_bytes == sum(footprint(meta.nbytes) for meta in metas)
    assert not need.host_bytes
    verified = need_of(replace(planned, options=CallOptions(verify=True)))
    assert verified.host_bytes - need.host_bytes == sum(
        8 * meta.size for meta in planned.plan.outputs.values() if meta is not None
    )


def test_an_expanded_operand_is_small_on_a_device_and_a_sparse_one_is_packed_on_the_host() -> None:
    planned = make_job(n=2, c=6, hxw=4).planned
    expanded = TensorMeta("float32", (2, 6, 4), strides=(0, 0, 0))
    sparse = TensorMeta("float32", (2, 6, 4), strides=(24000, 4000, 1000))
    plain, first, second = (
        need_of(altered(planned, call=planned.plan.call.with_inputs(input=meta)))
        for meta in (planned.plan.call.inputs["input"], expanded, sparse)
    )
    assert first.tensor_bytes <= plain.tensor_bytes == second.tensor_bytes
    assert (plain.host_bytes, first.host_bytes, second.host_bytes) == (0, 0, 4 * 48)
    # A call of which nothing is wanted takes nothing, whatever its operands.
    call = planned.plan.call.with_inputs(input=None)
    unwanted = altered(planned, call=call, outputs=dict.fromkeys(planned.plan.outputs))
    assert need_of(unwanted) == DeviceNeed()


def test_calls_whose_workspace_may_differ_have_different_keys() -> None:
    planned = make_job(n=2, c=6, hxw=4).planned
    call = planned.plan.call
    strided = TensorMeta("float32", (2, 6, 4), strides=(1, 2, 12))
    others = [
        make_job(n=2, c=6, hxw=8).planned,
        make_job(n=2, c=6, hxw=4, dtype="float16").planned,
        make_job(n=2, c=6, hxw=4, group=2).planned,
        make_job(n=2, c=6, hxw=4, output_mask=(True, True, False)).planned,
        altered(planned, call=call.with_inputs(input=strided)),
        altered(planned, call=call.with_inputs(input=TensorMeta("float32", (2, 6, 4), "NCHW"))),
        replace(planned, options=CallOptions(deterministic=True)),
        altered(planned, call=replace(call, product=Product.ATLAS_A3)),
    ]
    keys = {need_of(each).key for each in (planned, *others)}
    assert len(keys) == len(others) + 1
    same = replace(planned, options=CallOptions(label="x", priority=3), request_id="other", deadline_s=1.0)
    assert need_of(same).key == need_of(planned).key


def test_the_newest_figure_of_a_kind_counts_and_kinds_not_met_for_longest_are_forgotten() -> None:
    learned = LearnedWorkspaces(capacity=3)
    for number, nbytes in ((0, 9), (0, 10), (1, 11), (2, 12)):
        learned.learn(number, nbytes)
    assert learned.expect(0) == 10
    learned.learn(3, 13)
    assert [learned.expect(number) for number in range(4)] == [10, 0, 12, 13]
    assert len(learned) == 3
