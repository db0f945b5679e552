"""A client of the shared server, and seeds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.fix_server import ServerProcess

from npugrad_client import Client


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[Client]:
    """A client of the server on cpu:0."""
    with Client(server.address, timeout_s=60) as opened:
        yield opened


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Draw the same values whatever the order of the tests."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(7)


@pytest.fixture
def default_dtype() -> Iterator[Any]:
    """`torch.set_default_dtype`, undone after the test."""
    torch = pytest.importorskip("torch")
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)
