"""Sizes that are given by name, as text."""

from __future__ import annotations

import pytest

from npugrad import OPERATORS, OpRecord
from npugrad_client.bench.scenario import ScenarioError
from npugrad_client.bench.sizes import _READERS, _forms, example, parse_sizes


@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_each_workload_can_be_written_as_text(record: OpRecord) -> None:
    for name, workload in record.workloads.named.items():
        assert parse_sizes(record, example(record, name)) == workload.sizes


@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_each_keyword_of_each_operator_can_be_given(record: OpRecord) -> None:
    assert set(_forms(record).values()) <= set(_READERS)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_a_number_is_finite(value: str) -> None:
    record = OPERATORS["fused_floyd_attention_grad"]
    with pytest.raises(ScenarioError, match=f"scale_value: found '{value}'; expected a finite number"):
        parse_sizes(record, f"{example(record)},scale_value={value}")


def test_a_message_shows_the_beginning_of_a_long_value() -> None:
    record = OPERATORS["group_norm_backward"]
    for text in ("n=" + "9" * 5000, "n" * 5000 + "=1", "n" * 5000):
        with pytest.raises(ScenarioError) as raised:
            parse_sizes(record, text)
        assert len(str(raised.value)) < 400


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
