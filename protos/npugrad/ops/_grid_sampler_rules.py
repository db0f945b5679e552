"""The constraints that the backward operators of grid sampling share, in two and three dimensions.

Each can turn a legal call into one that violates only it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from npugrad.dtypes import DType
from npugrad.error_table import PARAM_INVALID, PARAM_NULLPTR
from npugrad.meta import TensorMeta
from npugrad.operator import Finding
from npugrad.rules import (
    axis_is,
    input_not_null,
    integer_in,
    invalid,
    output_not_null,
    rank_within,
    same_dtype,
    shape_is,
    shape_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from npugrad.errors import Source
    from npugrad.meta import CallMeta
    from npugrad.operator import Constraint
    from npugrad.rules import Citations, Violate

INTERPOLATION_MODES = {"bilinear": 0, "nearest": 1}
PADDING_MODES = {"zeros": 0, "border": 1, "reflection": 2}
C_NAMES = {
    "grad_output": "gradOutput",
    "input": "input",
    "grid": "grid",
    "interpolation_mode": "interpolationMode",
    "padding_mode": "paddingMode",
    "align_corners": "alignCorners",
    "output_mask": "outputMask",
    "input_grad": "inputGrad",
    "grid_grad": "gridGrad",
}
LIKE = {"input_grad": "input", "grid_grad": "grid"}
"""The input of which each output is the gradient, in the order of output_mask."""
BICUBIC = 2


def accepts_unchecked(call: CallMeta) -> bool:
    """Whether output_mask is null: the operator then succeeds before it checks anything else."""
    return call.mask() is None


# Functions that make a legal call illegal; see `on_checked_calls` for the calls that they get.


def _other_dtype(call: CallMeta) -> DType:
    return DType.FLOAT16 if call.tensor("input").dtype is DType.FLOAT32 else DType.FLOAT32


def _retyped(name: str) -> Violate:
    return lambda call: call.with_inputs(**{name: TensorMeta(_other_dtype(call), call.tensor(name).shape)})


def all_of(dtype: DType) -> Violate:
    """Gives every input another type."""

    def violate(call: CallMeta) -> CallMeta:
        return call.with_inputs(**{name: TensorMeta(dtype, call.tensor(name).shape) for name in call.inputs})

    return violate


def _resized(name: str, axis: int, size: int | None = None) -> Violate:
    """Sets the size of one axis of an input, or increases it by one."""

    def violate(call: CallMeta) -> CallMeta:
        meta = call.tensor(name)
        changed = list(meta.shape)
        changed[axis] = meta.shape[axis] + 1 if size is None else size
        return call.with_inputs(**{name: TensorMeta(meta.dtype, changed)})

    return violate


def _with_axis_appended(name: str) -> Violate:
    def violate(call: CallMeta) -> CallMeta:
        meta = call.tensor(name)
        return call.with_inputs(**{name: TensorMeta(meta.dtype, (*meta.shape, 1))})

    return violate


def _declared_wrong(name: str, *, dtype: bool = False, shape: bool = False) -> Violate:
    def violate(call: CallMeta) -> CallMeta:
        like = call.tensor(LIKE[name])
        declared_dtype = _other_dtype(call) if dtype else like.dtype
        declared_shape = (*like.shape, 2) if shape else like.shape
        return call.with_outputs(**{name: TensorMeta(declared_dtype, declared_shape)})

    return violate


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Creates the constraints of one operator.

    Attributes:
        cite: Creates their sources.
        sides: Names of the spatial axes, the slowest first: height, width.
        coordinates: Names of the coordinates of a point: x and y.
        rows: For each kind of rule, its row among the page's 161002 rows, None if there is none, and the
            number of the check in the vendor's source.
        positive: Further arguments of the constraints that keep spatial axes above 0.
    """

    cite: Citations
    sides: tuple[str, ...]
    coordinates: str
    rows: Mapping[str, tuple[int | None, int]]
    positive: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Rank of every operand."""
        return 2 + len(self.sides)

    def sources(self, kind: str, c_name: str) -> tuple[Source, ...]:
        """Sources of a rule about a parameter."""
        row, check = self.rows[kind]
        found = (self.cite.check(check), self.cite.parameter(c_name))
        return found if row is None else (self.cite.code(PARAM_INVALID, row), *found)

    def nulls(self) -> Iterator[Constraint]:
        """161001: no tensor is null."""
        for name in ("grad_output", "input", "grid", *LIKE):
            c_name, output = C_NAMES[name], name in LIKE
            sources = (self.cite.code(PARAM_NULLPTR), self.cite.check(3), self.cite.parameter(c_name))
            text = f"{c_name} must not be a null pointer" + (", whatever outputMask says." if output else ".")
            yield (output_not_null if output else input_not_null)(name, text, sources)

    def same_dtypes(self) -> Iterator[Constraint]:
        """All tensors have the type of input."""
        for name in ("grad_output", "grid", *LIKE):
            yield invalid(
                f"{name}.same_dtype",
                f"{C_NAMES[name]} has the data type of input.",
                self.sources("same_dtype", C_NAMES[name]),
                (name, "input"),
                same_dtype(name, "input"),
                _declared_wrong(name, dtype=True) if name in LIKE else _retyped(name),
                requires=("input.not_null", f"{name}.not_null"),
            )

    def padding(self) -> Constraint:
        """padding_mode is one of the documented ones."""
        return invalid(
            "padding_mode.choice",
            "paddingMode is 0 (zeros), 1 (border) or 2 (reflection).",
            self.sources("padding", "paddingMode"),
            ("padding_mode",),
            integer_in("padding_mode", PADDING_MODES),
            lambda call: call.with_attrs(padding_mode=3),
        )

    def shapes(self) -> Iterator[Constraint]:
        """Ranks, then axes, then the shapes of outputs."""
        for name in ("input", "grid", "grad_output"):
            yield invalid(
                f"{name}.rank",
                f"{C_NAMES[name]} has rank {self.rank}.",
                self.sources("rank", C_NAMES[name]),
                (name,),
                rank_within(name, self.rank, self.rank),
                _with_axis_appended(name),
                requires=(f"{name}.not_null",),
            )
        for name in ("grid", "grad_output"):
            yield self._axis(f"{name}.batch", (name, 0), ("input", 0))
        yield self._axis("grad_output.channels", ("grad_output", 1), ("input", 1))
        for axis, side in enumerate(self.sides, 2):
            yield self._positive(f"input.{side}", axis)
        for axis, side in enumerate(self.sides, 1):
            yield self._axis(f"grid.out_{side}", ("grid", axis), ("grad_output", axis + 1))
        last, count = self.rank - 1, len(self.sides)
        yield invalid(
            "grid.coordinates",
            f"The last axis of grid has size {count}.",
            self.sources("coordinates", "grid"),
            ("grid",),
            axis_is("grid", last, lambda call: count, self.coordinates),
            _resized("grid", last, count + 1),
            requires=("grid.rank",),
        )
        for name, like in LIKE.items():
            yield self._output_shape(name, like)

    def _axis(self, constraint_id: str, axis_of: tuple[str, int], axis_like: tuple[str, int]) -> Constraint:
        """One axis of an input is as long as one of another input, the leader."""
        (name, axis), (leader, leader_axis) = axis_of, axis_like

        def size(call: CallMeta) -> int:
            return call.tensor(leader).shape[leader_axis]

        return invalid(
            constraint_id,
            f"Axis {axis} of {C_NAMES[name]} is as long as axis {leader_axis} of {C_NAMES[leader]}.",
            self.sources(constraint_id.split(".")[1], C_NAMES[name]),
            (name, leader),
            axis_is(name, axis, size, f"as on axis {leader_axis} of {leader}"),
            _resized(name, axis),
            requires=(f"{name}.rank", f"{leader}.rank"),
        )

    def _positive(self, constraint_id: str, axis: int) -> Constraint:
        def check(call: CallMeta) -> Finding | None:
            shape = call.tensor("input").shape
            return (
                None if shape[axis] else Finding(f"0 on axis {axis} of shape {shape_text(shape)}", "above 0")
            )

        return invalid(
            constraint_id,
            f"Axis {axis} of input is not 0.",
            self.sources("positive", "input"),
            ("input",),
            check,
            _resized("input", axis, 0),
            requires=("input.rank",),
            **self.positive,
        )

    def _output_shape(self, name: str, like: str) -> Constraint:
        return invalid(
            f"{name}.shape",
            f"{C_NAMES[name]} has the shape of {like}.",
            self.sources("shape", C_NAMES[name]),
            (name, like),
            shape_is(name, lambda call: call.tensor(like).shape, f"the shape of {like}"),
            _declared_wrong(name, shape=True),
            requires=(f"{like}.not_null", f"{name}.not_null"),
        )

    def mask(self) -> Constraint:
        """output_mask has an entry for each output."""

        def check(call: CallMeta) -> Finding | None:
            mask = call.mask()
            return (
                None if mask is None or len(mask) == len(LIKE) else Finding(f"{len(mask)} bools", "two bools")
            )

        return invalid(
            "output_mask.length",
            "outputMask has size 2.",
            self.sources("mask", "outputMask"),
            ("output_mask",),
            check,
            lambda call: call.with_attrs(output_mask=(True, True, True)),
            pick="The document describes two entries and gives no code for another number; the vendor's "
            "source returns 161002, older source read past the end. npugrad: 161002.",
        )


def on_checked_calls(constraints: Iterable[Constraint]) -> tuple[Constraint, ...]:
    """Makes `violate` skip calls with a null mask, in which nothing is wrong, and drop declared outputs."""

    def only(violate: Violate) -> Violate:
        return lambda call: None if accepts_unchecked(call) else violate(replace(call, outputs={}))

    return tuple(replace(constraint, violate=only(constraint.violate)) for constraint in constraints)
