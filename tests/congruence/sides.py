"""Runs every combination of an operator on one side: `python -m tests.congruence.sides SIDE OPERATOR`.

Side `service` is the backend as a worker drives it, side `torch_npu` the compiled binding of the unmodified
wheel. Operands are the same bytes on both. One JSON object a line tells, for each combination, which records
of phase 1 are its own, what went wrong, and a digest of each result.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.cann_sim.operators import make_arrays
from tests.cann_sim.report import Report
from tests.congruence.combinations import COMBINED, Combination, combinations

from npugrad.call import CallOptions
from npugrad.meta import TensorMeta
from npugrad.operator import OpRecord
from npugrad.ops import get_operator
from npugrad.products import Product

Array = npt.NDArray[Any]
Results = Mapping[str, bytes]
Side = Callable[[OpRecord, Combination, Mapping[str, Array | None]], Results]

_PATIENCE_S = 60.0


def service() -> Side:
    """The backend of the service, its device open."""
    from npugrad_server.backends.base import DeviceCall
    from npugrad_server.backends.npu.backend import NpuBackend
    from npugrad_server.devices import DeviceName

    backend = NpuBackend()
    backend.open(DeviceName("npu", 0), Product.ATLAS_A2, 1)

    def run(record: OpRecord, case: Combination, arrays: Mapping[str, Array | None]) -> Results:
        metas = {name: meta for name, meta in record.infer(case.call).items() if meta is not None}
        outputs = {name: np.zeros(meta.shape, meta.dtype.numpy) for name, meta in metas.items()}
        options = CallOptions(deterministic=case.deterministic)
        give_up_s = time.monotonic() + _PATIENCE_S
        backend.run(record, DeviceCall(case.call, arrays, outputs, options, 0, give_up_s))
        return {name: output.tobytes() for name, output in outputs.items()}

    return run


def torch_npu() -> Side:
    """The bindings of torch_npu."""
    import torch
    import torch_npu  # noqa: F401  registers the device

    npu: Any = torch.npu  # type: ignore[attr-defined]

    def put(array: Array | None, meta: TensorMeta | None) -> Any:
        """The content as it is, under the strides it has: nothing is computed on the device."""
        if array is None or meta is None:
            return None
        dtype = getattr(torch, str(meta.dtype))
        content = bytearray(_content(array))[: meta.content_bytes]
        host = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        there = torch.empty(host.shape, dtype=dtype, device="npu")
        there.copy_(host)
        return torch.as_strided(there, meta.shape, meta.element_strides, meta.storage_offset)

    def fetch(tensor: Any) -> bytes:
        return bytes(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())

    def run(record: OpRecord, case: Combination, arrays: Mapping[str, Array | None]) -> Results:
        operands = {name: put(array, case.call.inputs[name]) for name, array in arrays.items()}
        torch.use_deterministic_algorithms(case.deterministic)
        found = BINDINGS[record.name].call(torch.ops, {**operands, **case.call.attrs})
        torch.use_deterministic_algorithms(False)
        npu.synchronize()
        wanted = record.infer(case.call)
        results = zip((param.name for param in record.outputs), found, strict=True)
        return {name: fetch(tensor) for name, tensor in results if wanted[name] is not None}

    return run


def _content(array: Array) -> bytes:
    """What an array is a view of, gaps and what lies before its first element included."""
    assert isinstance(array.base, np.ndarray)
    return array.base.tobytes()


BINDINGS = {name: binding for name in COMBINED if (binding := get_operator(name).binding) is not None}
"""Operators that torch_npu binds, of those with combinations."""
SIDES: Mapping[str, Callable[[], Side]] = {"service": service, "torch_npu": torch_npu}


def main(side: str, operator: str) -> None:
    """Runs all combinations and prints a line for each."""
    run, record = SIDES[side](), get_operator(operator)
    for seed, case in enumerate(combinations(operator)):
        first, error, digests = _plans(record), "", {}
        try:
            with np.errstate(all="ignore"):  # some scales are there for how they travel
                arrays = make_arrays(record, case.call, seed)
            results = run(record, case, arrays)
            digests = {name: hashlib.sha256(result).hexdigest() for name, result in results.items()}
        except RuntimeError as raised:
            error = str(raised)
        answer = {"name": case.name, "plans": [first, _plans(record)], "error": error, "digests": digests}
        print(json.dumps(answer), flush=True)


def _plans(record: OpRecord) -> int:
    """How often phase 1 of the operator has succeeded in this process."""
    report = Report(Path(os.environ["CANN_SIM_REPORT_DIR"]))
    return report.counters(os.getpid())[f"plans.{record.aclnn_name}"]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    os._exit(0)
