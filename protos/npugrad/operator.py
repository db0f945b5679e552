"""Operator records: one frozen `OpRecord` describes one operator completely.

Validator, packing, documentation tables, client methods, the launcher's argument order and the test
matrix are all derived from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from npugrad.profiles import profile_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    from npugrad.attributes import AttrType
    from npugrad.binding import TorchBinding
    from npugrad.coordinates import CoordinateRule
    from npugrad.dtypes import DType
    from npugrad.errors import Source
    from npugrad.generators import Draw
    from npugrad.meta import CallMeta, TensorMeta
    from npugrad.products import Product
    from npugrad.releases import CannRelease
    from npugrad.sampled import SampledCall
    from npugrad.workloads import Workloads

    Arrays = Mapping[str, "npt.NDArray[Any] | None"]
    VendorCode = int | Literal["accepts"]


@dataclass(frozen=True)
class Finding:
    """Details of a violated constraint.

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
        code: aclnn code of a call that violates it.
        text: The documented sentence, in English.
        sources: Where it is documented; every row of the documents is cited by some constraint.
        operands: Operands and attributes it concerns.
        check: Pure function; returns None if the constraint holds. Only called if all of `requires` hold.
        violate: Turns a legal call into one that violates only this constraint; None if that is impossible.
        requires: Constraints that must hold for this one to be evaluated and reported.
        vendor_code: Code that the vendor's source returns for a violation, ``"accepts"`` if none; or a
            function of a call that violates only this constraint, if it depends on the call.
        products: Products it applies to; None for all.
        alone: Whether it is evaluated first and, if violated, reported alone.
        pick: If document and vendor source disagree: what each says, and which is followed.
    """

    id: str
    code: int
    text: str
    sources: tuple[Source, ...]
    operands: tuple[str, ...]
    check: Callable[[CallMeta], Finding | None]
    violate: Callable[[CallMeta], CallMeta | None]
    requires: tuple[str, ...] = ()
    vendor_code: VendorCode | Callable[[CallMeta], VendorCode]
    products: frozenset[Product] | None = None
    alone: bool = False
    pick: str = ""

    def applies(self, product: Product) -> bool:
        """Whether the constraint applies to a product."""
        return self.products is None or product in self.products

    def vendor_status(self, call: CallMeta) -> int:
        """Status of the vendor's first phase for a call that violates only this; 0 if it accepts it."""
        code = self.vendor_code(call) if callable(self.vendor_code) else self.vendor_code
        return 0 if code == "accepts" else code

    @property
    def vendor_words(self) -> str:
        """`vendor_code` on the wire: a number, ``"accepts"``, or ``"varies"`` if it depends on the call."""
        return "varies" if callable(self.vendor_code) else str(self.vendor_code)

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
        like: For an output, the input that it is the gradient of, or has the shape of.
        uncarried: Types that the operator's page has and the service never carries, such as complex64: legal,
            but refused with CONTENT_UNSUPPORTED where a call has them.
        optional: Whether null is legal for an input.
        device_view: Shape in which it is passed to the device; None for its own.
        axes: Order of its axes in the formula, as backends and the reference receive them; None if the
            storage format cannot change it.
        masked_by: For an output, its index in `output_mask`; None if it is always computed.
        when_masked: What the operator expects for a masked-out output: a null pointer or an allocated tensor.
        zero_init: Whether the device memory must be zeroed before the launch.
        draw: Distribution for recipes of an input, to make calls realistic; None if only actual data makes
            sense.
    """

    name: str
    c_name: str
    role: Literal["input", "output"]
    doc: str
    dtypes: Mapping[Product, tuple[DType, ...]]
    like: str = ""
    uncarried: tuple[DType, ...] = ()
    optional: bool = False
    device_view: Callable[[TensorMeta], tuple[int, ...]] | None = None
    axes: Callable[[TensorMeta], tuple[int, ...]] | None = None
    masked_by: int | None = None
    when_masked: Literal["null", "allocate"] = "null"
    zero_init: bool = False
    draw: Draw | None = None

    def ordered(self, meta: TensorMeta) -> TensorMeta:
        """The same elements with the axes in the order of the formula."""
        return meta if self.axes is None else meta.permuted(self.axes(meta))


@dataclass(frozen=True, kw_only=True)
class AttrParam:
    """One attribute.

    Attributes:
        name: Name on the wire and in Python.
        c_name: Name in the C signature.
        type: Its kind, one of `attributes.KINDS`; the pointers among them may be null unless a constraint
            says otherwise.
        doc: Meaning and legal values.
        choices: Names accepted in Python in place of the documented numbers.
        optional: Whether callers may omit it (null); for pointers only.
    """

    name: str
    c_name: str
    type: AttrType
    doc: str
    choices: Mapping[str, int] = field(default_factory=dict)
    optional: bool = False


Param = TensorParam | AttrParam


@dataclass(frozen=True)
class NotExpressible:
    """A documented row that a call through this service cannot violate.

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


@dataclass(frozen=True, kw_only=True, eq=False)
class OpRecord:
    """One operator, completely; equal only to itself, so that it can be a key.

    Attributes:
        name: snake_case name, as on the wire and in Python.
        wire: Its number in the headers of streamed calls and replies, which never changes.
        aclnn_name: Official name of the aclnn function.
        summary: What it computes, in one sentence.
        documents: Official names of its pages.
        repositories: The vendor's public repositories whose source is cited.
        params: All parameters in the order of the C signature of GetWorkspaceSize.
        products: Products that have the operator, with the source of that fact.
        constraints: Documented preconditions in reporting order within a code.
        not_expressible: Documented rows that no call through this service can violate.
        output_metas: Metas of all outputs of a legal call, regardless of its mask.
        accepts_unchecked: Whether a call succeeds before anything is checked.
        reads: For each output, operands whose values its formula reads in the modes of a legal call,
            regardless of the mask; `reaches` is the inverse.
        reference: The float64 implementation, after `data_check`; it follows the first coordinate rule of
            `references_by_rule`.
        build: Builds a legal call from keywords `dtype`, `product` and the operator's sizes.
        samples: Small legal calls for a product.
        workloads: Named sizes, including those of real models, and other parameters of calls.
        make_inputs: Plausible operand data for a call, from a random generator.
        extra_tolerance: Additional absolute tolerance of an output, computed from the data.
        determinism_check: From a legal call and the NPU's CANN release (None: unknown), why an NPU cannot
            honour the deterministic option for it, as operand, found and expected; None if it can.
        min_cann: Oldest CANN release with the operator.
        data_check: From operands and attributes, raises the error of `unsafe` for values that would lead it
            outside its tensors.
        binding: torch_npu's binding of the operator; None if no version has one.
        references_by_rule: The reference under each coordinate rule, the service's own first; empty for
            operators without coordinates.
        sampled: The sampling points of a call, from its operands and attributes; None for operators whose
            results do not jump at pixel edges.
        checked_operands: Operands whose values `data_check` reads; of the others it may use only the shape.
        unsafe: Reason of what `data_check` raises.
        release: Release of CANN whose pages it is written from; empty if older than all with public pages.
        notes: What those pages say otherwise without a consequence here, by attribute of their facts.
        profiles: Makes the record of another release with public pages.
    """

    name: str
    wire: int
    aclnn_name: str
    summary: str
    documents: tuple[str, ...]
    repositories: tuple[str, ...]
    params: tuple[Param, ...]
    products: Mapping[Product, str]
    constraints: tuple[Constraint, ...]
    not_expressible: tuple[NotExpressible, ...]
    output_metas: Callable[[CallMeta], Mapping[str, TensorMeta]]
    reads: Callable[[CallMeta], Mapping[str, tuple[str, ...]]]
    reference: Reference
    build: Callable[..., CallMeta]
    samples: Callable[[Product], Iterator[Sample]]
    workloads: Workloads
    make_inputs: Callable[[CallMeta, np.random.Generator], dict[str, npt.NDArray[Any] | None]]
    extra_tolerance: Callable[[Arrays, Mapping[str, Any], str], float]
    determinism_check: Callable[[CallMeta, CannRelease | None], str | None]
    min_cann: str
    accepts_unchecked: Callable[[CallMeta], bool] = lambda call: False
    data_check: Callable[[Arrays, Mapping[str, Any]], None] = lambda inputs, attrs: None
    binding: TorchBinding | None = None
    references_by_rule: Mapping[CoordinateRule, Reference] = field(
        default_factory=lambda: MappingProxyType({})
    )
    sampled: Callable[[Arrays, Mapping[str, Any]], SampledCall] | None = None
    checked_operands: tuple[str, ...] = ()
    unsafe: str = "UNSAFE_LEVELS"
    release: str = ""
    notes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    profiles: Callable[[str], OpRecord] | None = None

    def at(self, release: CannRelease | None) -> OpRecord:
        """The record by the pages of a release of CANN; None for the pages that it is written from."""
        chosen = self.release if release is None else profile_of(release)[0]
        return self if chosen == self.release or self.profiles is None else self.profiles(chosen)

    @cached_property
    def inputs(self) -> tuple[TensorParam, ...]:
        """Input parameters in order."""
        return tuple(p for p in self.params if isinstance(p, TensorParam) and p.role == "input")

    @cached_property
    def outputs(self) -> tuple[TensorParam, ...]:
        """Output parameters in order."""
        return tuple(p for p in self.params if isinstance(p, TensorParam) and p.role == "output")

    @cached_property
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

    def ordered(self, call: CallMeta) -> CallMeta:
        """The call with the axes of its operands in the order of the formula, whatever their formats."""
        named = {p.name: p for p in self.inputs if p.axes is not None}
        moved = {name: param.ordered(meta) for name, param in named.items() if (meta := call.inputs[name])}
        return call.with_inputs(**moved) if moved else call

    def reaches(self, call: CallMeta) -> Mapping[str, frozenset[str]]:
        """The wanted outputs that each operand's values can change; no bit of any other depends on them.

        An operand also reaches an output that only a NaN or an infinity in it would change. Nothing reaches
        an output without elements, or one whose formula reads an operand without elements: such a sum is 0.
        Operands that `data_check` reads reach every wanted output, because it may refuse the call.

        Args:
            call: A legal call.

        Returns:
            Names of outputs, none of them masked out, for each operand that is not null. If the call is
            accepted unchecked, no operand reaches any output.
        """
        given = {name: meta for name, meta in call.inputs.items() if meta is not None}
        wanted = {name: meta for name, meta in self.infer(call).items() if meta is not None}
        reads = self.reads(call) if wanted else {}
        changed_by: dict[str, set[str]] = {}
        for output, meta in wanted.items():
            operands = [name for name in reads[output] if name in given]
            if not meta.size or not all(given[name].size for name in operands):
                operands = []
            changed_by[output] = {*operands, *self.checked_operands}
        return {
            name: frozenset(output for output, names in changed_by.items() if meta.size and name in names)
            for name, meta in given.items()
        }

    def unused(self, call: CallMeta) -> frozenset[str]:
        """The operands whose values reach no wanted output, so that their contents cannot matter.

        Args:
            call: A legal call.

        Returns:
            Names of operands with elements: GridSampler's ``input`` if only its own gradient is wanted,
            GroupNorm's if only that of beta is; all of them if nothing is wanted.
        """
        return frozenset(
            name for name, outputs in self.reaches(call).items() if not outputs and call.tensor(name).size
        )

    def param_index(self, name: str) -> int:
        """Position of a parameter in the C signature, by which chunks identify it."""
        return next(i for i, p in enumerate(self.params) if p.name == name)


def _is_wanted(output: TensorParam, call: CallMeta) -> bool:
    if output.masked_by is None:
        return True
    mask = call.mask()
    return mask is not None and mask[output.masked_by]
