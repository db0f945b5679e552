"""Limits that no linter checks: the length of files and functions, one definition per public class name.

All lines of a file count; those of a function count from the first line after its docstring, because what is
above documents its parameters, of which a command has many. Generated files are exempt. Tests may be longer,
and may each have a helper of the same name.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    Function = ast.FunctionDef | ast.AsyncFunctionDef

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("protos/npugrad", "server/npugrad_server", "client/npugrad_client")


class Limit(NamedTuple):
    """Maximum number of lines of a file, and of a function in it."""

    file: int
    function: int


SHIPPED, TESTS = Limit(400, 40), Limit(600, 60)
GENERATED = ("_pb2.py", "_pb2_grpc.py", "_generated_ops.py")

EXCEPTIONS = {
    "protos/npugrad/errors.py": "every error class of the contract, each with its example",
    "protos/npugrad/signature.py:_read": "the path of each call; a frame for each part would cost more",
    "server/npugrad_server/acceptance/rig.py": "all that a step may do with a device",
    "server/npugrad_server/cli.py:acceptance": "turns options into settings, one by one",
    "server/npugrad_server/config.py": "every setting with its documentation, from which tables are made",
    "server/npugrad_server/logs.py:configure": "one list of processors in their order",
    "server/npugrad_server/metrics.py:Metrics._make_pool_counters": "a table of metrics",
}
"""Why a file, or a function given with its classes, may be longer."""


def python_files(root: Path, folders: tuple[str, ...]) -> Iterator[Path]:
    """Our own Python files under some folders of a checkout."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            if not path.name.endswith(GENERATED):
                yield path


def too_long(root: Path, path: Path, limit: Limit) -> Iterator[tuple[str, str]]:
    """The parts of a file that exceed the limit: name as in `EXCEPTIONS`, and what was found."""
    text, name = path.read_text(), path.relative_to(root).as_posix()
    lines = text.count("\n")
    if lines > limit.file:
        yield name, f"found {lines} lines; expected at most {limit.file}"
    for function, node in _functions(ast.parse(text)):
        documented = ast.get_docstring(node) is not None and len(node.body) > 1
        first = node.body[documented]
        lines = (node.end_lineno or first.lineno) - first.lineno + 1
        if lines > limit.function:
            yield f"{name}:{function}", f"found {lines} lines of code; expected at most {limit.function}"


def _functions(scope: ast.AST, around: str = "") -> Iterator[tuple[str, Function]]:
    """Every function in a module, class or function, with the names that lead to it."""
    # Statements only: most of a tree are expressions, and no function is in one.
    fields = ("body", "orelse", "finalbody", "handlers", "cases")
    for node in chain.from_iterable(getattr(scope, field, ()) for field in fields):
        inside = around
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            inside = f"{around}.{node.name}" if around else node.name
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield inside, node
        yield from _functions(node, inside)


def defined_twice(root: Path, folders: tuple[str, ...] = PACKAGES) -> Iterator[tuple[str, str]]:
    """Public class names that are defined more than once."""
    classes, places = set(), defaultdict(list)
    for path in python_files(root, folders):
        for node in _top_level(ast.parse(path.read_text()).body):
            for name in _names(node):
                places[name].append(f"{path.relative_to(root).as_posix()}:{node.lineno}")
                if isinstance(node, ast.ClassDef):
                    classes.add(name)
    for name in sorted(classes):
        if len(places[name]) > 1:
            yield name, f"found {len(places[name])} definitions; expected 1: {', '.join(places[name])}"


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, including those that only type checkers see."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _top_level(node.body)
        else:
            yield node


def _names(node: ast.stmt) -> list[str]:
    """Public names that a class or an alias of a type defines."""
    if isinstance(node, ast.ClassDef):
        names = [node.name]
    elif isinstance(node, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        names = [node.target.id]
    else:
        names = []
    return [name for name in names if name[0].isupper() and not name.isupper()]


def problems(root: Path = ROOT, exceptions: dict[str, str] | None = None) -> list[str]:
    """Every violation, and every unneeded exception."""
    allowed = EXCEPTIONS if exceptions is None else exceptions
    long: dict[str, str] = {}
    for folders, limit in ((PACKAGES, SHIPPED), (("tests",), TESTS)):
        for path in python_files(root, folders):
            long.update(too_long(root, path, limit))
    found = [f"{name}: {what}" for name, what in long.items() if name not in allowed]
    found += [f"{name}: an exception that nothing needs" for name in allowed if name not in long]
    return found + [f"{name}: {what}" for name, what in defined_twice(root)]


if __name__ == "__main__":
    sys.exit("\n".join(problems()) or 0)
