"""Writes the pages of the Python API for `make docs`: one for each public name, in a copy of `docs`.

They are not committed: each is no more than a title and an entry that mkdocstrings fills from the docstrings.
Needs only the standard library, as the environment of the documentation has none of the packages.
"""

from __future__ import annotations

import ast
import shutil
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TARGET = ROOT / "build/docs"
PACKAGES = (ROOT / "client", ROOT / "protos")
MODULES = {
    "client": "npugrad_client",
    "errors": "npugrad_client.errors",
    "torch": "npugrad_client.torch",
    "jax": "npugrad_client.jax",
}
"""The modules with a public API, by the name of their folder and of their table in `reference/api.md`."""
OPERATORS = sorted(path.stem for path in (ROOT / "docs/reference/operators").glob("*.md"))
_OF_CLIENT = f"""\
    options:
      inherited_members: true
      summary: true
      filters: ["!^_", "!^({"|".join(OPERATORS)})$"]

## Operators

Each operator is a method, with a page of its own:

""" + "\n".join(f"- [`{name}`](../../operators/{name}.md)" for name in OPERATORS)
_AFTER = {"Client": _OF_CLIENT, "AsyncClient": _OF_CLIENT.replace("a method", "a coroutine")}
"""What follows the entry of a name."""


@cache
def statements(path: Path) -> list[ast.stmt]:
    """The statements of a module, with what it imports for type checkers, or on demand."""
    parsed = ast.parse(path.read_text("utf-8")).body
    return [each for node in parsed for each in (node.body if _is_for_types(node) else [node])]  # type: ignore[attr-defined]


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def statements_of(module: str) -> list[ast.stmt]:
    """Those of a module of ours, which is not imported: JAX may be missing."""
    paths = [package.joinpath(*module.split(".")) for package in PACKAGES]
    found = [path / "__init__.py" for path in paths] + [path.with_suffix(".py") for path in paths]
    return statements(next(path for path in found if path.exists()))


def all_of(module: str) -> list[str]:
    """The `__all__` of a module."""
    for node in statements_of(module):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{module}: found no __all__")


def public_names(module: str) -> list[str]:
    """The public names of a module, `Client` first; exceptions only in their own module."""
    names = all_of(module)
    if not module.endswith(".errors"):
        names = [name for name in names if name not in all_of(MODULES["errors"])]
    return sorted(names, key=lambda name: name != "Client")


def definition(module: str, name: str) -> tuple[str, ast.stmt, str]:
    """Where a name that a module defines or imports is defined: module, statement and docstring."""
    body = statements_of(module)
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ImportFrom):
            for imported in node.names:
                if name == (imported.asname or imported.name):
                    return definition(str(node.module), imported.name)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return module, node, ast.get_docstring(node) or ""
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if name in (ast.unparse(target) for target in targets if target is not None):
            below = ast.Module([after] if after else [], [])
            return module, node, ast.get_docstring(below) or ""
    raise LookupError(f"{module}.{name}: found no definition")


def _summary(module: str, name: str) -> str:
    """The first sentence of a docstring."""
    return " ".join(definition(module, name)[2].partition("\n\n")[0].split())


def table(module: str) -> str:
    """What there is, in a table: each name, a link to its page, and what it is."""
    rows = [f"| [`{n}`][{module}.{n}] | {_summary(module, n)} |\n" for n in public_names(module)]
    return "| name | what it is |\n| --- | --- |\n" + "".join(rows)


def pages() -> dict[str, str]:
    """The text of each page by its path below `reference/api`; `zensical.toml` lists the folders.

    Names that differ in case only share a page: some file systems tell them apart, others do not.
    """
    made = {}
    for folder, module in MODULES.items():
        names = public_names(module)
        for file in dict.fromkeys(name.lower() for name in names):
            entries = [name for name in names if name.lower() == file]
            text = "".join(f"\n::: {module}.{name}\n{_AFTER.get(name, '')}" for name in entries)
            made[f"{folder}/{file}.md"] = f"---\ntitle: {', '.join(entries)}\n---\n{text}"
    return made


def main() -> None:
    """Copies the documentation and adds the pages."""
    shutil.rmtree(TARGET, ignore_errors=True)
    shutil.copytree(ROOT / "docs", TARGET)
    for name, text in pages().items():
        path = TARGET / "reference/api" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
