"""The generated methods of the synthetic operator, made as `make gen` makes the others."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from tests.synthetic.record import REGISTRY

from npugrad._tools.gen_client import generate

SOURCE = generate(REGISTRY.records, "from tests.synthetic.record import RECORDS as OPERATORS")


def _loaded(name: str) -> Any:
    module = sys.modules[name] = ModuleType(name)  # where dataclasses look for it
    exec(compile(SOURCE, name, "exec"), module.__dict__)
    return module


GENERATED = _loaded("tests.synthetic.generated_ops")
"""The module: classes `Operators`, `AsyncOperators`, `FutureOperators` and `SyntheticResult`."""
