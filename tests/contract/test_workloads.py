"""The calls that records name are legal, and every operator has those that measurements ask for."""

from __future__ import annotations

import pytest

from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS
from npugrad.validation import validate_call
from npugrad.workloads import BENCH_SIZES, Workload, named

EACH = [
    pytest.param(record, workload, id=f"{name}-{workload.name}")
    for name, record in OPERATORS.items()
    for workload in record.workloads.named.values()
]


def operand_bytes(call: CallMeta) -> int:
    return sum(meta.nbytes for meta in call.inputs.values() if meta is not None)


@pytest.mark.parametrize(("record", "workload"), EACH)
def test_every_size_is_legal_in_every_type_on_every_product(record: OpRecord, workload: Workload) -> None:
    for product in record.products:
        for dtype in record.inputs[0].dtypes[product]:
            for sizes in filter(None, (workload.sizes, workload.simulated, workload.reduced)):
                call = record.build(dtype=dtype, product=product, **sizes)
                assert validate_call(record, call).violations == ()


@pytest.mark.parametrize(("record", "workload"), EACH)
def test_what_stands_for_a_size_is_smaller(record: OpRecord, workload: Workload) -> None:
    full = operand_bytes(record.build(**workload.sizes))
    if workload.simulated is not None:
        assert workload.model
        assert full > 8 * operand_bytes(record.build(**workload.simulated))
    if workload.reduced is not None:
        assert workload.shown
        assert full > 3 * operand_bytes(record.build(**workload.reduced))


def test_every_operator_has_the_sizes_of_measurements_and_some_of_models(record: OpRecord) -> None:
    names = list(record.workloads.named)
    assert names[:4] == ["tiny", *BENCH_SIZES]
    sizes = [operand_bytes(record.build(**record.workloads.named[name].sizes)) for name in names[:4]]
    assert sizes == sorted(sizes)
    assert len(record.workloads.accepted) >= 2
    assert any(workload.shown and workload.model for workload in record.workloads.named.values())
    assert all(len(values) > 1 for values in record.workloads.variants.values())


def test_a_name_is_there_once() -> None:
    workload = Workload(name="twice", sizes={})
    with pytest.raises(ValueError, match=r"found the names \['twice', 'twice'\]"):
        named(workload, workload)
