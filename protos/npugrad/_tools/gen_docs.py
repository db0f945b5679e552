"""Writes the generated parts of the documentation, between their marks.

    python protos/npugrad/_tools/gen_docs.py            writes them
    python protos/npugrad/_tools/gen_docs.py --check    fails when a file differs

Each is between `<!-- generated: NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from npugrad._tools.command_reference import commands
from npugrad._tools.metrics_table import all_metrics
from npugrad.error_table import ERRORS
from npugrad.generators import GENERATORS
from npugrad.operator import AttrParam, TensorParam
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad_client.cli import app as client_app
from npugrad_server.cli import app as server_app
from npugrad_server.config import ENV_PREFIX, ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from npugrad.error_table import ErrorRow
    from npugrad.operator import OpRecord

ROOT = Path(__file__).resolve().parents[3]
PAGES = ROOT / "docs"
_INHERITED = "    options:\n      inherited_members: true\n"
_ENTRY_OPTIONS = {"Client": _INHERITED, "AsyncClient": _INHERITED}
"""The operators are methods of a generated base class, which is not public."""
_BLOCK = re.compile(r"(<!-- generated: (?P<name>\w+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def operators() -> str:
    """One line for each operator: names, products with dtypes, constraints."""
    rows = [
        (
            f"[`{s.name}`](#{s.name})",
            s.aclnn_name,
            *(_dtypes(s, p) for p in Product),
            str(len(s.constraints)),
            s.min_cann,
        )
        for s in OPERATORS.values()
    ]
    return _table(
        ("operator", "aclnn function", *(str(p) for p in Product), "constraints", "CANN from"), rows
    )


def _dtypes(record: OpRecord, product: Product) -> str:
    if product not in record.products:
        return "not available"
    source = record.products[product]
    mark = "" if source in record.documents else " (*)"
    return ", ".join(record.inputs[0].dtypes[product]) + mark


def parameters() -> str:
    """A section for every operator: its parameters in the order of the C signature, and its rules."""
    parts = []
    for record in OPERATORS.values():
        rows = [(f"`{p.name}`", p.c_name, _kind(p), p.doc) for p in record.params]
        table = _table(("parameter", "in C", "kind", "meaning"), rows)
        parts.append(
            f"## {record.name}\n\n`{record.aclnn_name}`. {record.summary}\n\n{table}\n"
            f"### Rules of {record.name}\n\n{_rules(record)}"
        )
    return "\n" + "\n".join(parts)


def _rules(record: OpRecord) -> str:
    """Every rule, with a note where document and vendor source differ."""
    rows = []
    for rule in record.constraints:
        only = "" if rule.products is None else f" On {', '.join(sorted(rule.products))} only."
        pick = f" *{rule.pick}*" if rule.pick else ""
        rows.append(
            (f"`{rule.id}`", str(rule.code), rule.text + only + pick, "; ".join(map(str, rule.sources)))
        )
    return _table(("rule", "code", "what must hold", "source"), rows)


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
    """The distribution of each operand in the records, for realistic calls."""
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


def _public(module: str) -> list[str]:
    """The public names of a module of the client, without importing it: JAX may be missing."""
    path = ROOT / "client" / Path(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{module}: found no __all__")


def api(module: str) -> str:
    """The entries for mkdocstrings: each public name of a module, exceptions only in their own module."""
    errors = _public("npugrad_client.errors")
    names = [name for name in _public(module) if module.endswith(".errors") or name not in errors]
    return "\n" + "\n".join(f"::: {module}.{name}\n{_ENTRY_OPTIONS.get(name, '')}" for name in names)


PARTS: dict[str, Callable[[], str]] = {
    "operators": operators,
    "parameters": parameters,
    "generators": generators,
    "draws": draws,
    "errors": errors,
    "settings": settings,
    "metrics": metrics,
    "client_commands": partial(commands, client_app, "npugrad"),
    "server_commands": partial(commands, server_app, "npugrad-server"),
    "api_client": partial(api, "npugrad_client"),
    "api_errors": partial(api, "npugrad_client.errors"),
    "api_torch": partial(api, "npugrad_client.torch"),
    "api_jax": partial(api, "npugrad_client.jax"),
}


def generate(text: str) -> str:
    """The text of a file with all its generated parts regenerated; raises KeyError for an unknown mark."""
    return _BLOCK.sub(lambda match: match[1] + PARTS[match["name"]]() + match[3], text)


def main() -> int:
    """Writes the generated parts, or checks them with `--check`."""
    differing = []
    for path in sorted(PAGES.rglob("*.md")):
        name = path.relative_to(ROOT).as_posix()
        before = path.read_text(encoding="utf-8")
        after = generate(before)
        if after == before:
            continue
        differing.append(name)
        if "--check" not in sys.argv[1:]:
            path.write_text(after, encoding="utf-8")
    if differing and "--check" in sys.argv[1:]:
        print(f"{', '.join(differing)}: generated parts differ; run `make gen`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
