"""Where operands and results lie: at any element of memory, and at no fraction of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.server.kernels.compare import assert_same_bits, computed, outputs_for

from npugrad import OPERATORS
from npugrad.dtypes import DType

if TYPE_CHECKING:
    import numpy.typing as npt

    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad_server.backends.cpu.kernels import Kernels

    Array = npt.NDArray[Any]

DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
# Several vectors and a part of one on the last axis of each operand.
SIZES: dict[str, dict[str, Any]] = {
    "multi_scale_deformable_attention_grad": dict(nq=37, nh=3, ch=24, levels=((9, 7), (4, 5)), points=3),
    "grid_sampler_2d_backward": dict(n=2, c=21, h=13, w=19, oh=11, ow=23),
    "group_norm_backward": dict(n=2, c=6, hxw=1037, group=2),
    "fused_floyd_attention_grad": dict(n=35, m=37, k=67, d=37, with_mask=True),
}


def shifted(array: Array, nbytes: int) -> Array:
    """The same array, so many bytes behind the start of a cache line."""
    memory = np.empty(array.nbytes + 64 + nbytes, np.uint8)
    start = -memory.ctypes.data % 64 + nbytes
    moved = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def _made(name: str, dtype: DType) -> tuple[OpRecord, CallMeta, dict[str, Array | None]]:
    record = OPERATORS[name]
    call = record.build(dtype=dtype, **SIZES[name])
    return record, call, dict(record.make_inputs(call, np.random.default_rng(0)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_bits_do_not_depend_on_where_tensors_lie(kernels: Kernels, name: str, dtype: DType) -> None:
    record, call, inputs = _made(name, dtype)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_fractions_of_an_element_are_refused(kernels: Kernels, name: str, dtype: DType) -> None:
    """Stores past the cache would end the process; the backend copies such operands."""
    record, call, inputs = _made(name, dtype)
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
