"""Writes what follows from the operator records into the protos and the list of operators.

    python protos/npugrad/_tools/gen_contract.py            writes its parts of two protos and ops/__init__.py
    python protos/npugrad/_tools/gen_contract.py --check    fails when a file differs

Each part is between `generated: NAME` and `end of NAME`. Each module of `npugrad.ops` is an operator, unless
its name begins with an underscore. Compile the protos afterwards, as `make gen` does.
"""

from __future__ import annotations

import re
import sys
import textwrap
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING

from npugrad._tools.settle import ROOT, settle
from npugrad.operator import AttrParam

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from npugrad.operator import OpRecord, Param

OPS = ROOT / "protos/npugrad/ops"
V1 = ROOT / "protos/npugrad/v1"
FIELDS = {
    "int64": "optional int64",
    "int32": "optional int32",
    "int8": "optional int32",
    "uint64": "optional uint64",
    "double": "optional double",
    "float": "optional float",
    "bool": "optional bool",
    "string": "optional string",
    "int64_array": "Int64Array",
    "float_array": "FloatArray",
    "bool_array": "BoolArray",
    "scalar": "Scalar",
}
"""The field of each kind of attribute in a request."""
_BLOCK = re.compile(r"((?://|#) generated: (?P<name>\w+)\n)(.*?)(\n *(?://|#) end of (?P=name)\n)", re.DOTALL)


def load() -> list[OpRecord]:
    """Every record, by wire number.

    Raises:
        SystemExit: Two have the same wire number.
    """
    names = (path.stem for path in OPS.glob("*.py") if path.stem[0] != "_")
    records: list[OpRecord] = [getattr(import_module(f"npugrad.ops.{name}"), name.upper()) for name in names]
    records.sort(key=lambda record: (record.wire, record.name))
    for first, second in pairwise(records):
        if first.wire == second.wire:
            raise SystemExit(
                f"gen_contract: {second.name}: found wire={second.wire}, which is {first.name}'s; expected "
                f"{records[-1].wire + 1}, the next free number"
            )
    return records


def _comment(text: str, indent: int = 2) -> Iterator[str]:
    prefix = " " * indent + "// "
    yield from textwrap.wrap(text, 110, initial_indent=prefix, subsequent_indent=prefix)


def _field(param: Param) -> tuple[str, str]:
    """What it is, and the type of its field in a request."""
    if not isinstance(param, AttrParam) and param.role == "output":
        return f"Declares the result {param.name}.", "DeclaredOutput"
    is_told = not param.optional or "None" in param.doc or "null" in param.doc
    text = param.doc if is_told else f"{param.doc} May be null."
    return text, FIELDS[param.type] if isinstance(param, AttrParam) else "Tensor"


def _message(title: str, name: str, fields: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """A message of fields, each with a comment, a type and a name, numbered from 1."""
    yield from ("", *_comment(title, 0), f"message {name} {{")
    for number, (comment, kind, field) in enumerate(fields, start=1):
        yield from (*_comment(comment), f"  {kind} {field} = {number};")
    yield "}"


def _messages(record: OpRecord) -> Iterator[str]:
    request = [(*_field(param), param.name) for param in record.params]
    options = ("Options of the call.", "CallOptions", "options")
    yield from _message(f"Operands of {record.aclnn_name}.", f"{record.rpc}Request", [options, *request])
    is_masked = any(param.masked_by is not None for param in record.outputs)
    title = f"Results of {record.aclnn_name}{'; masked-out ones are unset' * is_masked}."
    info = ("What produced the results.", "ExecutionInfo", "info")
    response = [(param.doc, "Tensor", param.name) for param in record.outputs]
    yield from _message(title, f"{record.rpc}Response", [info, *response])


def _rpc(record: OpRecord) -> Iterator[str]:
    yield from _comment(f"{record.aclnn_name}. {record.summary}")
    yield f"  rpc {record.rpc}({record.rpc}Request) returns ({record.rpc}Response);"


def _call(record: OpRecord) -> Iterator[str]:
    yield f"    // A call of {record.aclnn_name}."
    yield f"    {record.rpc}Request {record.name} = {record.wire};"


def _results(record: OpRecord) -> Iterator[str]:
    yield f"    // Results of {record.aclnn_name}."
    yield f"    {record.rpc}Response {record.name} = {record.wire};"


_BY_RECORD: dict[str, Callable[[OpRecord], Iterator[str]]] = {
    "messages": _messages,
    "rpcs": _rpc,
    "calls": _call,
    "results": _results,
    "names": lambda record: iter([f'    "{record.name}",']),
}


def _part(name: str, records: Sequence[OpRecord]) -> str:
    if name == "imports":
        modules = sorted(record.name for record in records)
        return "\n".join(f"    from npugrad.ops.{each} import {each.upper()}" for each in modules)
    return "\n".join(line for record in records for line in _BY_RECORD[name](record))


def generate(records: Sequence[OpRecord]) -> dict[Path, str]:
    """What each file is to be."""

    def filled(match: re.Match[str]) -> str:
        blank = "\n" * match[3].startswith("\n")
        return match[1] + blank + _part(match["name"], records).strip("\n") + blank + match[4]

    paths = (V1 / "operators.proto", V1 / "backward.proto", OPS / "__init__.py")
    return {path: _BLOCK.sub(filled, path.read_text("utf-8")) for path in paths}


if __name__ == "__main__":
    sys.exit(settle(generate(load())))
