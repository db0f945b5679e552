"""The operator records. To add an operator, add a module here and one line below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad.errors import UnsupportedOperator
from npugrad.ops.fused_floyd_attention_grad import FUSED_FLOYD_ATTENTION_GRAD
from npugrad.ops.grid_sampler_2d_backward import GRID_SAMPLER_2D_BACKWARD
from npugrad.ops.grid_sampler_3d_backward import GRID_SAMPLER_3D_BACKWARD
from npugrad.ops.group_norm_backward import GROUP_NORM_BACKWARD
from npugrad.ops.layer_norm_backward import LAYER_NORM_BACKWARD
from npugrad.ops.multi_scale_deformable_attention_grad import MULTI_SCALE_DEFORMABLE_ATTENTION_GRAD
from npugrad.usage import instead

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.operator import OpRecord

OPERATORS: dict[str, OpRecord] = {
    record.name: record
    for record in (
        MULTI_SCALE_DEFORMABLE_ATTENTION_GRAD,
        GRID_SAMPLER_2D_BACKWARD,
        GROUP_NORM_BACKWARD,
        FUSED_FLOYD_ATTENTION_GRAD,
        LAYER_NORM_BACKWARD,
        GRID_SAMPLER_3D_BACKWARD,
    )
}
"""Every operator by name."""


def get_operator(name: str, records: Mapping[str, OpRecord] = OPERATORS) -> OpRecord:
    """The record of an operator.

    Args:
        name: Such as ``"group_norm_backward"``.
        records: The operators by name.

    Raises:
        UnsupportedOperator: Unknown operator; the message suggests one, or lists all.
    """
    if name in records:
        return records[name]
    raise UnsupportedOperator(
        f"unknown operator {name!r}; {instead(name, records)}",
        reason="UNKNOWN_OPERATOR",
        operator=name,
    )
