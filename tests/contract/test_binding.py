"""The bindings that records name take what the records say: on the CPU, where torch has the same function."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npugrad.agreement import agreement
from npugrad.ops import OPERATORS

BOUND = {name: record for name, record in OPERATORS.items() if record.binding is not None}
ON_CPU = [
    name for name, record in BOUND.items() if record.binding and record.binding.path.startswith("aten.")
]


@pytest.mark.parametrize("name", BOUND)
def test_a_binding_takes_every_operand_and_attribute_once(name: str) -> None:
    record = BOUND[name]
    assert record.binding is not None
    taken = [*record.binding.positional, *record.binding.keyword]
    assert sorted(taken) == sorted({p.name for p in record.params} - {p.name for p in record.outputs})


@pytest.mark.parametrize("name", ON_CPU)
def test_what_a_binding_gives_is_what_the_reference_gives(name: str) -> None:
    record = BOUND[name]
    assert record.binding is not None
    call = record.build(dtype="float32")
    operands = record.make_inputs(call, np.random.default_rng(3))
    tensors = {key: None if array is None else torch.from_numpy(array) for key, array in operands.items()}
    found = record.binding.call(torch.ops, {**tensors, **call.attrs})
    results = {p.name: output.numpy() for p, output in zip(record.outputs, found, strict=True)}
    judged = agreement(record, operands, call.attrs, results)
    assert judged.ok, judged


def test_an_older_torch_without_it_is_an_attribute_error() -> None:
    binding = BOUND["fused_floyd_attention_grad"].binding
    assert binding is not None
    with pytest.raises(AttributeError):
        binding.call(object(), {})
