"""Simulated devices for capacity, scaling and failure tests: a timer stands for the service time.

Options of ``test:N?name=value&...``; a LABEL is compared with the label of the call:

    ms=20         take this service time, in milliseconds; 0 by default
    compute=1     return the results of the CPU backend; zeros by default
    crash=LABEL   end the worker process by SIGABRT when such a call starts
    late=LABEL    end it half a second after the start, whether or not anybody waits
    hang=LABEL    never answer such a call
    corrupt=LABEL flip one bit of its first result, the highest one of an exponent
    wrong=OPERATOR  return silently wrong results in calls of this operator, or of "any"
    how=WAY       make them wrong by scale (an eighth too large, the default), bit (one flipped) or stale
                  (not written)
    right=N       compute the process's first N calls correctly all the same, canaries included
    spares=1      compute canaries correctly, whatever the other options say
    wrong_if=PATH return wrong results only while this file exists
    rule=RULE     be right by another coordinate rule, if the operator has it
    ulps=N        be off by up to N units in the last place of float32, differently each time
    oom=LABEL     answer that the device has no memory
    bug=LABEL     fail as an operator with a bug would
    fault=LABEL   report that the device failed (507015) and exit, as an NPU's worker does
    damage=LABEL  report that the device's memory is damaged (507054) and exit
    timeout=LABEL report that the call ran too long (507046) and exit
    open=fail     refuse to open the device
    open=slowly   refuse to open the device, as if it needed time
    open=mended   refuse to open the device, as if something were missing
    open=never    refuse to open the device, as if it were damaged
    open_ms=50    take this long for each stage of opening it, in milliseconds
    stages=3      open it in this many stages; 1 by default
    children=1    start processes that outlive it: forked ones and another program
    memory=BYTES  have its own memory, and refuse calls that together exceed it
    workspace=BYTES  ask for this much workspace in each call; 0 by default
    big=LABEL     ask for twice the workspace in such a call
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from npugrad.coordinates import CoordinateRule
from npugrad.ops import OPERATORS
from npugrad.tolerance import is_exact
from npugrad_server.backends.base import Backend, DeviceLost, DeviceUnusable, RestartPolicy, Timings, unheard
from npugrad_server.backends.cpu import CpuBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad.products import Product
    from npugrad_server.backends.base import DeviceCall
    from npugrad_server.devices import DeviceName

_NUMBERS = ("ms", "open_ms", "stages", "memory", "workspace", "right", "ulps")
_LABELS = ("crash", "late", "hang", "corrupt", "oom", "bug", "fault", "damage", "timeout", "big")
_SWITCHES = ("compute", "children", "spares")
_TEXTS = ("wrong", "wrong_if", "how", "rule")
_HOW = ("scale", "bit", "stale")
_ULP = 2.0**-23
_OPEN = ("ok", "fail", "slowly", "mended", "never")
_LATE_S = 0.5
_SLICE_S = 0.01
"""Seconds between two checks whether anybody still waits."""


@dataclass(frozen=True)
class TestOptions:
    """Options of a simulated device; see the module.

    Attributes:
        service_s: Seconds a call takes.
        open_s: Seconds each stage of opening takes.
        stages: Number of stages of opening.
        compute: Whether results are computed.
        children: Whether it starts processes that live on.
        opening: How opening goes: one of ok, fail, slowly, mended, never.
        labels: By name of a failure, the label of the calls that hit it.
        memory_bytes: Its own memory; None for none.
        workspace_bytes: Workspace that a call asks for.
        spares: Whether canaries are right all the same.
        wrong: Operator whose results are wrong, or ``"any"``; empty for none.
        how: How they are wrong: scale, bit or stale.
        rule: Coordinate rule; None for the CPU backend's.
        ulps: How far right results are off, in units in the last place.
        wrong_if: File that must exist for results to be wrong; empty for none.
        right_calls: How many calls of the process are right first.
    """

    __test__ = False  # not a test class, despite its name

    service_s: float
    open_s: float
    stages: int
    compute: bool
    children: bool
    opening: str
    labels: Mapping[str, str]
    memory_bytes: int | None = None
    workspace_bytes: int = 0
    spares: bool = False
    wrong: str = ""
    wrong_if: str = ""
    right_calls: int = 0
    how: str = "scale"
    rule: CoordinateRule | None = None
    ulps: float = 0.0

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> TestOptions:
        """Reads the options.

        Raises:
            ValueError: There is no such option, or its value is not allowed.
        """
        known = (*_NUMBERS, *_LABELS, *_SWITCHES, *_TEXTS, "open")
        unknown = [name for name in options if name not in known]
        if unknown:
            raise ValueError(f"found option {unknown[0]!r} of a test device; known are {', '.join(known)}")
        switches = [options.get(name, "0") for name in _SWITCHES]
        if not {*switches} <= {"0", "1"} or options.get("open", "ok") not in _OPEN:
            raise ValueError(
                f"expected {', '.join(_SWITCHES)}=0 or 1 and open={'|'.join(_OPEN)} of a test device"
            )
        if options.get("how", "scale") not in _HOW:
            raise ValueError(f"expected how={'|'.join(_HOW)} of a test device")
        return cls(
            service_s=float(options.get("ms", "0")) / 1000,
            open_s=float(options.get("open_ms", "0")) / 1000,
            stages=int(options.get("stages", "1")),
            compute=options.get("compute") == "1",
            children=options.get("children") == "1",
            spares=options.get("spares") == "1",
            opening=options.get("open", "ok"),
            labels={name: options[name] for name in _LABELS if name in options},
            memory_bytes=int(options["memory"]) if "memory" in options else None,
            workspace_bytes=int(options.get("workspace", "0")),
            wrong=options.get("wrong", ""),
            wrong_if=options.get("wrong_if", ""),
            right_calls=int(options.get("right", "0")),
            how=options.get("how", "scale"),
            rule=CoordinateRule(options["rule"]) if "rule" in options else None,
            ulps=float(options.get("ulps", "0")),
        )

    def meets(self, failure: str, label: str) -> bool:
        """Whether a call with this label hits this failure."""
        return self.labels.get(failure) == label


class TestBackend(Backend):
    """A device that does not exist."""

    __test__ = False

    name = "test"
    simulated = True

    def __init__(self, records: Mapping[str, OpRecord] = OPERATORS) -> None:
        """Makes it; `open` reads the options."""
        self.records = records
        self.description = "simulated device"
        self._options = TestOptions.parse({})
        self._cpu = CpuBackend(records)
        self._used_bytes = self._calls = 0
        self._lock = threading.Lock()

    def open(
        self,
        device: DeviceName,
        product: Product,
        streams: int,
        on_stage: Callable[[str], None] = unheard,
    ) -> None:
        """Reads the device's options.

        Raises:
            ValueError: An option is wrong.
            RuntimeError: The options ask for a failure.
            DeviceUnusable: The options ask for it.
        """
        self._options = TestOptions.parse(device.options)
        for stage in range(1, self._options.stages + 1):
            on_stage(f"at stage {stage} of {self._options.stages}")
            time.sleep(self._options.open_s)
        if self._options.opening == "fail":
            raise RuntimeError(f"{device.name}: does not open, as its options ask")
        if self._options.opening != "ok":
            restart_policy = RestartPolicy(self._options.opening)
            raise DeviceUnusable(f"{device.name}: does not open, as its options ask", restart_policy)
        self.computes = self._options.compute
        if self.computes:
            self._cpu.open(device, product, streams)
        if self._options.children:
            _start_children()
        self.description = f"simulated device, {self._options.service_s * 1000:g} ms a call"
        self.memory_bytes = self._options.memory_bytes

    def run(self, record: OpRecord, call: DeviceCall) -> Timings:
        """Takes the service time and writes zeros, or what the options ask for.

        Raises:
            MemoryError: The options ask for it, or calls exceed the memory they give.
            RuntimeError: The options ask for it.
            CallPostponed: There is no room for the workspace now.
            CallAbandoned: The caller has gone.
            DeadlineExceeded: The deadline passed.
            DeviceLost: The options ask for it.
        """
        start = time.perf_counter()
        label, workspace_bytes = call.options.label, self._options.workspace_bytes
        if call.is_canary:
            self._compute(record, call)
            return Timings()
        if label in self._options.labels.values():
            self._fail_at_start(label)
            workspace_bytes *= 2 if self._options.meets("big", label) else 1
        if self._options.memory_bytes is None:
            if workspace_bytes:
                call.reserve_workspace(workspace_bytes)
            self._serve(record, call, start)
        else:
            self._serve_in_memory(record, call, start, workspace_bytes)
        return Timings(run_s=time.perf_counter() - start, workspace_bytes=workspace_bytes)

    def _serve_in_memory(
        self, record: OpRecord, call: DeviceCall, start: float, workspace_bytes: int
    ) -> None:
        tensors = [array for array in (*call.inputs.values(), *call.outputs.values()) if array is not None]
        with self._taken(sum(array.nbytes for array in tensors)):
            if workspace_bytes:
                call.reserve_workspace(workspace_bytes)
            with self._taken(workspace_bytes):
                self._serve(record, call, start)

    @contextmanager
    def _taken(self, nbytes: int) -> Iterator[None]:
        """Takes device memory while a block runs."""
        with self._lock:
            limit = self._options.memory_bytes
            if limit is not None and self._used_bytes + nbytes > limit:
                raise MemoryError(f"found {self._used_bytes} of {limit} bytes in use; wanted {nbytes} more")
            self._used_bytes += nbytes
        try:
            yield
        finally:
            with self._lock:
                self._used_bytes -= nbytes

    def _compute(self, record: OpRecord, call: DeviceCall) -> None:
        """Writes the results: zeros, right ones, or wrong ones."""
        if not self._options.compute:
            for output in call.outputs.values():
                output.fill(0)
            return
        with self._lock:
            self._calls += 1
            seed, is_right = self._calls, self._calls <= self._options.right_calls
        reference = record.references_by_rule.get(self._options.rule) if self._options.rule else None
        if reference is None:
            self._cpu.run(record, call)
        else:
            reference(call.inputs, call.meta.attrs, call.outputs)
        if self._options.ulps:
            noise = np.random.default_rng(seed)
            for output in call.outputs.values():
                if not is_exact(output.dtype):
                    output *= 1 + self._options.ulps * _ULP * noise.uniform(-1, 1, output.shape).astype(
                        output.dtype
                    )
        is_spared = call.is_canary and self._options.spares
        if is_right or is_spared or self._options.wrong not in ("any", record.name):
            return
        if not self._options.wrong_if or Path(self._options.wrong_if).exists():
            _spoil(call, self._options.how)

    def _serve(self, record: OpRecord, call: DeviceCall, start: float) -> None:
        self._compute(record, call)
        if self._options.labels and self._options.meets("corrupt", call.options.label):
            _flip_bit(call)
        end = start + self._options.service_s
        while (left_s := end - time.perf_counter()) > 0:
            call.check_wanted()
            time.sleep(min(left_s, _SLICE_S))

    def _fail_at_start(self, label: str) -> None:
        if self._options.meets("crash", label):
            _crash()
        if self._options.meets("late", label):
            time.sleep(_LATE_S)
            _crash()
        if self._options.meets("hang", label):
            threading.Event().wait()
        if self._options.meets("oom", label):
            raise MemoryError("the options of the test device ask for it")
        if self._options.meets("bug", label):
            raise RuntimeError("the options of the test device ask for it")
        if self._options.meets("fault", label):
            raise DeviceLost("test device: run returned 507015", 507015)
        if self._options.meets("damage", label):
            raise DeviceLost(
                "damaged, not tried again: run returned 507054", 507054, restart_policy=RestartPolicy.NEVER
            )
        if self._options.meets("timeout", label):
            raise DeviceLost("test device: wait returned 507046", 507046, retry=False, exempt=True)

    def workspace_bytes(self, record: OpRecord, meta: CallMeta) -> int | None:
        """What the options say; None for a device without its own memory."""
        return None if self._options.memory_bytes is None else self._options.workspace_bytes

    def close(self) -> None:
        """Ends the threads of the CPU backend, if any."""
        self._cpu.close()


def _crash() -> None:
    """Ends this process as a failed assertion does, without a core file or a traceback."""
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


def _start_children() -> None:
    """Starts children that keep everything this process has and never end, as vendor libraries do."""
    for detached in (False, True):
        if os.fork() == 0:
            if detached:
                os.setsid()
            while True:
                signal.pause()
    subprocess.Popen(["sleep", "infinity"], close_fds=False)


def _spoil(call: DeviceCall, how: str) -> None:
    """Makes results wrong."""
    if how == "bit":
        _flip_bit(call)
        return
    for output in call.outputs.values():
        if how == "scale" and is_exact(output.dtype):
            np.equal(output, 0, out=output, casting="unsafe")
        else:
            output *= np.asarray(1.125 if how == "scale" else 0, output.dtype)


def _flip_bit(call: DeviceCall) -> None:
    for output in call.outputs.values():
        if output.size:
            first = output.reshape(-1)[:1].view(np.uint8)
            first[-1] ^= 0x40  # little-endian: the last byte has the sign and the exponent's highest bit
            return
