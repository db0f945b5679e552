"""Uses of client and contract that must type-check as they stand; never run."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import npugrad
from npugrad import OPERATORS, DType, OpRecord, Product, validate
from npugrad_client import (
    Client,
    ExecutionInfo,
    FusedFloydAttentionGradResult,
    GroupNormBackwardResult,
    InvalidOperand,
    MultiScaleDeformableAttentionGradResult,
    OperatorError,
    TensorMeta,
    TransportError,
    Verdict,
    Violation,
)


class Tensor:
    """An array of another library; `accept_torch.py` has PyTorch's, which mypy reads for half a minute."""

    def __array__(self) -> npt.NDArray[Any]:
        return np.zeros(1)

    def cpu(self) -> Tensor:
        return self


x = np.zeros((2, 3, 4), np.float32)
statistics = np.zeros((2, 1), np.float32)

with Client("localhost:50051", timeout_s=30.0) as client:
    grads = client.group_norm_backward(
        grad_out=x,
        input=x,
        mean=statistics,
        rstd=statistics,
        gamma=None,
        n=2,
        c=3,
        hxw=4,
        group=1,
        output_mask=(True, False, True),
        out={"grad_input": np.empty_like(x), "grad_beta": TensorMeta("float32", (3,)), "grad_gamma": None},
        timeout_s=1.0,
    )
    assert_type(grads, GroupNormBackwardResult)
    assert_type(grads.info, ExecutionInfo)
    assert_type(grads.info.device, str)

    # Other arrays: bfloat16 of ml_dtypes, tensors of others.
    client.grid_sampler_2d_backward(
        grad_output=Tensor(),
        input=x.astype(ml_dtypes.bfloat16),
        grid=Tensor(),
        interpolation_mode="bilinear",
        padding_mode=0,
        align_corners=False,
        output_mask=[True, True],
    )
    # Who says which arrays go in has them typed as they come out; a masked-out result is None.
    attention: MultiScaleDeformableAttentionGradResult[npt.NDArray[np.float32]] = (
        client.multi_scale_deformable_attention_grad(value=x)
    )
    assert_type(attention.grad_value, npt.NDArray[np.float32])
    assert_type(attention.grad_value.dtype, np.dtype[np.float32])
    floyd: FusedFloydAttentionGradResult[Tensor] = client.fused_floyd_attention_grad(
        query=Tensor(), scale_value=1.0
    )
    assert_type(floyd.dk2, Tensor)
    assert_type(floyd.info, ExecutionInfo)
    norm: GroupNormBackwardResult[Tensor] = grads
    assert_type(norm.grad_gamma, Tensor | Any)
    assert_type(client.validate("group_norm_backward", inputs={}, attrs={}), Verdict)

try:
    Client("unix:socket").server_info()
except InvalidOperand as error:
    assert_type(error.code, "int | None")
    assert_type(error.violations, tuple[Violation, ...])
except OperatorError as error:
    assert_type(error.source, str)
except TransportError as error:
    assert_type(error.retryable, bool)

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
