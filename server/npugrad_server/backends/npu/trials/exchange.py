"""A trial's order and its answer: JSON and bytes in files of one folder."""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from npugrad.attributes import attrs_from_json, attrs_to_json
from npugrad.meta import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from npugrad.attributes import AttrValue

    Contents = Mapping[str, npt.NDArray[np.uint8]]

ORDER, ANSWER, LINES = "order.json", "answer.json", "lines.jsonl"
OPERANDS, RESULTS = "operands.npz", "results.npz"


@dataclass(frozen=True)
class RawCall:
    """One call with all its tensors, exactly as CANN is to get them.

    Attributes:
        operator: Name of the operator.
        attrs: Every attribute by name.
        tensors: Every operand and output by name; None is a null pointer.
    """

    operator: str
    attrs: Mapping[str, AttrValue]
    tensors: Mapping[str, TensorMeta | None]

    def to_json(self) -> dict[str, Any]:
        """The call as JSON, for an order."""
        metas = {
            name: None if meta is None else [getattr(meta, f.name) for f in fields(TensorMeta)]
            for name, meta in self.tensors.items()
        }
        return {"operator": self.operator, "attrs": attrs_to_json(self.attrs), "tensors": metas}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> RawCall:
        """Reads what `to_json` made."""
        metas = {k: None if v is None else TensorMeta(*v) for k, v in found["tensors"].items()}
        return cls(found["operator"], attrs_from_json(found["attrs"]), metas)


def part(case: int, name: str) -> str:
    """Name of the bytes of one tensor of one case."""
    return f"{case}/{name}"


def write_contents(path: Path, contents: Contents) -> None:
    """Writes named bytes, which can carry types that NumPy cannot name."""
    np.savez(path, allow_pickle=False, **dict(contents))


def read_contents(path: Path) -> dict[str, npt.NDArray[np.uint8]]:
    """Reads them; empty when there is no such file."""
    if not path.exists():
        return {}
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def run_trial(work: Callable[[Any, Path], Any]) -> NoReturn:
    """Runs a trial in this process: order in, answer out; ends the process.

    Args:
        work: Turns the order and the folder into the answer; order and answer are JSON values.
    """
    folder = Path(sys.argv[1])
    try:
        answer = work(json.loads((folder / ORDER).read_text()), folder)
        (folder / ANSWER).write_text(json.dumps(answer))
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Without exit handlers: those of torch_npu wait for a device that may be dead.
    os._exit(status)
