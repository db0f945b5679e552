"""Translates autograd's operators to those of the service: names, types and masks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from npugrad.ops import OPERATORS
from npugrad_client._generated_ops import ATEN
from npugrad_client._legality import require_legal
from npugrad_client.errors import OperatorError
from npugrad_client.torch._calls import metas

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from npugrad.binding import TorchBinding

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
        may_mix: Whether operands of several types are sent as they are, even if the documents refuse them.
        takes_subclasses: Whether subclasses of tensors are sent: only if the caller asked for this very
            operator, not in place of PyTorch's own, which a subclass may override.
        is_single: Whether autograd wants the result itself, not a tuple of one.
    """

    operator: str
    inputs: Mapping[str, Tensor | None]
    attrs: Mapping[str, Any]
    results: Mapping[str, torch.dtype]
    may_mix: bool = False
    takes_subclasses: bool = False
    is_single: bool = False

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
        return self._is_mixed

    @cached_property
    def _is_mixed(self) -> bool:
        found = {tensor.dtype for tensor in self._given if tensor.is_floating_point()}
        return len(found) > 1 and found <= _CASTABLE and not self.may_mix and not self._is_legal

    @property
    def nbytes(self) -> int:
        """Bytes of operands and results."""
        return sum(tensor.nbytes for tensor in self._given) + self._result_bytes

    @property
    def _is_legal(self) -> bool:
        try:
            require_legal(self.operator, metas(self.operator, self.inputs), self.attrs)
        except OperatorError:
            return False
        return True

    @property
    def _result_bytes(self) -> int:
        outputs = (output for output in OPERATORS[self.operator].outputs if output.name in self.results)
        like = (self.inputs.get(output.like) for output in outputs)
        return sum(tensor.nbytes for tensor in like if tensor is not None)

    def operands(self) -> dict[str, Tensor | None]:
        """The operands in one type: mixed ones as float32."""
        if not self.is_mixed:
            return dict(self.inputs)
        return {
            name: tensor.float() if tensor is not None and tensor.is_floating_point() else tensor
            for name, tensor in self.inputs.items()
        }

    def give_back(self, found: Mapping[str, Tensor | None]) -> Any:
        """The service's results in autograd's order and types."""
        tensors = ((found[name], dtype) for name, dtype in self.results.items())
        results = tuple(None if tensor is None else tensor.to(dtype) for tensor, dtype in tensors)
        return results[0] if self.is_single else results


def _by_binding(operator: str, func: Any, *args: Any, **kwargs: Any) -> AutogradCall:
    """The call of an operator whose record says which arguments of PyTorch's function it takes."""
    record = OPERATORS[operator]
    binding = cast("TorchBinding", record.binding)
    given = {name: kwargs.get(own, default) for name, own, default in _parameters(func, operator)}
    given.update(zip(binding.positional, args, strict=False))
    taken = {name: found(given) for name, found in binding.back.items()}
    inputs = {p.name: taken.get(p.name, given.get(p.name)) for p in record.inputs}
    asked = next((value for value in given.values() if isinstance(value, torch.dtype)), None)
    data = inputs[record.outputs[0].like]
    like = {p.name: tensor if (tensor := inputs[p.like]) is not None else data for p in record.outputs}
    return AutogradCall(
        operator,
        inputs,
        {p.name: _plain(taken.get(p.name, given.get(p.name))) for p in record.attrs},
        {name: asked or cast("Tensor", tensor).dtype for name, tensor in like.items()},
        is_single=len(func._schema.returns) == 1,
    )


@cache
def _parameters(func: Any, operator: str) -> tuple[tuple[str, str, Any], ...]:
    """The record's name, PyTorch's name and the default of each argument of a function."""
    binding = cast("TorchBinding", OPERATORS[operator].binding)
    arguments = func._schema.arguments
    plain = [argument.name for argument in arguments if not argument.kwarg_only]
    names = dict(zip(plain, binding.positional, strict=False))
    return tuple((names.get(each.name) or each.name, each.name, each.default_value) for each in arguments)


def _plain(value: Any) -> Any:
    """An attribute as the client takes it: hashable, and no symbol."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return int(value) if isinstance(value, torch.SymInt) else value


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


_ATEN = torch.ops.aten
_FUNCTIONS = {getattr(_ATEN, name).default: op for name, op in ATEN.items() if hasattr(_ATEN, name)}
TRANSLATIONS: dict[Any, Callable[..., AutogradCall]] = {
    **{func: partial(_by_binding, op, func) for func, op in _FUNCTIONS.items()},
    torch.ops.aten.native_layer_norm_backward.default: _layer_norm,
}
"""Translations by autograd's operator; all other operators pass through."""
TAKEN_APART = {"NativeGroupNormBackward0": "group_norm_backward", "SiluBackward0": "silu_backward"}
"""Nodes that compute with elementary operators if a second derivative is wanted."""
TAKEN_APART_BY = {
    torch.ops.aten.mul.Tensor: "",
    torch.ops.aten.reciprocal_.default: "it is decomposed for a gradient of mean or rstd",
}
"""Operators then seen inside such a node, and the reason if it is not a second derivative."""
