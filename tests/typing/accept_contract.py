"""Uses of the contract that must type-check as they stand; never run."""

from __future__ import annotations

from typing_extensions import assert_type

import npugrad
from npugrad import OPERATORS, DType, OpRecord, Product, TensorMeta, Verdict, Violation, validate

by_name = TensorMeta("float32", (2, 3, 4), format="ND")
by_type = TensorMeta(DType.BFLOAT16, [2, 3], strides=(0, 0), storage_offset=1)
assert_type(by_name.dtype, DType)
assert_type(by_name.shape, tuple[int, ...])
assert_type(by_type.nbytes, int)

verdict = validate(
    "group_norm_backward",
    inputs={"grad_out": by_name, "gamma": None},
    attrs={"n": 2, "output_mask": (True, True, True)},
    outputs={"grad_input": by_name, "grad_gamma": None},
    product="atlas-a2",
)
assert_type(verdict, Verdict)
assert_type(verdict.status, int)
assert_type(verdict.violations, tuple[Violation, ...])
same = validate("group_norm_backward", inputs={}, attrs={}, product=Product.ATLAS_A3)
assert_type(OPERATORS["group_norm_backward"], OpRecord)
assert_type(npugrad.__version__, str)
