"""The operator records, loaded when they are asked for. To add one, add a module here and run `make gen`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, cast

from npugrad.errors import UnsupportedOperator
from npugrad.usage import instead

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad.operator import OpRecord

    # What is loaded by name, for whoever follows imports, such as the check of layers.
    # generated: imports
    from npugrad.ops.batch_norm_backward import BATCH_NORM_BACKWARD
    from npugrad.ops.embedding_dense_backward import EMBEDDING_DENSE_BACKWARD
    from npugrad.ops.fused_floyd_attention_grad import FUSED_FLOYD_ATTENTION_GRAD
    from npugrad.ops.gelu_backward_v2 import GELU_BACKWARD_V2
    from npugrad.ops.grid_sampler_2d_backward import GRID_SAMPLER_2D_BACKWARD
    from npugrad.ops.grid_sampler_3d_backward import GRID_SAMPLER_3D_BACKWARD
    from npugrad.ops.group_norm_backward import GROUP_NORM_BACKWARD
    from npugrad.ops.layer_norm_backward import LAYER_NORM_BACKWARD
    from npugrad.ops.multi_scale_deformable_attention_grad import MULTI_SCALE_DEFORMABLE_ATTENTION_GRAD
    from npugrad.ops.nll_loss_backward import NLL_LOSS_BACKWARD
    from npugrad.ops.silu_backward import SILU_BACKWARD
    from npugrad.ops.softmax_backward import SOFTMAX_BACKWARD
    # end of imports

_NAMES = (
    # generated: names
    "multi_scale_deformable_attention_grad",
    "grid_sampler_2d_backward",
    "group_norm_backward",
    "fused_floyd_attention_grad",
    "layer_norm_backward",
    "grid_sampler_3d_backward",
    "silu_backward",
    "gelu_backward_v2",
    "softmax_backward",
    "batch_norm_backward",
    "embedding_dense_backward",
    "nll_loss_backward",
    # end of names
)
"""Modules of this package; the record of each has its name in capitals."""


class Records(Mapping[str, "OpRecord"]):
    """Operator records by name, which are known before anything is loaded.

    Thread safety: any number of threads may ask for records.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        """Loads nothing."""
        self._names = names
        self._loaded: dict[str, OpRecord] = {}

    def __getitem__(self, name: str) -> OpRecord:
        """The record, which is loaded at the first time: some milliseconds."""
        record = self._loaded.get(name)
        if record is None:
            if name not in self._names:
                raise KeyError(name)
            module = import_module(f"npugrad.ops.{name}")
            record = self._loaded[name] = cast("OpRecord", getattr(module, name.upper()))
        return record

    def __contains__(self, name: object) -> bool:
        """Whether there is such an operator; loads nothing."""
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        """The names; loads nothing."""
        return iter(self._names)

    def __len__(self) -> int:
        """Number of operators; loads nothing."""
        return len(self._names)

    def load(self) -> None:
        """Loads every record: for programs that have an event loop or forks, before either."""
        for name in self._names:
            self[name]


OPERATORS = Records(_NAMES)
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
