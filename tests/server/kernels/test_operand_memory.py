"""Where operands and results lie: at any element of memory, and at no fraction of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.derived import FLOATS, Derived, each, varied
from tests.server.kernels.compare import assert_same_bits, computed, outputs_for

from npugrad_server.backends.cpu.kernels import Kernels

Array = npt.NDArray[Any]

pytestmark = pytest.mark.usefixtures("has_kernel")
CALLS = pytest.mark.parametrize("derived", list(each(varied)), ids=str)


def shifted(array: Array, nbytes: int) -> Array:
    """The same array, so many bytes behind the start of a cache line."""
    memory = np.empty(array.nbytes + 64 + nbytes, np.uint8)
    start = -memory.ctypes.data % 64 + nbytes
    moved = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


@pytest.mark.parametrize("dtype", FLOATS)
@CALLS
def test_bits_do_not_depend_on_where_tensors_lie(kernels: Kernels, derived: Derived, dtype: str) -> None:
    record, call = derived.record, derived.call(dtype)
    inputs = derived.operands(call)
    expected = computed(kernels, record, call, inputs)
    for elements in (1, 3, 7):
        moved = {
            key: None if array is None else shifted(np.ascontiguousarray(array), elements * array.itemsize)
            for key, array in inputs.items()
        }
        outputs = {
            key: shifted(array, elements * array.itemsize) for key, array in outputs_for(record, call).items()
        }
        kernels.run(record, moved, call.attrs, outputs)
        assert_same_bits(outputs, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@CALLS
def test_fractions_of_an_element_are_refused(kernels: Kernels, derived: Derived, dtype: str) -> None:
    """Stores past the cache would end the process; the backend copies such operands."""
    record, call = derived.record, derived.call(dtype)
    inputs = derived.operands(call)
    outputs = outputs_for(record, call)
    before = {key: array.tobytes() for key, array in outputs.items()}
    for key, array in inputs.items():
        if array is not None and array.itemsize > 1:
            moved = {**inputs, key: shifted(np.ascontiguousarray(array), 1)}
            with pytest.raises(RuntimeError, match="status 3"):
                kernels.run(record, moved, call.attrs, outputs)
    for key, array in outputs.items():
        with pytest.raises(RuntimeError, match="status 3"):
            kernels.run(record, inputs, call.attrs, {**outputs, key: shifted(array, 1)})
    assert before == {key: array.tobytes() for key, array in outputs.items()}
