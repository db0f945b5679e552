"""What a process sees that lives with a fault, as JSON: `python -m tests.cann_sim.observations NAME`.

In processes of their own, because some hang, die, or leave a device that nothing can be done with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from ctypes import byref, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.cann_sim.build import Installation, written_here
from tests.cann_sim.operators import Arguments, Launch, check, make_arrays
from tests.cann_sim.rig import Rig, launch_generated
from tests.cann_sim.runtime import DETERMINISTIC, CannError, Runtime

from npugrad.dtypes import DType
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS, get_operator

Observation = Callable[[Runtime], Any]

OBSERVATIONS: dict[str, Observation] = {}


def observation(function: Observation) -> Observation:
    """Registers an observation under its name."""
    OBSERVATIONS[function.__name__] = function
    return function


@observation
def malloc_statuses(runtime: Runtime) -> list[int]:
    """Six allocations, freed at once."""
    codes = []
    for _ in range(6):
        address = c_void_p()
        codes.append(runtime.status("aclrtMalloc", byref(address), 64, 0))
        if not codes[-1]:
            runtime.call("aclrtFree", address)
    return codes


@observation
def launch_statuses(runtime: Runtime) -> list[tuple[str, int]]:
    """Three launches and waits: which function failed, and how."""
    seen: list[tuple[str, int]] = []
    stream = runtime.stream()
    for _ in range(3):
        rig = None
        try:
            rig = Rig(runtime)
            rig.launch(stream)
            runtime.call("aclrtSynchronizeStreamWithTimeout", stream, 4000)
            seen.append(("", 0))
        except CannError as error:
            seen.append((error.function, error.code))
            if error.function.startswith("aclrtSync"):
                break  # work may still run, or the context takes no more
        if rig:
            rig.close()
    return seen


@observation
def generated_status(runtime: Runtime) -> list[Any]:
    """A launch of a generated operator: code and text of the wait for it."""
    stream = runtime.stream()
    launch_generated(runtime, [runtime.malloc(64) for _ in range(3)], stream)
    code = runtime.status("aclrtSynchronizeStream", stream)
    return [code, runtime.message()]


def _complaint(runtime: Runtime, record: OpRecord, call: CallMeta) -> str:
    """What is wrong with a call made by a record; the device is as new afterwards."""
    try:
        check(runtime, record, call, make_arrays(record, call))
    except (AssertionError, CannError) as error:
        return str(error)
    finally:
        runtime.message()
        runtime.call("aclrtResetDevice", 0)
        runtime.call("aclrtSetDevice", 0)
    return ""


@observation
def wrong_records(runtime: Runtime) -> dict[str, list[str]]:
    """What is found by records of generated operators: two parameters swapped, a type too many."""
    found = {}
    for record in OPERATORS.values():
        if record.aclnn_name not in written_here():
            first, second, *others = record.params
            swapped = replace(record, params=(second, first, *others))
            wide = record.build(dtype=DType.FLOAT64)
            calls = (swapped, record.build(**record.workloads.uneven)), (record, wide)
            found[record.name] = [_complaint(runtime, *each) for each in calls]
    return found


@observation
def second_device_statuses(runtime: Runtime) -> list[int]:
    """Setting device 0, then 1, three times."""
    return [runtime.status("aclrtSetDevice", device) for device in (0, 1) * 3]


@observation
def soc_and_operators(runtime: Runtime) -> list[Any]:
    """Name of the chip, version, and which operators there are."""
    return [
        runtime.soc_name(),
        runtime.version(),
        [n for n, record in OPERATORS.items() if runtime.has(record.aclnn_name)],
    ]


@observation
def results_of_two_launches(runtime: Runtime) -> bool:
    """Whether the same launch gives the same bits twice."""
    stream, rig = runtime.stream(), Rig(runtime)
    sizes = {"gradInput": 512, "gradBetaOut": 64}
    found = []
    for _ in range(2):
        rig.launch(stream)
        runtime.call("aclrtSynchronizeStream", stream)
        found.append([runtime.download(rig.addresses[name], size) for name, size in sizes.items()])
    return found[0] == found[1]


SMALL_BYTES = 2**20
REPEATED = {
    name: record.workloads.named["small"].sizes
    for name, record in OPERATORS.items()
    if sum(meta.nbytes for meta in record.build().inputs.values() if meta is not None) < SMALL_BYTES
}
"""Calls with something to sum, by operator; Floyd attention, which is large, is looked at by itself."""
REPEATS = 8


def _differing(runtime: Runtime, name: str, repeats: int, **sizes: Any) -> int:
    """How many repetitions of a launch have other bits than the first one."""
    record = get_operator(name)
    call, stream = record.build(**sizes), runtime.stream()
    arrays = make_arrays(record, call)
    found = [
        [array.tobytes() for array in Launch(runtime, record, call, arrays).run(stream).values()]
        for _ in range(1 + repeats)
    ]
    return sum(results != found[0] for results in found[1:])


def _by_option(runtime: Runtime, options: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
    """Repetitions of each operator that differ, for each setting of both options, context and process."""
    found: dict[str, list[int]] = {name: [] for name in REPEATED}
    for of_context, of_process in options:
        runtime.call("aclrtCtxSetSysParamOpt", DETERMINISTIC, of_context)
        runtime.call("aclrtSetSysParamOpt", DETERMINISTIC, of_process)
        for name, sizes in REPEATED.items():
            found[name].append(_differing(runtime, name, REPEATS, **sizes))
    return found


@observation
def option_off_first(runtime: Runtime) -> dict[str, list[int]]:
    """Off, on for the context alone, on for both, off again."""
    return _by_option(runtime, ((0, 0), (1, 0), (1, 1), (0, 0)))


@observation
def option_on_first(runtime: Runtime) -> dict[str, list[int]]:
    """On, then off."""
    return _by_option(runtime, ((1, 1), (0, 0)))


@observation
def floyd_with_the_option(runtime: Runtime) -> int:
    """Repetitions of Floyd attention that differ with the option on."""
    runtime.call("aclrtCtxSetSysParamOpt", DETERMINISTIC, 1)
    runtime.call("aclrtSetSysParamOpt", DETERMINISTIC, 1)
    return _differing(runtime, "fused_floyd_attention_grad", 1)


@observation
def gradients_over_ones(runtime: Runtime) -> bool:
    """Whether MSDA's gradients are the same over zeros and over ones."""
    record = get_operator("multi_scale_deformable_attention_grad")
    call = record.build()
    stream = runtime.stream()
    found = []
    for fill in (0, 1):
        launch = Launch(runtime, record, call, make_arrays(record, call), fill=fill)
        found.append(launch.run(stream)["grad_value"].tobytes())
    return found[0] == found[1]


@observation
def workspace_bytes(runtime: Runtime) -> int:
    """What phase 1 of GroupNorm asks for."""
    record = get_operator("group_norm_backward")
    arguments = Arguments(runtime, record, record.build(), runtime.malloc(64))
    with arguments.handles:
        return runtime.plan(record.aclnn_name, *arguments.values())[0]


@observation
def null_tensor(runtime: Runtime) -> str:
    """What comes of aclCreateTensor."""
    try:
        return str(runtime.tensor(0, (4,), runtime.malloc(64)))
    except CannError as error:
        return error.function


@observation
def error_after_a_failed_plan(runtime: Runtime) -> list[Any]:
    """Code, last error and text of a phase 1 that fails."""
    try:
        Rig(runtime).plan()
    except CannError as error:
        return [error.code, runtime.status("aclrtPeekAtLastError", 0), str(error)]
    return []


@observation
def plans_as_told(runtime: Runtime) -> list[int]:
    """Statuses of an allocation each time a line comes in: for plans that change under the process."""
    found = []
    for _ in sys.stdin:
        found.append(runtime.status("aclrtSetDevice", 0))
        print(found[-1], flush=True)
    return found


@observation
def sudden_end(runtime: Runtime) -> None:
    """A process that leaves by os._exit, as a worker with a sick device does."""
    runtime.malloc(64)
    os._exit(7)


@observation
def killed(runtime: Runtime) -> None:
    """A process that is killed with a tensor alive."""
    runtime.tensor(0, (4,), runtime.malloc(64))
    os.kill(os.getpid(), signal.SIGKILL)


def start() -> Runtime:
    """The simulator of the environment, initialised."""
    runtime = Runtime(Installation(Path(os.environ["ASCEND_HOME_PATH"])))
    runtime.call("aclInit", None)
    return runtime


def main(name: str) -> None:
    """Makes one observation and prints it."""
    runtime = start()
    code = runtime.status("aclrtSetDevice", 0)
    if code:
        print(json.dumps({"start": code}))
    else:
        print(json.dumps(OBSERVATIONS[name](runtime)))


if __name__ == "__main__":
    main(sys.argv[1])
