"""Words that the glossary has replaced: `make lint` finds them in prose and in names.

`docs/glossary.md` lists them once, under "Replaced words", each with where it is rejected:

- `everywhere`: in Markdown pages (code aside), in public docstrings, and as a part of a name.
- `names`: as a part of a name only, since it is an ordinary word elsewhere.

Names are the classes, functions, parameters, variables, attributes and modules that are defined in `NAMED`.
"""

from __future__ import annotations

import ast
import re
import sys
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
GLOSSARY = "docs/glossary.md"
HEADING = "## Replaced words\n"
PAGES = ("*.md", "*/README.md", "docs/**/*.md")
DOCUMENTED = ("protos/npugrad", "server/npugrad_server", "client/npugrad_client")
NAMED = "server/npugrad_server/pool"
GENERATED = ("_pb2.py", "_pb2_grpc.py")

CODE = re.compile(r"^```.*?^```$|``.*?``|`[^`\n]*`|\]\([^)\n]*\)", re.MULTILINE | re.DOTALL)
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


class Replaced(NamedTuple):
    """A row of the table: a word or phrase, what replaced it, and where it is rejected."""

    word: str
    instead: str
    where: str

    def places(self, text: str) -> Iterator[int]:
        """Lines of a text, counted from 0, on which the word or phrase begins."""
        pattern = r"\b" + r"\s+".join(map(re.escape, self.word.split())) + r"\b"
        for match in re.finditer(pattern, text, re.IGNORECASE):
            yield text.count("\n", 0, match.start())


def replaced(root: Path = ROOT) -> list[Replaced]:
    """Rows of the table. Raises `ValueError` for one that says neither `everywhere` nor `names`."""
    section = (root / GLOSSARY).read_text("utf-8").partition(HEADING)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    rows = [Replaced(*(cell.strip() for cell in line.strip("| ").split(" | "))) for line in lines]
    for row in rows:
        if row.where not in ("everywhere", "names"):
            message = f"{GLOSSARY}, {row.word!r}: found {row.where!r}; expected 'everywhere' or 'names'"
            raise ValueError(message)
    return rows


def prose(root: Path) -> Iterator[tuple[str, int, str]]:
    """Path, first line and text, without code, of every page and public docstring."""
    for path in sorted({path for pattern in PAGES for path in root.glob(pattern)}):
        text = path.read_text("utf-8").partition(HEADING)[0]
        yield path.relative_to(root).as_posix(), 1, _without_code(text)
    for path in modules(root, *DOCUMENTED):
        for line, text in docstrings(ast.parse(path.read_text("utf-8"))):
            yield path.relative_to(root).as_posix(), line, _without_code(text)


def _without_code(text: str) -> str:
    """Removes code but keeps line breaks, so that lines can be counted."""
    return CODE.sub(lambda code: "\n" * code[0].count("\n"), text)


def modules(root: Path, *folders: str) -> Iterator[Path]:
    """Hand-written modules below some folders."""
    for folder in folders:
        yield from (p for p in sorted((root / folder).rglob("*.py")) if not p.name.endswith(GENERATED))


def docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """First line and text of each docstring of a module and of the public names in it, variables included."""
    if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    if not isinstance(node, ast.Module) and node.name.startswith("_"):
        return
    text = ast.get_docstring(node, clean=False)
    if text is not None:
        yield node.body[0].lineno, text
    for inner, after in zip_longest(node.body, node.body[1:]):
        yield from docstrings(inner)
        if (
            _is_public_variable(inner)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            yield after.lineno, str(after.value.value)


def _is_public_variable(node: ast.stmt) -> bool:
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return False
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return not ast.unparse(target).startswith("_")


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each name that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.lineno, node.name


def uses(root: Path) -> Iterator[tuple[str, int, Replaced]]:
    """Every use of a replaced word: path, line and the row of the table."""
    rows = replaced(root)
    for path, first, text in prose(root):
        for row in rows:
            if row.where == "everywhere":
                yield from ((path, first + line, row) for line in row.places(text))
    for module in modules(root, NAMED):
        path, tree = module.relative_to(root).as_posix(), ast.parse(module.read_text("utf-8"))
        for line, name in [(1, module.stem), *names(tree)]:
            parts = {part.lower() for part in PARTS.findall(name)}
            yield from ((path, line, row) for row in rows if row.word in parts)


def problems(root: Path = ROOT) -> list[str]:
    """A line for each use of a replaced word."""
    return [f"{path}:{line}: {row.word!r}; use {row.instead!r}" for path, line, row in uses(root)]


if __name__ == "__main__":
    sys.exit("\n".join(problems()) or 0)
