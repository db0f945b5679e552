"""Base class of the results of all operators: how they are displayed."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from npugrad.representation import html_table, in_lines

if TYPE_CHECKING:
    from npugrad.call import ExecutionInfo


class CallResults:
    """Base of the results of each operator: outputs, and the info of their call.

    Attributes:
        info: What produced the results and how long each stage took.
    """

    info: ExecutionInfo

    def __repr__(self) -> str:
        """Types and shapes of the outputs, without their elements, and the info in short."""
        parts = [f"{name}={_described(value)}" for name, value in self._outputs().items()]
        return in_lines(
            type(self).__name__, [*parts, f"info={self.info.device}, {self.info.run_s * 1e3:.1f} ms"]
        )

    def _repr_html_(self) -> str:
        """A table of the outputs and one of the info, for notebooks."""
        rows = [
            (name, "masked out", "", "") if value is None else (name, *_columns(value))
            for name, value in self._outputs().items()
        ]
        table = html_table(type(self).__name__, ("output", "type", "shape", "MiB"), rows)
        return f"{table}\n{self.info._repr_html_()}"

    def _outputs(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "info"}  # type: ignore[arg-type]


def _described(value: Any) -> str:
    """Such as ``float32[2,3]``."""
    return "None" if value is None else f"{_dtype(value)}[{','.join(map(str, value.shape))}]"


def _columns(value: Any) -> tuple[str, str, str]:
    return _dtype(value), " x ".join(map(str, value.shape)) or "scalar", f"{value.nbytes / 2**20:.3f}"


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")
