"""The examples of docstrings: every public name has one, each is Python, and the client's own come true."""

from __future__ import annotations

import ast
import builtins
from pathlib import Path
from typing import Any

import pytest
from tests.client.docstrings import PACKAGES, come_true, compiled, documented, elsewhere
from tests.fix_server import ServerProcess
from tests.fix_tls import Certificates

import npugrad_client
from npugrad._tools.api_pages import all_of
from npugrad_client import NpugradError, TransportError


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_example_and_none_is_skipped(package: str) -> None:
    for name, found in documented(package).items():
        assert found.examples, f"{package}: {name} is public and has no section 'Example:'"
        assert "# doctest:" not in found.doc, f"{package}: {name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_an_example_is_python_and_calls_what_there_is(package: str) -> None:
    for name, found in documented(package).items():
        known = {*vars(builtins), *all_of("npugrad_client"), *all_of(package)}
        called: set[str] = set()
        for example in found.examples:
            compiled(example.source)
            for node in ast.walk(ast.parse(example.source)):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    known.add(node.id)
                elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.alias)):
                    known.add(getattr(node, "asname", None) or node.name)
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    called.add(node.func.id)
        assert called <= known, f"{package}: the example of {name} calls what is no public name"


OWN = documented("npugrad_client")


@pytest.mark.parametrize("name", OWN)
def test_an_example_of_the_client_comes_true(
    name: str,
    server: ServerProcess,
    certificates: Certificates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key, certificate = certificates.caller()
    tmp_path.joinpath("ca.pem").write_bytes(Path(certificates.authority).read_bytes())
    tmp_path.joinpath("client.pem").write_bytes(certificate)
    tmp_path.joinpath("client.key").write_bytes(key)
    monkeypatch.chdir(tmp_path)
    come_true(OWN[name], "npugrad_client", server.address)


OTHERS = elsewhere()


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_example_comes_true(name: str, server: ServerProcess) -> None:
    assert OTHERS[name].examples, f"{name}: its example stands in no section 'Example:'"
    come_true(OTHERS[name], "npugrad_client", server.address)


ERRORS = [name for name in OWN if isinstance(getattr(npugrad_client, name, None), type(NpugradError))]
CAUGHT = [n for n in ERRORS if any(f"except {n}" in example.source for example in OWN[n].examples)]


def test_an_example_that_catches_an_error_can_handle_it(server: ServerProcess) -> None:
    assert CAUGHT
    for name in CAUGHT:
        cls = getattr(npugrad_client, name)
        options: dict[str, Any] = {"retry_after_s": 0.001} if issubclass(cls, TransportError) else {}
        failing = Failing(cls("as if", operator="group_norm_backward", request_id="abc123", **options))
        come_true(OWN[name], "npugrad_client", server.address, failing, compare=False)
        assert failing.calls == 1, name


class Failing:
    """A client of which every call fails."""

    def __init__(self, error: NpugradError) -> None:
        self._error, self.calls = error, 0

    def __getattr__(self, name: str) -> Any:
        def call(**arguments: Any) -> Any:
            self.calls += 1
            raise self._error

        return call
