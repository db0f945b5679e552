"""A client of the shared server, and a generator of numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.fix_server import ServerProcess

from npugrad_client import Client


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    """A client of the server on cpu:0."""
    with Client(server.address, timeout_s=60) as opened:
        yield opened


@pytest.fixture
def rng() -> np.random.Generator:
    """The same numbers in every test."""
    return np.random.default_rng(5)
