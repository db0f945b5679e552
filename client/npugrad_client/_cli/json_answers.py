"""Output of `--json`. Names are those of the Python classes; keys are only ever added."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from npugrad.error_table import BLAME, BY_CODE
from npugrad.operator import AttrParam
from npugrad.ops import OPERATORS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

    from npugrad.call import ExecutionInfo
    from npugrad.error_table import ErrorRow
    from npugrad.operator import Constraint, OpRecord
    from npugrad.validation import Verdict

_BLOCK = 2**20
"""Elements of a block."""


def verdict(result: Verdict) -> dict[str, Any]:
    """What a validation found: ``status``, ``violations``, ``outputs`` and predicted seconds."""
    outputs = {
        name: None if meta is None else {"dtype": meta.dtype, "shape": list(meta.shape)}
        for name, meta in result.outputs.items()
    }
    violations = [{**asdict(v), "sources": [str(source) for source in v.sources]} for v in result.violations]
    return {
        "status": result.status,
        "violations": violations,
        "outputs": outputs,
        "predicted_wait_s": result.predicted_wait_s,
        "predicted_run_s": result.predicted_run_s,
    }


def norm(array: npt.NDArray[Any]) -> float:
    """Euclidean norm in float64, in blocks that need little memory."""
    flat = array.reshape(-1)
    blocks = (flat[start : start + _BLOCK].astype("float64") for start in range(0, flat.size, _BLOCK))
    return math.sqrt(sum(float(block @ block) for block in blocks))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def call(
    path: Path | None, arrays: dict[str, npt.NDArray[Any] | None], info: ExecutionInfo, *, with_timeline: bool
) -> dict[str, Any]:
    """Path, types, shapes and norms of the results, None for masked-out ones, and the `ExecutionInfo`.

    A norm that is not finite is None, too: JSON has no such number.
    """
    outputs = {
        name: None
        if array is None
        else {"dtype": str(array.dtype), "shape": list(array.shape), "norm": _finite(norm(array))}
        for name, array in arrays.items()
    }
    timeline = {"timeline": str(info.timeline)} if with_timeline else {}
    return {"file": path and str(path), "outputs": outputs, "info": asdict(info), **timeline}


def error(row: ErrorRow, records: Mapping[str, OpRecord] = OPERATORS) -> dict[str, Any]:
    """A row of the error table, and the constraints with its number."""
    rules = [(s, c) for s in records.values() for c in s.constraints if row.code and c.code == row.code]
    return {
        **asdict(row),
        "blame": [rule._asdict() for rule in BLAME if row.reason in rule.reasons],
        "constraints": [constraint(record, rule) for record, rule in rules],
    }


def operator(record: OpRecord) -> dict[str, Any]:
    """An operator: its names, products, parameters and constraints."""
    parameters = [
        {
            "name": param.name,
            "c_name": param.c_name,
            "role": "attribute" if isinstance(param, AttrParam) else param.role,
            "optional": param.optional,
            "doc": param.doc,
        }
        for param in record.params
    ]
    return {
        "name": record.name,
        "aclnn_name": record.aclnn_name,
        "summary": record.summary,
        "min_cann": record.min_cann,
        "cann": record.release,
        "notes": dict(record.notes),
        "products": {product.value: source for product, source in record.products.items()},
        "parameters": parameters,
        "constraints": [constraint(record, each) for each in record.constraints],
        "not_expressible": [{"source": str(n.source), "reason": n.reason} for n in record.not_expressible],
    }


def constraint(record: OpRecord, rule: Constraint) -> dict[str, Any]:
    """One documented rule and its sources; ``vendor_code`` is a number, ``accepts`` or ``varies``."""
    return {
        "operator": record.name,
        "id": rule.id,
        "code": rule.code,
        "reason": BY_CODE[rule.code].reason,
        "text": rule.text,
        "operands": list(rule.operands),
        "sources": [str(source) for source in rule.sources],
        "requires": list(rule.requires),
        "products": None if rule.products is None else sorted(p.value for p in rule.products),
        "vendor_code": rule.vendor_words,
        "both_sides": rule.pick,
    }
