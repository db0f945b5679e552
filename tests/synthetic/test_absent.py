"""The synthetic operator belongs to the tests: nothing of it is in what is served, shipped or explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rich.console import Console
from tests.calls import TIMEOUT_S
from tests.fix_server import ServerProcess
from tests.synthetic.record import REGISTRY, SYNTHETIC
from typer.testing import CliRunner

import npugrad
from npugrad import registry
from npugrad_client import Client
from npugrad_client._cli.explain import UnknownSubject, explain
from npugrad_server.cli import app

ROOT = Path(__file__).resolve().parents[2]
NAMES = (b"aclnnSynthetic", b"npugrad.synthetic", b"SyntheticRequest")
SHIPPED = ("protos", "server", "client")


def test_it_is_no_operator_of_the_contract() -> None:
    assert SYNTHETIC.name not in npugrad.OPERATORS
    assert registry.REGISTRY.records is npugrad.OPERATORS
    with pytest.raises(npugrad.OperatorError, match="unknown operator 'synthetic'"):
        npugrad.validate("synthetic", inputs={}, attrs={})


def test_nothing_that_is_shipped_names_it() -> None:
    """The wheel holds these trees and nothing else: tests/project/test_packaging.py."""
    found = (path for folder in SHIPPED for path in (ROOT / folder).rglob("*"))
    files = [path for path in found if path.is_file() and path.parent.name != "__pycache__"]
    assert any(path.name == "baseline.binpb" for path in files)
    assert len(files) > 200
    assert [path for path in files if any(name in path.read_bytes() for name in NAMES)] == []
    assert all(name in (ROOT / "tests/synthetic/record.py").read_bytes() for name in NAMES[:2])


def test_no_command_knows_it() -> None:
    for subject in ("synthetic", "aclnnSynthetic", "count.positive"):
        with pytest.raises(UnknownSubject):
            explain(Console(quiet=True), subject)
    assert "ynthetic" not in CliRunner().invoke(app, ["ops"]).output


def test_a_server_neither_serves_nor_describes_it(server: ServerProcess) -> None:
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(
            file_containing_symbol="npugrad.synthetic.v1.SyntheticService"
        ),
        reflection_pb2.ServerReflectionRequest(file_by_filename=REGISTRY.backward.file.name),
    ]
    with server.channel() as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        services, *files = stub.ServerReflectionInfo(iter(asked), timeout=TIMEOUT_S)
    assert not any("ynthetic" in found.name for found in services.list_services_response.service)
    assert [found.WhichOneof("message_response") for found in files] == ["error_response"] * 2
    with Client(server.address, timeout_s=TIMEOUT_S) as client:
        assert "synthetic" not in client.server_info().operators
        assert "synthetic" not in [operator.name for operator in client.list_operators()]
