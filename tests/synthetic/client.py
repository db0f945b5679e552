"""Clients of the synthetic operator, with methods made as `make gen` makes the others."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from tests.synthetic.record import REGISTRY

from npugrad._tools.gen_client import generate
from npugrad_client import AsyncClient, Client

SOURCE = generate(REGISTRY.records, "from tests.synthetic.record import RECORDS as OPERATORS")


def _loaded(name: str) -> Any:
    module = sys.modules[name] = ModuleType(name)  # where dataclasses look for it
    exec(compile(SOURCE, name, "exec"), module.__dict__)
    return module


GENERATED = _loaded("tests.synthetic.generated_ops")
"""The module: classes `Operators`, `AsyncOperators`, `FutureOperators` and `SyntheticResult`."""
_METHODS: Any = GENERATED.Operators
_COROUTINES: Any = GENERATED.AsyncOperators


class _Client(Client, _METHODS):  # type: ignore[misc]
    """A client that knows the synthetic operator, and none of the contract's."""

    _registry = REGISTRY


class _AsyncClient(AsyncClient, _COROUTINES):  # type: ignore[misc]
    """The same with coroutines."""

    _registry = REGISTRY


SyntheticClient: Any = _Client
AsyncSyntheticClient: Any = _AsyncClient
