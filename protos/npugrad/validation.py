"""Validator: the documented constraints a call violates, and the resulting aclnn status.

Order of codes: if the product lacks the operator, only that is reported; then come all 161001, all 161002 and
all 561002, each in the order of the record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from graphlib import TopologicalSorter
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from npugrad.attributes import KINDS
from npugrad.error_table import (
    BY_CODE,
    FIND_KERNEL_ERROR,
    INNER_NULLPTR,
    PARAM_INVALID,
    PARAM_NULLPTR,
    TILING_ERROR,
)
from npugrad.errors import (
    InvalidOperand,
    MalformedRequest,
    NullOperand,
    OperatorError,
    TilingError,
    UnsupportedOperator,
    Violation,
    WrongType,
)
from npugrad.meta import CallMeta, TensorMeta
from npugrad.ops import get_operator
from npugrad.products import Product, product_from_name
from npugrad.profiles import PROFILES, asked_release
from npugrad.releases import CannRelease
from npugrad.representation import in_lines, some
from npugrad.usage import instead, reports_usage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.attributes import AttrValue
    from npugrad.operator import AttrParam, Constraint, Finding, OpRecord

_REPORT_ORDER = (FIND_KERNEL_ERROR, INNER_NULLPTR, PARAM_NULLPTR, PARAM_INVALID, TILING_ERROR)
_CLASS_ORDER = {code: i for i, code in enumerate(_REPORT_ORDER)}


@dataclass(frozen=True, repr=False)
class Verdict:
    """Result of `validate`.

    Example:
        >>> verdict = client.validate("layer_norm_backward", inputs={}, attrs={
        ...     "normalized_shape": (4,), "output_mask": (True, True, True)})
        >>> verdict.status, len(verdict.violations)
        (161001, 4)

    Attributes:
        status: aclnn status: 0, or the code that comes first in the documented order.
        violations: All violated constraints, starting with the one that determines the status.
        outputs: Inferred outputs by name if status is 0, None for masked-out ones; else empty.
        predicted_wait_s: Seconds the server would expect such a call to wait now; None if unknown or
            validated locally. Predictions are ignored when verdicts are compared.
        predicted_run_s: Seconds it would expect for copying in, running and copying out together; None if
            unknown, as before such calls have run, or if validated locally.
    """

    status: int
    violations: tuple[Violation, ...]
    outputs: Mapping[str, TensorMeta | None]
    predicted_wait_s: float | None = field(default=None, compare=False)
    predicted_run_s: float | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """Status, the first violations, and the outputs' names."""
        violations = some([each.id for each in self.violations], 3, ".violations")
        outputs = some([*self.outputs], 6, ".outputs")
        parts = [f"violations: {violations}"] * bool(violations) + [f"outputs: {outputs}"] * bool(outputs)
        return in_lines("Verdict", [f"status {self.status}", *parts])


@reports_usage
def validate(
    operator: str,
    *,
    inputs: Mapping[str, TensorMeta | None],
    attrs: Mapping[str, Any],
    outputs: Mapping[str, TensorMeta | None] | None = None,
    product: Product | str = Product.ATLAS_A2,
    cann: str | None = None,
) -> Verdict:
    """Checks a call, without its data, against all documented constraints of its operator.

    Args:
        operator: Name such as ``"group_norm_backward"``.
        inputs: Input metas by name; missing ones are null.
        attrs: Attributes by name; modes as numbers or by their documented names.
        outputs: Declared outputs by name, None for null; missing ones are inferred.
        product: ``"atlas-training"``, ``"atlas-a2"`` or ``"atlas-a3"``.
        cann: Release of CANN whose pages decide, such as ``"9.1.0"``; None for those of the records.

    Returns:
        The status the first phase would return, all violated constraints, and the inferred outputs.

    Raises:
        UnsupportedOperator: Unknown operator.
        WrongType: The operator has no parameter of this name, or a tensor is not a `TensorMeta`.
        MalformedRequest: An attribute is missing or has the wrong type.
        WrongValue: Unknown product, or no release of CANN.
    """
    record = get_operator(operator).at(asked_release(cann))
    return validate_call(record, make_call(record, inputs, attrs, outputs, product))


def make_call(
    record: OpRecord,
    inputs: Mapping[str, TensorMeta | None],
    attrs: Mapping[str, Any],
    outputs: Mapping[str, TensorMeta | None] | None = None,
    product: Product | str = Product.ATLAS_A2,
) -> CallMeta:
    """Builds a `CallMeta`, with names and attribute types checked; errors as in `validate`."""
    _check_names(record, "input", inputs, [p.name for p in record.inputs])
    _check_names(record, "attribute", attrs, [p.name for p in record.attrs])
    _check_names(record, "output", outputs or {}, [p.name for p in record.outputs])
    _check_metas(record, {**inputs, **(outputs or {})})
    return CallMeta(
        inputs={p.name: inputs.get(p.name) for p in record.inputs},
        attrs={p.name: attribute_value(record, p, attrs) for p in record.attrs},
        outputs=outputs or {},
        product=product_from_name(product),
    )


def _check_names(record: OpRecord, kind: str, given: Mapping[str, Any], known: list[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        which = unknown[0] if len(unknown) == 1 else ""
        raise WrongType(
            f"{record.name}: unknown {kind} {', '.join(map(repr, unknown))}; {instead(which, known)}"
        )


def _check_metas(record: OpRecord, given: Mapping[str, object]) -> None:
    for name, meta in given.items():
        if meta is not None and not isinstance(meta, TensorMeta):
            raise WrongType(
                f"{record.name}: {name}: found {type(meta).__name__}; expected TensorMeta or None"
            )


def attribute_value(record: OpRecord, param: AttrParam, attrs: Mapping[str, Any]) -> AttrValue:
    """Converts one attribute to its wire type.

    Raises:
        MalformedRequest: It is missing, of the wrong type, or out of range.
        WrongType: None for an attribute that is not a pointer.
    """
    kind = KINDS[param.type]
    value = attrs.get(param.name)
    if value is None:
        if kind.is_pointer:
            return None
        if param.name not in attrs:
            raise _malformed(record, param, "nothing")
        raise WrongType(f"{record.name}: {param.name}: found None; expected {kind.expected}")
    if isinstance(value, str) and value in param.choices:
        return param.choices[value]
    try:
        return kind.convert(value)
    except (TypeError, ValueError, OverflowError):
        raise _malformed(record, param, repr(value)[:80]) from None


def _malformed(record: OpRecord, param: AttrParam, found: str) -> MalformedRequest:
    expected = KINDS[param.type].expected
    if param.choices:
        expected += " or one of " + ", ".join(map(repr, param.choices))
    return MalformedRequest(
        f"{record.name}: {param.name}: found {found}; expected {expected}",
        operator=record.name,
        operand=param.name,
    )


def validate_call(record: OpRecord, call: CallMeta) -> Verdict:
    """Checks a call against every constraint of its record; never raises for a well-formed call."""
    alone, others = _stages(record, call.product)
    violations = _violations(alone, call)
    if not violations:
        if record.accepts_unchecked(call):
            return Verdict(0, (), {p.name: None for p in record.outputs})
        violations = _violations(others, call)
    if violations:
        return Verdict(violations[0].code, violations, {})
    return Verdict(0, (), record.infer(call))


def validate_anywhere(record: OpRecord, call: CallMeta) -> Verdict:
    """The verdict by the first pages that allow a call: the record's own, then other releases'; else the own.

    A client does not know which release of CANN its server has.
    """
    own = validate_call(record, call)
    others = (record.at(CannRelease.parse(each)) for each in PROFILES if own.violations)
    verdicts = (validate_call(other, call) for other in others if other is not record)
    return next((verdict for verdict in verdicts if not verdict.violations), own)


class _Step(NamedTuple):
    """A constraint in the order of evaluation, in which each comes after those that it requires.

    Attributes:
        constraint: The constraint.
        requires: Positions of the required ones in that order.
        rank: Sort key of the report: class of codes, then the order of the record.
    """

    constraint: Constraint
    requires: tuple[int, ...]
    rank: tuple[int, int]


@lru_cache(maxsize=256)
def _stages(record: OpRecord, product: Product) -> tuple[tuple[_Step, ...], tuple[_Step, ...]]:
    """The constraints of a product: those that are evaluated alone, and the others."""
    by_id = {c.id: c for c in record.constraints}
    ranks = {c.id: (_CLASS_ORDER[c.code], i) for i, c in enumerate(record.constraints)}

    def stage(alone: bool) -> tuple[_Step, ...]:
        looked_at = [c for c in record.constraints if c.alone is alone and c.applies(product)]
        # Constraints that do not apply to the product count as satisfied.
        requires = {c.id: [name for name in c.requires if by_id[name].applies(product)] for c in looked_at}
        order = {name: i for i, name in enumerate(TopologicalSorter(requires).static_order())}
        return tuple(
            _Step(by_id[name], tuple(order[required] for required in requires[name]), ranks[name])
            for name in order
        )

    return stage(True), stage(False)


def _violations(steps: tuple[_Step, ...], call: CallMeta) -> tuple[Violation, ...]:
    holds: list[bool] = []
    broken: list[tuple[tuple[int, int], Constraint, Finding]] = []
    for constraint, requires, rank in steps:
        finding = None
        # Skipped if a constraint that it requires is violated already.
        is_checked = all(holds[i] for i in requires)
        if is_checked:
            finding = constraint.check(call)
            if finding is not None:
                broken.append((rank, constraint, finding))
        holds.append(is_checked and finding is None)
    broken.sort(key=itemgetter(0))
    return tuple(_violation(constraint, finding) for _, constraint, finding in broken)


def _violation(constraint: Constraint, finding: Finding) -> Violation:
    return Violation(
        id=constraint.id,
        code=constraint.code,
        operands=constraint.operands,
        found=finding.found,
        expected=finding.expected,
        text=constraint.text,
        sources=constraint.sources,
    )


def error_from_verdict(record: OpRecord, verdict: Verdict) -> OperatorError:
    """Creates the exception for a verdict with violations: class by code, message of the first one."""
    first = verdict.violations[0]
    more = len(verdict.violations) - 1
    message = first.message(record.name) + (
        f" (and {more} more: see error.violations or npugrad validate)" if more else ""
    )
    cls, reason = _ERROR_CLASS.get(first.code, (UnsupportedOperator, "OPERATOR_UNSUPPORTED"))
    return cls(
        message,
        code=first.code,
        reason=reason,
        constraint=first.id,
        violations=verdict.violations,
        operator=record.name,
    )


_ERROR_CLASS: dict[int, tuple[type[OperatorError], str]] = {
    PARAM_NULLPTR: (NullOperand, BY_CODE[PARAM_NULLPTR].reason),
    PARAM_INVALID: (InvalidOperand, BY_CODE[PARAM_INVALID].reason),
    TILING_ERROR: (TilingError, BY_CODE[TILING_ERROR].reason),
}
