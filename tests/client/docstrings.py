"""The docstrings of public names and their examples, which run against a real server.

Names are looked up in the sources, so that a package can be read whose dependencies are not installed.
Examples may use what their package exports, the array library under its usual name, an open `client`, and
`call`: the arguments of a legal call of the operator they name.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import doctest
import importlib
import io
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from inspect import cleandoc, isawaitable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np

import npugrad_client as _client
from npugrad import OPERATORS
from npugrad._tools.api_pages import all_of, definition, statements_of
from npugrad_client import AsyncClient, Client

PACKAGES = {
    "npugrad_client": ("Client", "AsyncClient"),
    "npugrad_client.torch": (),
    "npugrad_client.jax": (),
}
"""Packages whose public names have an example each, and their classes of which the methods have one, too."""

IMPORTED = {
    "npugrad_client": {"np": "numpy"},
    "npugrad_client.torch": {"torch": "torch"},
    "npugrad_client.jax": {"jax": "jax", "jnp": "jax.numpy"},
}
"""What examples have imported, by its usual name."""

ROOT = Path(__file__).parents[2]
TARGET = "localhost:50051"
"""Where the server of every example listens."""
TIMEOUT_S = 60
_PARSER, _CHECKER = doctest.DocTestParser(), doctest.OutputChecker()
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


# ------------------------------------------------------------------------------- what the sources define


@dataclass(frozen=True)
class Documented:
    """A definition and its docstring, with where it stands in the sources."""

    module: str
    node: ast.AST
    doc: str

    @property
    def examples(self) -> list[doctest.Example]:
        return _PARSER.get_examples(cleandoc(self.doc).partition("Example:\n")[2])


def find(module: str, name: str) -> Documented:
    """A name that a module defines, or imports from another one of the project's."""
    return Documented(*definition(module, name))


def methods(found: Documented) -> Iterator[tuple[str, Documented]]:
    """Public methods and properties of a class, those of its bases included."""
    assert isinstance(found.node, ast.ClassDef)
    for base in found.node.bases:
        name = ast.unparse(base)
        if not hasattr(builtins, name) and name not in ("ABC", "Protocol") and "[" not in name:
            yield from methods(find(found.module, name))
    for node in found.node.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
            continue
        if "overload" not in map(ast.unparse, node.decorator_list):
            yield node.name, Documented(found.module, node, ast.get_docstring(node) or "")


@cache
def documented(package: str) -> dict[str, Documented]:
    """Everything of a package that must have an example, by its name."""
    module = ast.Module(statements_of(package), [])
    found = {package: Documented(package, module, ast.get_docstring(module) or "")}
    for name in all_of(package):
        if name.endswith("Result"):
            continue  # which the example of its operator's method shows
        found[name] = find(package, name)
    for owner in PACKAGES[package]:
        found.update((f"{owner}.{name}", method) for name, method in methods(found[owner]))
    return found


def elsewhere() -> dict[str, Documented]:
    """Docstrings with an example that no package has to have, by module and name."""
    known = {found.doc for package in PACKAGES for found in documented(package).values()}
    found = {}
    for path in (*ROOT.glob("client/npugrad_client/**/*.py"), *ROOT.glob("protos/npugrad/**/*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts[1:]).removesuffix(".__init__")
        if "_pb2" in module or "_tools" in module or ">>>" not in path.read_text("utf-8"):
            continue
        for node in ast.walk(ast.Module(statements_of(module), [])):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                doc = ast.get_docstring(node) or ""
                if ">>>" in doc and doc not in known:
                    found[f"{module}.{node.name}"] = Documented(module, node, doc)
    return found


# ------------------------------------------------------------------------------------ running an example


def compiled(source: str) -> CodeType:
    """What is typed at a prompt, where `await` needs no function around it."""
    code = compile(source, "<example>", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    assert isinstance(code, CodeType)
    return code


def come_true(
    found: Documented, package: str, address: str, client: Any = None, *, compare: bool = True
) -> None:
    """Runs the examples of a docstring as `doctest` would, and on an event loop.

    Args:
        found: The docstring.
        package: The package whose public names the examples use.
        address: The server's, which stands in for `TARGET`.
        client: Another `client` than an open one of that server.
        compare: Whether what is printed must be what is written.
    """
    asyncio.run(asyncio.wait_for(_come_true(found, package, address, client, compare), TIMEOUT_S))


async def _come_true(found: Documented, package: str, address: str, client: Any, compare: bool) -> None:
    source = "".join(example.source for example in found.examples)
    names = {**vars(importlib.import_module(found.module)), **given(package, source)}
    with Client(address, timeout_s=TIMEOUT_S) as plain:
        async with AsyncClient(address, timeout_s=TIMEOUT_S) as asynchronous:
            names["client"] = client or (asynchronous if "await " in source else plain)
            for example in found.examples:
                await _run(example, address, names, compare)


def given(package: str, source: str) -> dict[str, Any]:
    """What an example has without a line of its own."""
    record = next(
        (each for each in OPERATORS.values() if each.name in source), OPERATORS["group_norm_backward"]
    )
    meta = record.build()
    operands = record.make_inputs(meta, np.random.default_rng(0))
    exported = importlib.import_module(package)
    return {
        **{each: getattr(home, each) for home in (_client, exported) for each in home.__all__},
        **{short: importlib.import_module(module) for short, module in IMPORTED[package].items()},
        **{"__builtins__": builtins, "__name__": "__main__"},
        "call": {**operands, **meta.attrs},
    }


async def _run(example: doctest.Example, address: str, names: dict[str, Any], compare: bool) -> None:
    printed, raised = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(printed):
            result = FunctionType(compiled(example.source.replace(TARGET, address)), names)()
            if isawaitable(result):
                await result
    except Exception as error:
        if example.exc_msg is None:
            raise
        raised = traceback.format_exception_only(type(error), error)[-1]
    wanted = (example.exc_msg or example.want).replace(TARGET, address)
    found = raised or printed.getvalue()
    if compare:
        assert _CHECKER.check_output(wanted, found, _FLAGS), f"{example.source}{found}not {wanted}"
