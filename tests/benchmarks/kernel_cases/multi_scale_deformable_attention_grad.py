"""Cases of multi_scale_deformable_attention_grad: encoder and decoder of Deformable-DETR, bird's-eye views.

Limit: the way to the caches. Each sample reads four keys and adds to four, anywhere in its level; operands
and results alone are moved within a tenth of the time. torch is measured with the composition of grid_sample
that models fall back to on a CPU, its backward pass alone. torch-ms-deform-attn has a compiled kernel for
float32; it takes part where it is installed.

Expected before the first run: 15 and more against the composition for the large cases, 4 to 6 against the
compiled kernel; less for the decoder, whose time is mostly that of clearing grad_value. 16 bit a little
faster than float32, and torch slower.
"""

from __future__ import annotations

from tests.benchmarks.kernel_cases import TORCH, KernelCase

_NATIVE = "tests.benchmarks.torch_ms_deform_attn_peer:NativeCall"
_PYRAMID = ((100, 134), (50, 67), (25, 34), (13, 17))
_HEADS = {"nh": 8, "ch": 32, "points": 4}
_SIZES = (
    ("encoder 2x17821", {"bs": 2, "nq": 17821, "levels": _PYRAMID, **_HEADS}),
    ("BEV 40000", {"bs": 1, "nq": 40000, "levels": ((200, 200),), **_HEADS}),
    ("BEV 2500", {"bs": 1, "nq": 2500, "levels": ((200, 200),), **_HEADS}),
    ("decoder 2x300", {"bs": 2, "nq": 300, "levels": _PYRAMID, **_HEADS}),
    ("one head 17821", {"bs": 1, "nq": 17821, "levels": _PYRAMID, **_HEADS, "nh": 1}),
    ("small C64", {"bs": 1, "nq": 100, "levels": ((16, 16), (8, 8)), "nh": 4, "ch": 64, "points": 4}),
)
_TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
CASES = tuple(
    KernelCase(
        "multi_scale_deformable_attention_grad",
        name,
        dtype,
        {**sizes, "index_dtype": "int64", "grad_output_rank": 3},
        peers={"torch": TORCH, **({"torch-ms-deform-attn": _NATIVE} if dtype == "float32" else {})},
        tolerance=tolerance,
    )
    for dtype, tolerance in _TOLERANCE.items()
    for name, sizes in _SIZES
)
