"""What the adapters of PyTorch and JAX have in common: a public list, and examples."""

from __future__ import annotations

import doctest
import importlib
import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def shown(package: ModuleType) -> set[str]:
    """The names that a reader of the package's namespace takes for public."""
    return {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }


def documented(package: ModuleType) -> list[str]:
    """The public names that have a docstring at run time."""
    return [name for name in package.__all__ if callable(getattr(package, name))]


def failed_examples(package: ModuleType, name: str) -> int:
    """Runs the examples of a name; those that need a service are marked to be skipped."""
    value = getattr(package, name)
    home = importlib.import_module(value.__module__)
    (found,) = doctest.DocTestFinder(recurse=False).find(value, name, globs=dict(vars(home)))
    assert found.examples
    return doctest.DocTestRunner().run(found).failed
