"""torch_npu's own bindings of the operators: another caller of the same functions, compiled by the vendor.

Order: ``device``, ``cases`` (operands contiguous), and ``deterministic`` for each case. Operands come from
`OPERANDS`, results go to `RESULTS`. This is the only place where torch computes on the device; it never
serves a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad import get_operator
from npugrad_server.backends.npu.bringup import NpuDevice
from npugrad_server.backends.npu.trials.exchange import (
    OPERANDS,
    RESULTS,
    RawCall,
    part,
    read_contents,
    run_trial,
    write_contents,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from npugrad.operator import OpRecord


def trial(order: Any, folder: Path) -> Any:
    """Runs every case; the answer has ``{"error": words}`` for each, empty when it ran."""
    place = f"npu:{order['device']}"
    NpuDevice(order["device"], 1)
    import torch

    # Otherwise every allocation would run a kernel that fills it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    contents, answers = read_contents(folder / OPERANDS), []
    results: dict[str, Any] = {}
    for index, (found, deterministic) in enumerate(zip(order["cases"], order["deterministic"], strict=True)):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        case = RawCall.from_json(found)
        record = get_operator(case.operator)
        given = {p.name: _to_device(torch, place, case, index, p.name, contents) for p in record.inputs}
        try:
            outputs = _bound(torch.ops, record, {**given, **case.attrs})
        except (RuntimeError, AttributeError) as error:  # refused, or an older torch_npu without it
            answers.append({"error": " ".join(str(error).split())[:500]})
            continue
        answers.append({"error": ""})
        for param, output in zip(record.outputs, outputs, strict=True):
            if case.tensors[param.name] is not None:
                host = output.cpu().contiguous().reshape(-1).view(torch.uint8)
                results[part(index, param.name)] = host.numpy().copy()
    write_contents(folder / RESULTS, results)
    return answers


def _bound(ops: Any, record: OpRecord, values: Mapping[str, Any]) -> tuple[Any, ...]:
    if record.binding is None:
        raise ValueError(f"{record.name}: found no binding; expected one in its record")
    return record.binding.call(ops, values)


def _to_device(
    torch: Any, place: str, case: RawCall, index: int, name: str, contents: Mapping[str, np.ndarray[Any, Any]]
) -> Any:
    meta = case.tensors[name]
    if meta is None:
        return None
    content = np.ascontiguousarray(contents[part(index, name)])
    host = torch.from_numpy(content).view(getattr(torch, str(meta.dtype))).reshape(meta.shape)
    there = torch.empty(meta.shape, dtype=host.dtype, device=place)
    there.copy_(host)
    return there


if __name__ == "__main__":
    run_trial(trial)
