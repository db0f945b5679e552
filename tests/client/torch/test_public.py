"""The public list of the PyTorch adapter, and the examples of its names."""

from __future__ import annotations

import doctest
import importlib
import inspect
from typing import Any

import pytest

pytest.importorskip("torch")

import npugrad_client.torch as adapter

pytestmark = pytest.mark.torch

DOCUMENTED = [name for name in adapter.__all__ if callable(getattr(adapter, name))]


def test_the_public_list_is_what_the_package_shows() -> None:
    shown = {
        name
        for name, value in vars(adapter).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert shown == set(adapter.__all__)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_public_name_has_an_example_in_its_docstring(name: str) -> None:
    doc = inspect.getdoc(getattr(adapter, name)) or ""
    assert "\nExample:\n    >>> " in doc


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples_are_python_and_come_out_as_written(name: str) -> None:
    """One that needs a service is marked to be skipped, and is read only."""
    value: Any = getattr(adapter, name)
    (found,) = doctest.DocTestFinder(recurse=False).find(value, name, globs=dict(vars(_home(value))))
    assert found.examples
    for example in found.examples:
        compile(example.source, name, "exec")
    assert not doctest.DocTestRunner().run(found).failed


def _home(value: Any) -> Any:
    return importlib.import_module(value.__module__)
