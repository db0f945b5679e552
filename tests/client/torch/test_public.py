"""The public list of the PyTorch adapter, and the examples of its names."""

from __future__ import annotations

import pytest
from tests.client.public_names import documented, failed_examples, shown

pytest.importorskip("torch")

import npugrad_client.torch as adapter

pytestmark = pytest.mark.torch


def test_the_public_list_is_what_the_package_shows() -> None:
    assert shown(adapter) == set(adapter.__all__)


@pytest.mark.parametrize("name", documented(adapter))
def test_examples_come_out_as_written(name: str) -> None:
    assert not failed_examples(adapter, name)
