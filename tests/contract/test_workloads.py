"""The calls that records name are legal, and every operator has those that measurements ask for."""

from __future__ import annotations

import itertools

import pytest

from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.validation import validate_call
from npugrad.workloads import BENCH_SIZES, Workload, named


def operand_bytes(call: CallMeta) -> int:
    return sum(meta.nbytes for meta in call.inputs.values() if meta is not None)


def test_every_size_is_legal_and_what_stands_for_it_smaller(record: OpRecord) -> None:
    """In every type on every product."""
    for name, workload in record.workloads.named.items():
        every = [sizes for sizes in (workload.sizes, workload.simulated, workload.reduced) if sizes]
        for product in record.products:
            for dtype, sizes in itertools.product(record.inputs[0].dtypes[product], every):
                call = record.build(dtype=dtype, product=product, **sizes)
                assert validate_call(record, call).violations == (), name
        full = operand_bytes(record.build(**workload.sizes))
        if workload.simulated is not None:
            assert workload.model, name
            assert full > 8 * operand_bytes(record.build(**workload.simulated)), name
        if workload.reduced is not None:
            assert workload.shown, name
            assert full > 3 * operand_bytes(record.build(**workload.reduced)), name


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
