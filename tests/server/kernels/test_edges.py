"""Every kernel at the edges of its record: as the reference, in every type."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import pytest
from tests.server.kernels.compare import DTYPES, assert_not_finite_alike, assert_right, computed, golden

from npugrad import OPERATORS
from npugrad.dtypes import DType
from npugrad.edges import Edge, edges
from npugrad.layout import view
from npugrad.meta import TensorMeta
from npugrad.operator import OpRecord
from npugrad.products import Product
from npugrad_server.backends.cpu.kernels import Kernels

pytestmark = pytest.mark.usefixtures("has_kernel")
EACH = [
    pytest.param(record, dtype, id=f"{name}-{dtype}")
    for name, record in OPERATORS.items()
    for dtype in record.inputs[0].dtypes[Product.ATLAS_A2]
    if dtype in DTYPES
]


@pytest.mark.slow
@pytest.mark.usefixtures("has_kernel")
@pytest.mark.parametrize("kind", ["empty", "strided", "non-finite", "ties"])
@pytest.mark.parametrize(("record", "dtype"), EACH)
def test_an_edge_comes_out_as_in_the_reference(
    kernels: Kernels, record: OpRecord, dtype: DType, kind: str
) -> None:
    found = [edge for edge in edges(record, dtype) if edge.kind == kind]
    if not found:
        pytest.skip(f"{record.name} has none")
    for edge in found:
        _check(kernels, record, edge)


def _laid_out(meta: TensorMeta, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array as the meta says; elements that repeat one hold the last that was written."""
    found = view(meta, bytearray(meta.content_bytes))
    found[...] = array
    return found


def _check(kernels: Kernels, record: OpRecord, edge: Edge) -> None:
    operands = edge.make()
    for name, meta in edge.call.inputs.items():
        array = operands[name]
        if array is not None and meta is not None and meta.strides and kernels.takes_strides(record, name):
            operands[name] = _laid_out(meta, array)
    outputs = computed(kernels, record, edge.call, operands)
    if edge.kind == "non-finite":
        assert_not_finite_alike(outputs, golden(record, edge.call, operands))
    else:
        assert_right(record, edge.call, operands, outputs)
