"""Writes the tables of the READMEs, between their marks, from the records, error table, settings and metrics.

    python protos/npugrad/_tools/gen_docs.py            writes the tables
    python protos/npugrad/_tools/gen_docs.py --check    fails when a file differs

A table stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from npugrad._tools.metrics_table import all_metrics
from npugrad.error_table import ERRORS
from npugrad.generators import GENERATORS
from npugrad.operator import AttrParam, TensorParam
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad_server.config import ENV_PREFIX, ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from npugrad.error_table import ErrorRow
    from npugrad.operator import OpRecord

ROOT = Path(__file__).resolve().parents[3]
FILES = ("README.md", "protos/README.md", "server/README.md")
_BLOCK = re.compile(r"(<!-- generated: (?P<name>\w+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def operators() -> str:
    """One line for each operator: names, products with dtypes, constraints."""
    rows = [
        (f"`{s.name}`", s.aclnn_name, *(_dtypes(s, p) for p in Product), str(len(s.constraints)), s.min_cann)
        for s in OPERATORS.values()
    ]
    return _table(
        ("operator", "aclnn function", *(str(p) for p in Product), "constraints", "CANN from"), rows
    )


def _dtypes(record: OpRecord, product: Product) -> str:
    if product not in record.products:
        return "not there"
    source = record.products[product]
    mark = "" if source in record.documents else " (*)"
    return ", ".join(record.inputs[0].dtypes[product]) + mark


def parameters() -> str:
    """The parameters of every operator in the order of the C signature."""
    parts = []
    for record in OPERATORS.values():
        rows = [(f"`{p.name}`", p.c_name, _kind(p), p.doc) for p in record.params]
        table = _table(("parameter", "in C", "kind", "meaning"), rows)
        parts.append(f"### {record.aclnn_name}\n\n{record.summary}\n\n{table}")
    return "\n" + "\n".join(parts)


def _kind(param: TensorParam | AttrParam) -> str:
    kind = param.type if isinstance(param, AttrParam) else param.role
    return f"{kind}, may be null" if param.optional else kind


def generators() -> str:
    """Every generator of recipes."""
    rows = [
        (f"`{name}`", ", ".join(f"{key} = {value:g}" for key, value in g.parameters.items()), g.doc)
        for name, g in GENERATORS.items()
    ]
    return _table(("generator", "parameters", "what it gives"), rows)


def draws() -> str:
    """What the records say of each operand: what is drawn for calls that are like real ones."""
    rows = []
    for record in OPERATORS.values():
        shown = [f"`{p.name}` {_draw(p)}" for p in record.inputs if p.draw is not None]
        rows.append((f"`{record.name}`", ", ".join(shown)))
    return _table(("operator", "operands"), rows)


def _draw(param: TensorParam) -> str:
    draw = param.draw
    if draw is None:
        return ""
    parameters = ", ".join(f"{value:g}" for value in draw.completed())
    return f"{draw.generator}({parameters})" + (f" x {draw.repeat}" if draw.repeat > 1 else "")


def errors() -> str:
    """The whole error table."""
    rows = [
        (str(e.code or ""), e.reason, _grpc_status(e), "yes" if e.retryable else "no", e.sentence)
        for e in ERRORS
    ]
    return _table(("number", "reason", "gRPC status", "retry", "meaning"), rows)


def _grpc_status(row: ErrorRow) -> str:
    if row.code is None or row.device_grpc_status == row.grpc_status:
        return row.grpc_status
    return f"{row.grpc_status}, from a device {row.device_grpc_status}"


def settings() -> str:
    """Every setting of the server."""
    rows = []
    for name, field in ServerSettings.model_fields.items():
        flag, variable = f"`--{name.replace('_', '-')}`", f"`{ENV_PREFIX}{name.upper()}`"
        rows.append((flag, variable, _default(field.default), field.description or ""))
    return _table(("flag", "environment", "default", "meaning"), rows)


def _default(value: object) -> str:
    return "" if value is None else "off" if value is False else f"`{value}`"


def metrics() -> str:
    """Every metric of the server."""
    rows = [
        (f"`{row.name}`", row.kind, ", ".join(f"`{label}`" for label in row.labels), row.meaning)
        for row in all_metrics()
    ]
    return _table(("metric", "type", "labels", "meaning"), rows)


_TABLES: dict[str, Callable[[], str]] = {
    "operators": operators,
    "parameters": parameters,
    "generators": generators,
    "draws": draws,
    "errors": errors,
    "settings": settings,
    "metrics": metrics,
}


def generate(text: str) -> str:
    """The text of a file with all its tables made anew; raises KeyError for a mark nobody knows."""
    return _BLOCK.sub(lambda match: match[1] + _TABLES[match["name"]]() + match[3], text)


def main() -> int:
    """Writes the tables, or checks them with `--check`."""
    differing = []
    for name in FILES:
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        after = generate(before)
        if after == before:
            continue
        differing.append(name)
        if "--check" not in sys.argv[1:]:
            path.write_text(after, encoding="utf-8")
    if differing and "--check" in sys.argv[1:]:
        print(f"{', '.join(differing)}: tables differ from the records; run `make gen`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
