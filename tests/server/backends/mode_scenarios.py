"""Deterministic modes, each in a process of its own, as JSON: as `npu_scenarios`."""

from __future__ import annotations

import sys
import time
from functools import partial

import numpy as np
import pytest
from tests.operators import GRID_SAMPLER, GROUP_NORM
from tests.server.backends.npu_scenarios import NORM, Rig, in_threads, main, scenario

from npugrad.call import CallOptions
from npugrad.errors import OperatorError
from npugrad.products import Product
from npugrad_server.acl.libraries import Cann, Functions, Missing
from npugrad_server.acl.symbols import RUNTIME
from npugrad_server.backends.base import DeviceCall, DeviceUnusable
from npugrad_server.backends.npu import NpuBackend
from npugrad_server.devices import parse_device


@scenario
def without_process_option() -> list[str]:
    """Why nothing is deterministic where the process has no option, and what a device named with it says."""

    class Lacking(Cann):
        def __init__(self) -> None:
            super().__init__()
            symbol = next(symbol for symbol in RUNTIME if symbol.name == "aclrtSetSysParamOpt")
            bound = {**self.runtime.by_name, symbol.name: Missing(symbol, ["libascendcl.so"])}
            self.runtime = Functions(bound)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("npugrad_server.backends.npu.backend.Cann", Lacking)
        rig = Rig()
        with pytest.raises(OperatorError, match="reads the option of the process"):
            rig.run(GROUP_NORM, NORM, options=CallOptions(deterministic=True))
        rig.run(GROUP_NORM, NORM)
        with pytest.raises(DeviceUnusable) as caught:
            NpuBackend().open(parse_device("npu:0?deterministic=1"), Product.ATLAS_A2, 1)
    return [rig.backend.no_determinism, str(caught.value)]


@scenario
def eight_streams() -> dict[str, int]:
    """Eight callers of both modes, each on its stream: how many results have not the bits of one stream."""
    rig = Rig(streams=8)
    calls = [(GROUP_NORM, NORM), (GRID_SAMPLER, GRID_SAMPLER.build(n=1, c=4, h=4, w=4, oh=8, ow=8))]
    made = [record.make_inputs(meta, np.random.default_rng(3)) for record, meta in calls]

    def bits(which: int, stream: int, deterministic: bool) -> bytes:
        record, meta = calls[which]
        found = {name: wanted for name, wanted in record.infer(meta).items() if wanted is not None}
        outputs = {name: np.zeros(wanted.shape, wanted.dtype.numpy) for name, wanted in found.items()}
        options, until = CallOptions(deterministic), time.monotonic() + 60
        rig.backend.run(record, DeviceCall(meta, made[which], outputs, options, stream, until))
        return b"".join(output.tobytes() for output in outputs.values())

    alone = [bits(which, 0, True) for which in range(len(calls))]
    others: dict[bool, list[bool]] = {True: [], False: []}

    def caller(stream: int) -> None:
        for turn in range(12):
            which, deterministic = turn % len(calls), (stream + turn // 2) % 2 == 0
            others[deterministic].append(bits(which, stream, deterministic) != alone[which])

    in_threads(*(partial(caller, stream) for stream in range(8)))
    return {
        "deterministic": len(others[True]),
        "without it": len(others[False]),
        "other bits with the option": sum(others[True]),
        "other bits without it": sum(others[False]),
    }


if __name__ == "__main__":
    main(sys.argv[1])
