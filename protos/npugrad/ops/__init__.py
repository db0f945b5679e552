"""The operator records. A fifth operator is a module here and one line below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad.errors import UnsupportedOperator
from npugrad.ops.group_norm_backward import GROUP_NORM_BACKWARD

if TYPE_CHECKING:
    from npugrad.spec import OpSpec

OPERATORS: dict[str, OpSpec] = {spec.name: spec for spec in (GROUP_NORM_BACKWARD,)}
"""Every operator by name."""


def get_operator(name: str) -> OpSpec:
    """The record of an operator.

    Raises:
        UnsupportedOperator: There is no operator of this name; the message lists all.
    """
    if name in OPERATORS:
        return OPERATORS[name]
    raise UnsupportedOperator(
        f"unknown operator {name!r}; known are {', '.join(OPERATORS)}", reason="UNKNOWN_OPERATOR", operator=name
    )
