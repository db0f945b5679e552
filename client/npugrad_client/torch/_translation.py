"""Translates autograd's operators to those of the service: names, types and masks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CASTABLE = {torch.float32, torch.float16, torch.bfloat16}


@dataclass(frozen=True)
class AutogradCall:
    """One backward call of autograd in the service's terms.

    Attributes:
        operator: Name of the operator.
        inputs: Operands by name, in autograd's types.
        attrs: Attributes by name.
        results: Names of the results in autograd's order, each with the type that autograd wants.
        may_mix: Whether the documents allow the operands to have several types.
        takes_subclasses: Whether subclasses of tensors are sent: only if the caller asked for this very
            operator, not in place of PyTorch's own, which a subclass may override.
    """

    operator: str
    inputs: Mapping[str, Tensor | None]
    attrs: Mapping[str, Any]
    results: Mapping[str, torch.dtype]
    may_mix: bool = False
    takes_subclasses: bool = False

    @property
    def _given(self) -> list[Tensor]:
        return [tensor for tensor in self.inputs.values() if tensor is not None]

    @property
    def is_abstract(self) -> bool:
        """Whether there is nothing to compute: for tensors on "meta", and while a program is traced."""
        return self.odd is not None and any(
            isinstance(tensor, FakeTensor) or tensor.device.type == "meta" for tensor in self._given
        )

    @property
    def odd(self) -> str | None:
        """Which operand is not a dense CPU tensor, or is of a subclass, which may behave differently."""
        for name, tensor in self.inputs.items():
            if tensor is None:
                continue
            if type(tensor) not in _PLAIN and not self.takes_subclasses:
                return f"{name}: found a {type(tensor).__name__}"
            if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
                return f"{name}: found {tensor.dtype} of {tensor.layout} on {tensor.device}"
        return None

    @property
    def is_mixed(self) -> bool:
        """Whether the operands mix types that the service supports but that must not be mixed."""
        found = {tensor.dtype for tensor in self._given if tensor.is_floating_point()}
        return len(found) > 1 and found <= _CASTABLE and not self.may_mix

    @property
    def nbytes(self) -> int:
        """Bytes of operands and results."""
        return sum(tensor.nbytes for tensor in self._given) + self._result_bytes

    @property
    def _result_bytes(self) -> int:
        like = (self.inputs.get(_LIKE[name]) for name in self.results)
        return sum(tensor.nbytes for tensor in like if tensor is not None)

    def operands(self) -> dict[str, Tensor | None]:
        """The operands in one type: mixed ones as float32."""
        if not self.is_mixed:
            return dict(self.inputs)
        return {
            name: tensor.float() if tensor is not None and tensor.is_floating_point() else tensor
            for name, tensor in self.inputs.items()
        }

    def give_back(self, found: Mapping[str, Tensor | None]) -> tuple[Tensor | None, ...]:
        """The service's results in autograd's order and types."""
        tensors = ((found[name], dtype) for name, dtype in self.results.items())
        return tuple(None if tensor is None else tensor.to(dtype) for tensor, dtype in tensors)


_LIKE = {
    "input_grad": "input",
    "grid_grad": "grid",
    "grad_input": "input",
    "grad_gamma": "gamma",
    "grad_beta": "gamma",
    "grad_weight": "weight",
    "grad_bias": "bias",
    "grad_value": "value",
    "grad_location": "location",
    "grad_attn_weight": "attn_weight",
    "dq": "query",
    "dk1": "key1",
    "dv1": "value1",
    "dk2": "key2",
    "dv2": "value2",
}
"""The operand whose shape and type a result has."""


def _grid_sampler(
    operator: str,
    grad_output: Tensor,
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: list[bool],
) -> AutogradCall:
    return AutogradCall(
        operator,
        {"grad_output": grad_output, "input": input, "grid": grid},
        {
            "interpolation_mode": interpolation_mode,
            "padding_mode": padding_mode,
            "align_corners": align_corners,
            "output_mask": tuple(output_mask),
        },
        {"input_grad": input.dtype, "grid_grad": grid.dtype},
    )


def _group_norm(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: list[bool],
) -> AutogradCall:
    gamma = input.dtype if weight is None else weight.dtype
    return AutogradCall(
        "group_norm_backward",
        {"grad_out": grad_out, "input": input, "mean": mean, "rstd": rstd, "gamma": weight},
        {"n": int(N), "c": int(C), "hxw": int(HxW), "group": group, "output_mask": tuple(output_mask)},
        {"grad_input": input.dtype, "grad_gamma": gamma, "grad_beta": gamma},
    )


def _layer_norm(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: list[bool],
) -> AutogradCall:
    scale = {"grad_weight": weight, "grad_bias": bias}
    if weight is None and bias is not None:  # so that the gradient of bias has its type
        weight = torch.ones_like(bias)
    return AutogradCall(
        "layer_norm_backward",
        {"grad_out": grad_out, "input": input, "mean": mean, "rstd": rstd, "weight": weight, "bias": bias},
        {"normalized_shape": tuple(map(int, normalized_shape)), "output_mask": tuple(output_mask)},
        {"grad_input": input.dtype, **{n: input.dtype if t is None else t.dtype for n, t in scale.items()}},
        may_mix=True,
    )


TRANSLATIONS: dict[Any, Callable[..., AutogradCall]] = {
    torch.ops.aten.grid_sampler_2d_backward.default: partial(_grid_sampler, "grid_sampler_2d_backward"),
    torch.ops.aten.grid_sampler_3d_backward.default: partial(_grid_sampler, "grid_sampler_3d_backward"),
    torch.ops.aten.native_group_norm_backward.default: _group_norm,
    torch.ops.aten.native_layer_norm_backward.default: _layer_norm,
}
"""Translations by autograd's operator; all other operators pass through."""
TAKEN_APART = {"NativeGroupNormBackward0": "group_norm_backward"}
"""Nodes that compute with elementary operators if a second derivative is wanted."""
TAKEN_APART_BY = {
    torch.ops.aten.mul.Tensor: "",
    torch.ops.aten.reciprocal_.default: "it is decomposed for a gradient of mean or rstd",
}
"""Operators then seen inside such a node, and the reason if it is not a second derivative."""
