"""What the vendor's pages say, release by release, without their prose; `make facts` writes the files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from npugrad import DType, Product
from npugrad.dtypes import dtype_from_name
from npugrad.products import product_from_name

RELEASES = ("8.5.0", "9.0.0", "9.1.0", "9.2.0-beta.1", "9.2.0-beta.2")
"""In order. The file of 9.1.0 has all backward operators, the others those that the service has."""


@dataclass(frozen=True)
class ParameterFacts:
    """A parameter of the first phase; `type` is ``"tensor"`` or a kind of attribute, `values` its modes."""

    c_name: str
    type: str
    output: bool
    optional: bool
    dtypes: Mapping[Product, tuple[DType, ...]]
    ranks: tuple[int, int] | None
    formats: tuple[str, ...]
    values: tuple[int, ...]


@dataclass(frozen=True)
class Facts:
    """A page: where it stands, and what it says; `codes` counts the rows of each return code."""

    name: str
    repository: str
    path: str
    commit: str
    sha256: str
    products: tuple[Product, ...]
    prototype: str
    params: tuple[ParameterFacts, ...]
    codes: Mapping[int, int]
    constraints: int
    determinism: str | None

    @property
    def c_types(self) -> tuple[str, ...]:
        """Types in the prototype, such as ``aclTensor*``, without const."""
        return tuple(part.removeprefix("const ").split()[0] for part in self.prototype.split(", "))


def _parameter(read: dict[str, Any]) -> ParameterFacts:
    dtypes = {
        product_from_name(name): tuple(map(dtype_from_name, names)) for name, names in read["dtypes"].items()
    }
    ranks = read["ranks"] and tuple(read["ranks"])
    lists = {name: tuple(read[name]) for name in ("formats", "values")}
    return ParameterFacts(**{**read, **lists, "dtypes": dtypes, "ranks": ranks})


def _facts(read: dict[str, Any]) -> Facts:
    changed = {
        "products": tuple(map(product_from_name, read["products"])),
        "params": tuple(map(_parameter, read["params"])),
        "codes": {int(code): rows for code, rows in read["codes"].items()},
    }
    return Facts(**{**read, **changed})


@cache
def load(release: str) -> Mapping[str, Facts]:
    """Pages of a release by the function's name, such as ``"aclnnSiluBackward"``."""
    lines = Path(__file__).with_name(f"{release}.jsonl").read_text("utf-8").splitlines()
    return {facts.name: facts for facts in map(_facts, map(json.loads, lines))}
