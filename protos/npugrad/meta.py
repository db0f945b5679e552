"""Tensors and calls without their data: `TensorMeta` and `CallMeta`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

from npugrad.dtypes import DType, Format, dtype_from_name, format_from_name
from npugrad.errors import MalformedTensor, WrongType
from npugrad.products import Product
from npugrad.representation import short_repr
from npugrad.usage import reports_usage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from npugrad.attributes import AttrValue, Scalar

INT64_MAX = 2**63 - 1
_SUMMARY_CHARACTERS = 512
MAX_RANK = 32
"""Maximum rank on the wire, which is NumPy's limit before 2.0. The operators' limits are lower."""


@reports_usage
@dataclass(frozen=True)
class TensorMeta:
    """Description of a tensor without its data.

    Example:
        >>> TensorMeta("bfloat16", (2, 3)).nbytes
        12
        >>> expanded = TensorMeta("float32", (2, 3), strides=(0, 0))
        >>> expanded.content_bytes
        4

    Attributes:
        dtype: Element type; names are converted to `DType`.
        shape: Size of each axis.
        format: Storage format; ND by default.
        strides: Stride of each axis in elements; None for contiguous, row-major. 0 repeats an element.
        storage_offset: Number of elements in the content before the first element of the tensor.

    Raises:
        MalformedTensor: A size, stride or offset is negative, the number of strides is not the rank, the rank
            is above 32, or the tensor or its content would exceed 2^63 - 1 bytes.
        WrongType: A size, stride or offset is not an integer.
        WrongValue: Unknown dtype or format.
    """

    __repr__ = short_repr

    dtype: DType
    shape: tuple[int, ...]
    format: Format = Format.ND
    strides: tuple[int, ...] | None = None
    storage_offset: int = 0

    def __init__(
        self,
        dtype: DType | str | npt.DTypeLike,
        shape: Sequence[SupportsIndex],
        format: Format | str = Format.ND,
        strides: Sequence[SupportsIndex] | None = None,
        storage_offset: SupportsIndex = 0,
    ) -> None:
        """Creates the description; see the class for arguments and errors."""
        object.__setattr__(self, "dtype", dtype_from_name(dtype))
        object.__setattr__(self, "shape", _indices("shape", shape))
        object.__setattr__(self, "format", format_from_name(format))
        object.__setattr__(self, "strides", None if strides is None else _indices("strides", strides))
        object.__setattr__(self, "storage_offset", *_indices("storage_offset", (storage_offset,)))
        self._check_layout()

    def _check_layout(self) -> None:
        if len(self.shape) > MAX_RANK:
            raise MalformedTensor(f"found rank {len(self.shape)}; expected at most {MAX_RANK}")
        if self.shape and min(self.shape) < 0:
            raise MalformedTensor(f"found shape {list(self.shape)}; expected sizes of 0 or more")
        if self.storage_offset < 0:
            raise MalformedTensor(f"found storage offset {self.storage_offset}; expected 0 or more")
        if self.strides is not None:
            if len(self.strides) != len(self.shape):
                raise MalformedTensor(
                    f"found {len(self.strides)} strides, rank {len(self.shape)}; expected one for each axis"
                )
            if self.strides and min(self.strides) < 0:
                raise MalformedTensor(f"found strides {list(self.strides)}; expected 0 or more")
        if max(self.nbytes, self.content_bytes) > INT64_MAX:
            raise MalformedTensor(
                f"found shape {list(self.shape)}, above 2^63 - 1 bytes; expected a size that fits int64"
            )

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensor when contiguous."""
        return self.size * self.dtype.itemsize

    @cached_property
    def contiguous_strides(self) -> tuple[int, ...]:
        """Row-major strides of the shape, in elements."""
        strides, step = [], 1
        for s in reversed(self.shape):
            strides.append(step)
            step *= max(s, 1)
        return tuple(reversed(strides))

    @cached_property
    def element_strides(self) -> tuple[int, ...]:
        """Strides in elements; the row-major ones if `strides` is None."""
        return self.contiguous_strides if self.strides is None else self.strides

    @cached_property
    def content_bytes(self) -> int:
        """Bytes of the content on the wire: itemsize x (offset + span), span 0 when empty."""
        span = self.size
        if span and self.strides is not None:
            span = sum((s - 1) * step for s, step in zip(self.shape, self.strides, strict=True)) + 1
        return self.dtype.itemsize * (self.storage_offset + span)

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the content is the row-major tensor itself, from its first byte."""
        if self.storage_offset or self.strides is None or not self.size:
            return self.storage_offset == 0
        return all(
            s == 1 or step == expected
            for s, step, expected in zip(self.shape, self.strides, self.contiguous_strides, strict=True)
        )

    def __getstate__(self) -> dict[str, Any]:
        """The fields only; everything derived from them is computed again on demand."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def permuted(self, axes: tuple[int, ...]) -> TensorMeta:
        """The same elements with the axes in another order, in the format ND."""
        if axes == tuple(range(self.rank)):
            return self
        shape, strides = ([each[axis] for axis in axes] for each in (self.shape, self.element_strides))
        return TensorMeta(self.dtype, shape, strides=strides, storage_offset=self.storage_offset)

    def contiguous(self) -> TensorMeta:
        """The same tensor, contiguous."""
        if self.strides is None and not self.storage_offset:
            return self
        return TensorMeta(self.dtype, self.shape, self.format)

    def __str__(self) -> str:
        """Such as ``float32[2, 3, 4]``."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def _indices(name: str, sizes: Sequence[SupportsIndex]) -> tuple[int, ...]:
    try:
        return tuple(map(index, sizes))
    except TypeError:
        raise WrongType(f"TensorMeta: {name}: found {sizes!r}; expected integers") from None


def _frozen(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(mapping))


@dataclass(frozen=True)
class CallMeta:
    """One call without its data, as constraints see it.

    Attributes:
        inputs: Every input by name; None is a null pointer.
        attrs: Every attribute by name.
        outputs: Declared outputs by name; None is a null pointer. A missing one is inferred.
        product: Product the call is for.
    """

    inputs: Mapping[str, TensorMeta | None]
    attrs: Mapping[str, AttrValue]
    outputs: Mapping[str, TensorMeta | None] = field(default_factory=dict)
    product: Product = Product.ATLAS_A2

    def __post_init__(self) -> None:
        """Makes the mappings read-only."""
        for name in ("inputs", "attrs", "outputs"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))

    @cached_property
    def summary(self) -> str:
        """Types, shapes and attributes in one line for logs, truncated if too long."""
        operands = [f"{name}={meta}" for name, meta in self.inputs.items() if meta is not None]
        attrs = [f"{name}={value}" for name, value in self.attrs.items()]
        return ", ".join(operands + attrs)[:_SUMMARY_CHARACTERS]

    def tensor(self, name: str) -> TensorMeta:
        """An input that a required constraint has shown not to be null."""
        meta = self.inputs[name]
        if meta is None:
            raise KeyError(f"{name} is null")  # a record that forgot `requires`; the fuzz test finds it
        return meta

    def integer(self, name: str) -> int:
        """An integer attribute."""
        value = self.attrs[name]
        if not isinstance(value, int):
            raise KeyError(f"{name} is not an integer")
        return value

    def number(self, name: str) -> float:
        """A double or float attribute."""
        value = self.attrs[name]
        if not isinstance(value, (int, float)):
            raise KeyError(f"{name} is not a number")
        return float(value)

    def mask(self, name: str = "output_mask") -> tuple[bool, ...] | None:
        """A bool array attribute."""
        return cast("tuple[bool, ...] | None", self.attrs[name])

    def integers(self, name: str) -> tuple[int, ...] | None:
        """An int64 array attribute."""
        return cast("tuple[int, ...] | None", self.attrs[name])

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """A float array attribute."""
        return cast("tuple[float, ...] | None", self.attrs[name])

    def scalar(self, name: str) -> Scalar | None:
        """A scalar attribute."""
        return cast("Scalar | None", self.attrs[name])

    def text(self, name: str) -> str | None:
        """A string attribute."""
        return cast("str | None", self.attrs[name])

    def declared(self, name: str) -> TensorMeta | None:
        """The declared meta of an output; None when null or inferred (see `is_null_output`)."""
        return self.outputs.get(name)

    def is_null_output(self, name: str) -> bool:
        """Whether an output was declared as a null pointer."""
        return name in self.outputs and self.outputs[name] is None

    def with_inputs(self, **metas: TensorMeta | None) -> CallMeta:
        """A copy with other inputs."""
        return replace(self, inputs={**self.inputs, **metas})

    def with_attrs(self, **attrs: AttrValue) -> CallMeta:
        """A copy with other attributes."""
        return replace(self, attrs={**self.attrs, **attrs})

    def with_outputs(self, **metas: TensorMeta | None) -> CallMeta:
        """A copy with other declared outputs."""
        return replace(self, outputs={**self.outputs, **metas})
