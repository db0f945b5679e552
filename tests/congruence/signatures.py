"""The C signatures of phase 1, as the official documents print them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tests.pages import load

from npugrad import OPERATORS


@dataclass(frozen=True)
class CParameter:
    """One parameter."""

    name: str
    type: str


def _parameter(text: str) -> CParameter:
    kind, name = re.fullmatch(r"(?:const )?(\w+\**) (\w+)", text).groups()  # type: ignore[union-attr]
    return CParameter(name, kind)


SIGNATURES: Mapping[str, tuple[CParameter, ...]] = {
    name: tuple(map(_parameter, page.prototype.split(", ")))
    for name, page in load("9.1.0").items()
    if name in {record.aclnn_name for record in OPERATORS.values()}
}
"""Parameters of each operator in C order, without workspaceSize and executor, which all have."""
