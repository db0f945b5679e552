"""What can be seen once only, in a new process: memory of a call, and how long it takes to be ready.

Run as ``python -m tests.benchmarks.fresh '{"do": "memory", "subject": "module:class", "case": {...}}'`` or
``'{"do": "start", "case": {...}}'``; one line of JSON is the answer.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def memory(subject: str, case: dict[str, Any]) -> dict[str, float]:
    """The peak of resident memory over what was there with the operands: {"extra_bytes"}.

    The peak is that of all that a caller has to do, in torch the forward pass that keeps what the backward
    pass needs. Libraries are loaded before.
    """
    from tests.benchmarks.operands import made
    from tests.benchmarks.resident import restart_peak, status_bytes

    module, _, name = subject.partition(":")
    contestant = getattr(importlib.import_module(module), name)()
    call, operands = made(case)
    # What was freed while making the operands goes back, or the call would find it there.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = restart_peak()
    contestant.on(case, call, operands)()
    return {"extra_bytes": status_bytes("VmHWM") - before}


def start(case: dict[str, Any]) -> dict[str, float]:
    """Seconds that the kernels add to a process that has NumPy and the contract: {"import_s", "first_s"}.

    `import_s`: importing the loader. `first_s`: loading the library, starting threads, and the first call.
    """
    from tests.benchmarks.operands import empty_outputs, made

    from npugrad.ops import get_operator

    call, operands = made(case)
    outputs, record = empty_outputs(case, call), get_operator(case["operator"])
    np.ones(1).sum()
    began = time.perf_counter()
    loader = importlib.import_module("npugrad_server.backends.cpu.kernels")
    imported = time.perf_counter()
    kernels = loader.Kernels(2)
    kernels.run(record, operands, call.attrs, outputs)
    done = time.perf_counter()
    kernels.close()
    return {"import_s": imported - began, "first_s": done - imported}


_DO: dict[str, Callable[..., dict[str, float]]] = {"memory": memory, "start": start}


def main() -> None:
    """Answers the question on the command line."""
    question = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps(_DO[question.pop("do")](**question)) + "\n")


if __name__ == "__main__":
    main()
