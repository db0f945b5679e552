"""Sizes that are given by name, as text."""

from __future__ import annotations

import pytest

from npugrad import OPERATORS, OpRecord
from npugrad_client.bench.sizes import _READERS, _forms, example, parse_sizes


@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_the_example_of_each_operator_is_its_small_workload(record: OpRecord) -> None:
    assert parse_sizes(record, example(record)) == record.workloads.named["small"].sizes


@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_each_keyword_of_each_operator_can_be_given(record: OpRecord) -> None:
    assert set(_forms(record).values()) <= set(_READERS)


def test_a_value_may_have_commas_and_spaces() -> None:
    record = OPERATORS["multi_scale_deformable_attention_grad"]
    text = "bs=1, nq=2, nh=2, ch=8, levels=6x7,3x4, points=4, index_dtype=int64"
    assert parse_sizes(record, text) == {
        "bs": 1,
        "nq": 2,
        "nh": 2,
        "ch": 8,
        "levels": ((6, 7), (3, 4)),
        "points": 4,
        "index_dtype": "int64",
    }
