"""The types of an operator record: one frozen `OpSpec` describes one operator completely.

Validator, packing, documentation tables, client methods, the launcher's argument order and the test
matrix are all derived from it. A call without its data is a `CallMeta`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsIndex

from npugrad.dtypes import DType, Format, dtype_from_name, format_from_name
from npugrad.errors import MalformedTensor, Source, Violation
from npugrad.products import Product

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from npugrad.generators import Draw
    from npugrad.releases import CannRelease

    Arrays = Mapping[str, "npt.NDArray[Any] | None"]

INT64_MAX = 2**63 - 1
MAX_RANK = 32
"""Largest rank that travels: NumPy's own limit before 2.0. The operators' limits are lower."""

AttrValue = int | float | bool | tuple[bool, ...] | None


@dataclass(frozen=True)
class TensorMeta:
    """What is known of a tensor without its data.

    Example:
        >>> TensorMeta("bfloat16", (2, 3)).nbytes
        12
        >>> expanded = TensorMeta("float32", (2, 3), strides=(0, 0))
        >>> expanded.content_bytes
        4

    Attributes:
        dtype: Element type; a name is accepted and becomes a `DType`.
        shape: Size of each axis.
        format: Storage format, default ND.
        strides: Steps in elements, one for each axis; None means contiguous, row-major. 0 repeats an element.
        storage_offset: Elements of the content before the first one of the tensor.

    Raises:
        MalformedTensor: A size, stride or offset is negative, strides do not have the length of the
            shape, the rank is above 32, or the tensor or its content would exceed 2^63 - 1 bytes.
        TypeError: A size, stride or offset is not an integer.
        ValueError: There is no such dtype or format.
    """

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
        """Makes the description; see the class for arguments and errors."""
        object.__setattr__(self, "dtype", dtype_from_name(dtype))
        object.__setattr__(self, "shape", tuple(index(s) for s in shape))
        object.__setattr__(self, "format", format_from_name(format))
        object.__setattr__(self, "strides", None if strides is None else tuple(index(s) for s in strides))
        object.__setattr__(self, "storage_offset", index(storage_offset))
        self._check_layout()

    def _check_layout(self) -> None:
        if len(self.shape) > MAX_RANK:
            raise MalformedTensor(f"found rank {len(self.shape)}; expected at most {MAX_RANK}")
        if any(s < 0 for s in self.shape):
            raise MalformedTensor(f"found shape {list(self.shape)}; expected sizes of 0 or more")
        if self.storage_offset < 0:
            raise MalformedTensor(f"found storage offset {self.storage_offset}; expected 0 or more")
        if self.strides is not None:
            if len(self.strides) != len(self.shape):
                raise MalformedTensor(
                    f"found {len(self.strides)} strides, rank {len(self.shape)}; expected one for each axis"
                )
            if any(s < 0 for s in self.strides):
                raise MalformedTensor(f"found strides {list(self.strides)}; expected 0 or more")
        if max(self.nbytes, self.content_bytes) > INT64_MAX:
            raise MalformedTensor(
                f"found shape {list(self.shape)}, above 2^63 - 1 bytes; expected a size that fits int64"
            )

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor when contiguous."""
        return self.size * self.dtype.itemsize

    @property
    def contiguous_strides(self) -> tuple[int, ...]:
        """Row-major strides of the shape, in elements."""
        strides, step = [], 1
        for s in reversed(self.shape):
            strides.append(step)
            step *= max(s, 1)
        return tuple(reversed(strides))

    @property
    def element_strides(self) -> tuple[int, ...]:
        """Strides in elements, filled in where contiguous."""
        return self.contiguous_strides if self.strides is None else self.strides

    @property
    def content_bytes(self) -> int:
        """Bytes of the content on the wire: itemsize x (offset + span), span 0 when empty."""
        span = 0
        if self.size:
            span = sum((s - 1) * step for s, step in zip(self.shape, self.element_strides, strict=True)) + 1
        return self.dtype.itemsize * (self.storage_offset + span)

    @property
    def is_contiguous(self) -> bool:
        """Whether the content is the row-major tensor itself, from its first byte."""
        if self.storage_offset or self.strides is None or not self.size:
            return self.storage_offset == 0
        return all(
            s == 1 or step == expected
            for s, step, expected in zip(self.shape, self.strides, self.contiguous_strides, strict=True)
        )

    def contiguous(self) -> TensorMeta:
        """The same tensor, contiguous."""
        return TensorMeta(self.dtype, self.shape, self.format)

    def __str__(self) -> str:
        """Such as ``float32[2, 3, 4]``."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def _frozen(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(mapping))


@dataclass(frozen=True)
class CallMeta:
    """One call without its data; what constraints look at.

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

    def tensor(self, name: str) -> TensorMeta:
        """An input that a required constraint has shown to be there."""
        meta = self.inputs[name]
        if meta is None:
            raise KeyError(f"{name} is null")  # a record that forgot `requires`; the fuzz test finds it
        return meta

    def integer(self, name: str) -> int:
        """An int64 attribute."""
        value = self.attrs[name]
        if not isinstance(value, int):
            raise KeyError(f"{name} is not an integer")
        return value

    def number(self, name: str) -> float:
        """A double attribute."""
        value = self.attrs[name]
        if not isinstance(value, (int, float)):
            raise KeyError(f"{name} is not a number")
        return float(value)

    def mask(self, name: str = "output_mask") -> tuple[bool, ...] | None:
        """A bool array attribute."""
        value = self.attrs[name]
        return value if isinstance(value, tuple) else None

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


@dataclass(frozen=True)
class Finding:
    """What a violated constraint saw.

    Attributes:
        found: What the call has.
        expected: What is allowed.
    """

    found: str
    expected: str


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """One documented precondition of an operator.

    Attributes:
        id: Stable identifier, part of the interface, such as ``"group.positive"``.
        code: aclnn number when violated.
        text: The documented sentence, in English.
        sources: Where it is documented; every row of the documents is cited by some constraint.
        operands: Operands and attributes it is about.
        check: Pure; None when the constraint holds. Only called when all of `requires` hold.
        violate: Turns a legal call into one that breaks only this; None where that call cannot.
        requires: Constraints that must hold before this one is looked at; if not, it is not reported.
        vendor_code: What the vendor's own source returns there; ``"accepts"`` if it lets it pass.
        products: Products it applies to; None for all.
        alone: Evaluated first, and if violated nothing else is reported.
        pick: Where document and vendor source disagree: both sides, and the one taken.
    """

    id: str
    code: int
    text: str
    sources: tuple[Source, ...]
    operands: tuple[str, ...]
    check: Callable[[CallMeta], Finding | None]
    violate: Callable[[CallMeta], CallMeta | None]
    requires: tuple[str, ...] = ()
    vendor_code: int | Literal["accepts"]
    products: frozenset[Product] | None = None
    alone: bool = False
    pick: str = ""

    def applies(self, product: Product) -> bool:
        """Whether the constraint is one of this product."""
        return self.products is None or product in self.products

    def holds(self, call: CallMeta) -> bool:
        """Whether the call satisfies the constraint, given that all of `requires` hold."""
        return self.check(call) is None


@dataclass(frozen=True, kw_only=True)
class TensorParam:
    """One tensor parameter.

    Attributes:
        name: Name on the wire and in Python.
        c_name: Name in the C signature.
        role: Input or output.
        doc: Shape in symbols and meaning.
        dtypes: Supported types by product.
        optional: Whether null is legal for an input.
        device_view: Shape under which it is handed to the device; None for its own.
        masked_by: For an output, its index in `output_mask`; None when it is always computed.
        when_masked: What the operator wants for a masked-out output: a null pointer or an allocated tensor.
        zero_init: Whether the device memory must be zeroed before the launch.
        draw: What a recipe for an input draws, so that calls made of recipes are like real ones; None where
            only data makes sense.
    """

    name: str
    c_name: str
    role: Literal["input", "output"]
    doc: str
    dtypes: Mapping[Product, tuple[DType, ...]]
    optional: bool = False
    device_view: Callable[[TensorMeta], tuple[int, ...]] | None = None
    masked_by: int | None = None
    when_masked: Literal["null", "allocate"] = "null"
    zero_init: bool = False
    draw: Draw | None = None


@dataclass(frozen=True, kw_only=True)
class AttrParam:
    """One attribute.

    Attributes:
        name: Name on the wire and in Python.
        c_name: Name in the C signature.
        type: C type: int64_t, double, bool or aclBoolArray.
        doc: Meaning and legal values.
        choices: Names that Python accepts for the documented numbers.
    """

    name: str
    c_name: str
    type: Literal["int64", "double", "bool", "bool_array"]
    doc: str
    choices: Mapping[str, int] = field(default_factory=dict)


Param = TensorParam | AttrParam


@dataclass(frozen=True)
class NotExpressible:
    """A documented row that a call through this service cannot break.

    Attributes:
        source: The row.
        reason: Why it cannot be expressed.
    """

    source: Source
    reason: str


class Reference(Protocol):
    """The float64 NumPy implementation of an operator."""

    def __call__(
        self, inputs: Arrays, attrs: Mapping[str, Any], outputs: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        """Computes in float64 and writes every element of every array of `outputs`, rounded once.

        Args:
            inputs: Operands by name, None for null.
            attrs: Attributes by name.
            outputs: Wanted outputs by name, C-contiguous, of any float dtype.
        """


@dataclass(frozen=True)
class Sample:
    """A small legal call.

    Attributes:
        name: Short, for test identifiers.
        call: The call.
    """

    name: str
    call: CallMeta


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """One operator, completely.

    Attributes:
        name: snake_case name, as on the wire and in Python.
        aclnn_name: Official name of the aclnn function.
        summary: One sentence: what it computes.
        documents: Official names of its pages.
        params: All parameters in the order of the C signature of GetWorkspaceSize.
        products: Products that have the operator; values say where that is known from.
        constraints: Documented preconditions in the order in which they are reported inside a class.
        not_expressible: Documented rows no call of ours can break.
        output_metas: Metas of all outputs of a legal call, whatever its mask says.
        accepts_unchecked: Calls that succeed before anything else is checked.
        reference: The float64 implementation.
        build: Makes a legal call: keywords `dtype`, `product` and the operator's own sizes.
        samples: Small legal calls for a product.
        make_inputs: Plausible operand data for a call, from a random generator.
        extra_tolerance: Absolute tolerance of an output beyond the common formula, from the data.
        determinism_check: Looks at a legal call and the release of the NPU's CANN (None: unknown); why an NPU
            cannot honour the deterministic option for it, as operand, found and expected, or None.
        min_cann: Oldest CANN release with the operator.
        data_check: Looks at untrusted operand values before an NPU launch; a complaint or None.
        checked_operands: Operands whose values `data_check` reads; of others it may use only the shape.
    """

    name: str
    aclnn_name: str
    summary: str
    documents: tuple[str, ...]
    params: tuple[Param, ...]
    products: Mapping[Product, str]
    constraints: tuple[Constraint, ...]
    not_expressible: tuple[NotExpressible, ...]
    output_metas: Callable[[CallMeta], Mapping[str, TensorMeta]]
    reference: Reference
    build: Callable[..., CallMeta]
    samples: Callable[[Product], Iterator[Sample]]
    make_inputs: Callable[[CallMeta, np.random.Generator], dict[str, npt.NDArray[Any] | None]]
    extra_tolerance: Callable[[Arrays, Mapping[str, Any], str], float]
    determinism_check: Callable[[CallMeta, CannRelease | None], str | None]
    min_cann: str
    accepts_unchecked: Callable[[CallMeta], bool] = lambda call: False
    data_check: Callable[[Arrays], str | None] | None = None
    checked_operands: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[TensorParam, ...]:
        """Input parameters in order."""
        return tuple(p for p in self.params if isinstance(p, TensorParam) and p.role == "input")

    @property
    def outputs(self) -> tuple[TensorParam, ...]:
        """Output parameters in order."""
        return tuple(p for p in self.params if isinstance(p, TensorParam) and p.role == "output")

    @property
    def attrs(self) -> tuple[AttrParam, ...]:
        """Attributes in order."""
        return tuple(p for p in self.params if isinstance(p, AttrParam))

    @property
    def rpc(self) -> str:
        """Name of its unary RPC."""
        return self.aclnn_name.removeprefix("aclnn")

    def infer(self, call: CallMeta) -> Mapping[str, TensorMeta | None]:
        """Output metas of a legal call by name; None for masked-out ones."""
        if self.accepts_unchecked(call):  # its operands may be anything
            return dict.fromkeys(p.name for p in self.outputs)
        metas = self.output_metas(call)
        return {p.name: metas[p.name] if _is_wanted(p, call) else None for p in self.outputs}

    def allocated(self, call: CallMeta) -> Mapping[str, TensorMeta]:
        """Metas of the outputs that a legal call needs device memory for, by name; some may be masked out."""
        if self.accepts_unchecked(call):
            return {}
        metas = self.output_metas(call)
        return {
            p.name: metas[p.name] for p in self.outputs if p.when_masked == "allocate" or _is_wanted(p, call)
        }

    def param_index(self, name: str) -> int:
        """Position of a parameter in the C signature, as chunks name it."""
        return next(i for i, p in enumerate(self.params) if p.name == name)


def _is_wanted(output: TensorParam, call: CallMeta) -> bool:
    if output.masked_by is None:
        return True
    mask = call.mask()
    return mask is not None and mask[output.masked_by]


@dataclass(frozen=True)
class Verdict:
    """What `validate` found.

    Example:
        >>> verdict = npugrad.validate("group_norm_backward", inputs={}, attrs=attrs)  # doctest: +SKIP
        >>> verdict.status, len(verdict.violations)                                    # doctest: +SKIP
        (161001, 4)

    Attributes:
        status: aclnn status: 0 or the code the documented order gives.
        violations: Every violated constraint, the one that gives the status first.
        outputs: Inferred outputs by name when status is 0, None for masked-out ones; else empty.
    """

    status: int
    violations: tuple[Violation, ...]
    outputs: Mapping[str, TensorMeta | None]
