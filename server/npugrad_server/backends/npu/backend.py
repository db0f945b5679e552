"""The NPU backend: one device of this process, one lane for each of the worker's streams."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from npugrad.call import CallOptions
from npugrad.errors import NpugradError, OperatorError, UnsupportedOperator
from npugrad.ops import OPERATORS
from npugrad.products import chip_kind, product_from_soc
from npugrad_server.acl.faults import Action, fault_of
from npugrad_server.acl.launcher import Launcher
from npugrad_server.acl.libraries import Cann, LibraryError, Missing
from npugrad_server.acl.release import installed_release
from npugrad_server.acl.runtime import AclError, Runtime
from npugrad_server.backends.base import Backend, DeviceCall, DeviceUnusable, RestartPolicy, Timings, unheard
from npugrad_server.backends.canary import Canary
from npugrad_server.backends.npu.bringup import NpuDevice, check_packages
from npugrad_server.backends.npu.failures import device_error, device_lost
from npugrad_server.backends.npu.lane import Lane
from npugrad_server.backends.npu.mode import Mode, offer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad.products import Product
    from npugrad_server.devices import DeviceName

_PROBES = 2
"""How often an operator's first, tiny call is tried, unless it fails with a permanent code."""


class NpuBackend(Backend):
    """Runs any operator that the node's CANN has, on one NPU."""

    name = "npu"
    one_mode = True
    is_limited = True
    strided = True

    def __init__(self, records: Mapping[str, OpRecord] = OPERATORS) -> None:
        """Makes it; `open` takes the device."""
        self.records = records
        self.description = "NPU"
        self._thread = threading.local()

    def open(
        self,
        device: DeviceName,
        product: Product,
        streams: int,
        on_stage: Callable[[str], None] = unheard,
    ) -> None:
        """Finds CANN, brings the device up, and tries every operator once.

        Raises:
            DeviceUnusable: CANN, torch_npu or the device is missing, does not fit or does not answer.
            DeviceLost: The device failed in a first call.
        """
        on_stage("loading CANN")
        check_packages()  # most often missing, so checked before anything is loaded
        try:
            # Before torch_npu: if CANN is missing, our list of what was tried says more.
            self._cann = Cann()
        except LibraryError as error:
            raise DeviceUnusable(str(error)) from None
        self._runtime = Runtime(self._cann.runtime)
        self._release = installed_release(self._runtime)
        self._launcher = Launcher(self._cann, self._runtime, self._release)
        # Before torch_npu, which has its own error for a chip that it does not know.
        self._check_chip(product, may_be_unknown=True)
        self._device = NpuDevice(device.index, streams, on_stage)
        self._thread.bound = True
        soc = self._check_chip(product)
        self._choose_mode(device)
        self._describe(soc)
        try:
            self._lanes = [Lane(self._device, self._runtime, self._launcher) for _ in range(streams)]
        except AclError as error:
            raise DeviceUnusable(f"cannot set up a stream: {error}", RestartPolicy.SLOWLY) from error
        distinct = len({lane.raw_stream for lane in self._lanes})
        if distinct < streams:
            raise DeviceUnusable(f"found {distinct} different streams of torch_npu; expected {streams}")
        self.unavailable = self._probe(product, on_stage)
        self._device.empty_cache()  # calls may use what the probes used
        self.memory_bytes = self._runtime.memory_bytes()[0]

    def _check_chip(self, product: Product, *, may_be_unknown: bool = False) -> str:
        """The chip's name, once checked to be one of the product."""
        soc = self._runtime.soc_name()
        found = product_from_soc(soc)
        if found is not product and not (may_be_unknown and not soc):
            raise DeviceUnusable(f"found chip {soc!r}, which is {chip_kind(soc)}; expected {product}")
        return soc

    def _choose_mode(self, device: DeviceName) -> None:
        """Sets the deterministic option if the worker keeps one mode: before the probes' first launch."""
        option = self._cann.runtime["aclrtSetSysParamOpt"]
        missing = option.reason if isinstance(option, Missing) else ""
        offered = offer(self._release, device.deterministic, missing)
        if device.deterministic and offered.refusal:
            raise DeviceUnusable(f"found deterministic=1; expected none, because {offered.refusal}")
        try:
            self._mode = Mode(self._runtime, offered.kept)
        except AclError as error:
            raise DeviceUnusable(
                f"the deterministic option cannot be set: {error}", RestartPolicy.SLOWLY
            ) from error
        self.deterministic, self.no_determinism = offered.kept, offered.refusal
        self.one_mode = offered.kept is None

    def _describe(self, soc: str) -> None:
        versions = self._device.versions
        cann = self._release or "of unknown release"
        self.simulated = self._cann.simulated
        marked = "SIMULATED " if self.simulated else ""
        modes = {None: "deterministic on request", True: "always deterministic", False: "not deterministic"}
        self.description = (
            f"{marked}{soc}, CANN {cann}, torch_npu {versions['torch_npu']}, {modes[self.deterministic]}"
        )

    def _probe(self, product: Product, on_stage: Callable[[str], None]) -> dict[str, str]:
        """Operators that cannot run here, with the reason: a function is missing, or a tiny call is refused.

        Raises:
            DeviceUnusable: No operator is left, or one fails in a way that may be temporary.
        """
        records = [record for record in self.records.values() if product in record.products]
        reasons = {}
        for record in records:
            on_stage(f"trying {record.name}")  # it loads its kernels
            reasons[record.name] = self._launcher.missing(record) or self._try_out(record, product)
        unavailable = {name: reason for name, reason in reasons.items() if reason}
        if len(unavailable) == len(records):
            told = "; ".join(f"{name}: {reason}" for name, reason in unavailable.items())
            raise DeviceUnusable(f"no operator runs on this device: {told}")
        return unavailable

    def _try_out(self, record: OpRecord, product: Product) -> str:
        """Runs a tiny call; returns why the operator can never run here, empty if it can."""
        failure: NpugradError | None = None
        canary = Canary(record, product, legal=True)
        for _ in range(_PROBES):
            try:
                canary.results(self.run)  # compared once the device is open
            except NpugradError as error:
                failure = error
                if _is_for_good(error):
                    return str(error).removeprefix(f"{record.name}: ")
            else:
                return ""
        raise DeviceUnusable(
            f"{failure}; a tiny first call failed {_PROBES} times",
            RestartPolicy.SLOWLY,
        ) from failure

    def run(self, record: OpRecord, call: DeviceCall) -> Timings:
        """Runs a call on the lane of its stream; errors as in `Backend.run` and `Lane.run`."""
        self._check(record, call.meta, call.options)
        if not call.outputs:
            return Timings()  # everything is masked out: there is nothing to compute
        self._bind_thread()
        with self._mode.held(record, call.options.deterministic):
            return self._lanes[call.stream].run(record, call)

    def _check(self, record: OpRecord, meta: CallMeta, options: CallOptions) -> None:
        if record.name in self.unavailable:
            raise UnsupportedOperator(
                f"{record.name}: not available on this node: {self.unavailable[record.name]}",
                operator=record.name,
            )
        complaint = self._why_not_deterministic(record, meta) if options.deterministic else None
        if complaint is not None:
            raise OperatorError(
                f"{record.name}: {complaint}",
                reason="DETERMINISM_UNSUPPORTED",
                operator=record.name,
                source="device",
            )

    def _why_not_deterministic(self, record: OpRecord, meta: CallMeta) -> str | None:
        if self.no_determinism:
            return f"deterministic: found True; expected False, because {self.no_determinism}"
        return record.determinism_check(meta, self._release)

    def workspace_bytes(self, record: OpRecord, meta: CallMeta) -> int | None:
        """Asks the operator's first phase; errors as in `Backend.workspace_bytes`."""
        self._check(record, meta, CallOptions())
        if not any(wanted is not None for wanted in record.infer(meta).values()):
            return 0
        self._bind_thread()
        with self._mode.as_it_is():
            return self._lanes[0].workspace_bytes(record, meta)

    def memory_now(self, *, give_back: bool) -> tuple[int, int]:
        """Free and total bytes of the device, other processes' use included; errors as in `Backend`."""
        self._bind_thread()
        try:
            if give_back:
                self._device.empty_cache()
            return self._runtime.memory_bytes()
        except AclError as error:
            if error.fault.action.ends_worker:
                raise device_lost("memory", error) from error
            raise device_error("memory", error) from None

    def _bind_thread(self) -> None:
        if not getattr(self._thread, "bound", False):
            self._device.use_thread()
            self._thread.bound = True

    def close(self) -> None:
        """Releases what torch_npu does not know of; the end of the process does the rest."""
        with suppress(AclError):
            for lane in self._lanes:
                lane.close()


def _is_for_good(error: NpugradError) -> bool:
    """Whether the node lacks the operator's kernels, or the operator refuses what its record allows."""
    code = error.code if isinstance(error, OperatorError) else None
    return fault_of(code or 0).action in (Action.OPERATOR_MISSING, Action.REFUSE)
