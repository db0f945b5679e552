"""The public list of the JAX adapter, and the examples of its names."""

from __future__ import annotations

import pytest
from tests.client.docstrings import come_true, documented
from tests.client.public_names import shown

pytest.importorskip("jax", reason="jax is not installed: pip install 'npugrad[jax]'")

from tests.fix_server import ServerProcess

import npugrad_client.jax as adapter


def test_the_public_list_is_what_the_package_shows() -> None:
    assert shown(adapter) == set(adapter.__all__)


EXAMPLES = documented("npugrad_client.jax")


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_come_out_as_written(name: str, server: ServerProcess) -> None:
    come_true(EXAMPLES[name], "npugrad_client.jax", server.address)
