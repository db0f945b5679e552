"""The examples of docstrings: every public name has one, each is Python, and the client's own come true.

Names are looked up in the sources, so that a package may be read whose dependencies are not installed.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import doctest
import io
import time
import traceback
from dataclasses import dataclass
from functools import cache
from inspect import cleandoc, isawaitable
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npugrad
import npugrad_client
from npugrad import OPERATORS
from npugrad_client import AsyncClient, Client, NpugradError, TransportError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fix_server import ServerProcess
    from tests.fix_tls import Certificates

    from npugrad import OpRecord

PACKAGES = {
    "npugrad_client": ("Client", "AsyncClient"),
    "npugrad_client.torch": (),
    "npugrad_client.jax": (),
}
"""Packages whose public names have an example each, and their classes of which the methods have one, too."""

READERS_OWN = {"build_model", "loss", "model"}
"""What examples call that is the reader's: anything else must be public, or be made in the example."""

ROOT = Path(__file__).parents[2]
TARGET = "localhost:50051"
"""Where the server of every example listens."""
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
        """What stands in its section of examples."""
        return _PARSER.get_examples(cleandoc(self.doc).partition("Example:\n")[2])


@cache
def parsed(module: str) -> ast.Module:
    for root in (ROOT / "client", ROOT / "protos"):
        path = root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
    raise LookupError(f"{module} is not one of the project's modules")


def public(package: str) -> list[str]:
    """The package's `__all__`."""
    for node in parsed(package).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{package} has no __all__")


def find(module: str, name: str) -> Documented:
    """A name that a module defines, or imports from another one of the project's."""
    body = parsed(module).body
    for place, node in enumerate(body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return Documented(module, node, ast.get_docstring(node) or "")
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find(node.module, alias.name)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and name in map(ast.unparse, _targets(node)):
            return Documented(module, node, _text(body[place + 1 : place + 2]))
    raise LookupError(f"{module} has no {name}")


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _text(body: list[ast.stmt]) -> str:
    """The string that stands below an assignment."""
    value = body[0].value if body and isinstance(body[0], ast.Expr) else None
    return str(value.value) if isinstance(value, ast.Constant) else ""


def methods(found: Documented) -> Iterator[tuple[str, Documented]]:
    """Public methods and properties of a class, those of its bases included."""
    assert isinstance(found.node, ast.ClassDef)
    for base in found.node.bases:
        name = ast.unparse(base)
        if name not in ("ABC", "Exception", "ValueError", "Protocol") and "[" not in name:
            yield from methods(find(found.module, name))
    for node in found.node.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
            continue
        if "overload" not in map(ast.unparse, node.decorator_list):
            yield node.name, Documented(found.module, node, ast.get_docstring(node) or "")


def documented(package: str) -> dict[str, Documented]:
    """Everything of a package that must have an example, by its name."""
    found = {package: Documented(package, parsed(package), ast.get_docstring(parsed(package)) or "")}
    for name in public(package):
        found[name] = find(package, name)
    for owner in PACKAGES[package]:
        found.update((f"{owner}.{name}", method) for name, method in methods(found[owner]))
    return found


NAMES = [(package, name) for package in PACKAGES for name in documented(package)]
PUBLIC = pytest.mark.parametrize(("package", "name"), NAMES, ids=[name for _, name in NAMES])


# ------------------------------------------------------------------------------------ every one, anywhere


@PUBLIC
def test_every_public_name_has_an_example(package: str, name: str) -> None:
    assert documented(package)[name].examples, f"{package}: {name} is public and has no section 'Example:'"


@PUBLIC
def test_an_example_is_python_and_calls_what_there_is(package: str, name: str) -> None:
    known = {*vars(builtins), *READERS_OWN, *public("npugrad_client"), *public(package)}
    called: set[str] = set()
    for example in documented(package)[name].examples:
        compiled(example.source)
        for node in ast.walk(ast.parse(example.source)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known.add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.alias)):
                known.add(getattr(node, "asname", None) or node.name)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.add(node.func.id)
    assert called <= known, f"{package}: the example of {name} calls what is no public name"


def compiled(source: str) -> CodeType:
    """What is typed at a prompt, where `await` needs no function around it."""
    code = compile(source, "<example>", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    assert isinstance(code, CodeType)
    return code


# ----------------------------------------------------------------------------- the client's own, for real


OWN = documented("npugrad_client")
NAMED = pytest.mark.parametrize("name", OWN)


@NAMED
def test_an_example_of_the_client_comes_true(
    name: str,
    server: ServerProcess,
    certificates: Certificates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every line, those too that `doctest` alone must skip: here they have a server, and what they name."""
    key, certificate = certificates.caller()
    tmp_path.joinpath("ca.pem").write_bytes(Path(certificates.authority).read_bytes())
    tmp_path.joinpath("client.pem").write_bytes(certificate)
    tmp_path.joinpath("client.key").write_bytes(key)
    monkeypatch.chdir(tmp_path)
    with Client(server.address, timeout_s=60) as client:
        asyncio.run(asyncio.wait_for(come_true(name, server.address, client), 60))


ERRORS = [name for name in OWN if isinstance(getattr(npugrad_client, name, None), type(NpugradError))]
CAUGHT = [n for n in ERRORS if any(f"except {n}" in example.source for example in OWN[n].examples)]


@pytest.mark.parametrize("name", CAUGHT)
def test_an_example_that_catches_an_error_can_handle_it(name: str, server: ServerProcess) -> None:
    cls = getattr(npugrad_client, name)
    options: dict[str, Any] = {"retry_after_s": 0.001} if issubclass(cls, TransportError) else {}
    failing = Failing(cls("as if", operator="group_norm_backward", request_id="abc123", **options))
    asyncio.run(asyncio.wait_for(come_true(name, server.address, failing), 60))
    assert failing.calls == 1


class Failing:
    """A client of which every call fails."""

    def __init__(self, error: NpugradError) -> None:
        self._error, self.calls = error, 0

    def __getattr__(self, name: str) -> Any:
        def call(**arguments: Any) -> Any:
            self.calls += 1
            raise self._error

        return call


async def come_true(name: str, address: str, client: Any) -> None:
    """Runs the examples of a name as `doctest` would, and on an event loop."""
    examples = OWN[name].examples
    source = "".join(example.source for example in examples)
    record = next(
        (record for record in OPERATORS.values() if record.name in source), OPERATORS["group_norm_backward"]
    )
    async with AsyncClient(address, timeout_s=60) as asynchronous:
        with Client(address, timeout_s=60) as other:
            names = {
                **given(record),
                "client": asynchronous if name.startswith("AsyncClient.") else client,
                "other": other,
            }
            for example in examples:
                await run(example, address, names)


def given(record: OpRecord) -> dict[str, Any]:
    """What examples take as given: a call of an operator and its parts, and public names."""
    meta = record.build()
    operands = record.make_inputs(meta, np.random.default_rng(0))
    call = {**operands, **meta.attrs}
    verdict = npugrad.validate(record.name, inputs={}, attrs=meta.attrs)
    return {
        **{name: getattr(npugrad_client, name) for name in npugrad_client.__all__},
        **{"__builtins__": builtins, "asyncio": asyncio, "npugrad": npugrad, "time": time},
        **{"x": operands.get("input"), "weight": operands.get("gamma")},
        **operands,
        **{"call": call, "calls": [call] * 3, "attrs": meta.attrs, "verdict": verdict},
        "gradients": [operands[record.inputs[0].name]] * 3,
    }


async def run(example: doctest.Example, address: str, names: dict[str, Any]) -> None:
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
    is_silent = doctest.SKIP in example.options and not wanted  # shows what differs from run to run
    assert is_silent or _CHECKER.check_output(wanted, found, _FLAGS), f"{example.source}{found}not {wanted}"
