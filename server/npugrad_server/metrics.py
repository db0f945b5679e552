"""Counters of the server, for its Prometheus page.

Every name starts with ``npugrad_`` and carries its unit. Labels take few values: operators, devices,
reasons and statuses come from our own tables, never from a caller.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector

from npugrad.ops import OPERATORS
from npugrad.timeline import SERVER_STAGES
from npugrad_server.collectors import LogCollector, PoolCollector
from npugrad_server.pool import PoolObserver
from npugrad_server.tallies import CounterTally, GaugeTally, HistogramTally, SummaryTally

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from npugrad.call import ExecutionInfo
    from npugrad.timeline import Mark
    from npugrad_server.collectors import PoolFigures
    from npugrad_server.pool import DeviceStatus, PlannedCall

# From a tiny CPU call to beyond the run limit, three steps per decade.
_SECONDS = (*(round(m * 10.0**e, 6) for e in range(-4, 2) for m in (1, 2.5, 5)), 100.0, 250.0, 500.0, 1000.0)
_RATIOS = (0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0, 5.0)
_MOST_OBSERVED = 256
"""Observations that may wait before a histogram counts them."""
_STAGES = tuple((stage, f"{stage}_s") for stage in ("queued", "copy_in", "run", "copy_out"))
"""Stages, and the fields of `ExecutionInfo` with their seconds."""
_OUTSIDE = frozenset(SERVER_STAGES) - {stage for stage, _ in _STAGES} - {"lost"}
"""Stages whose seconds are in no field of `ExecutionInfo`."""


class Metrics(PoolObserver):
    """Counters of one server, on their own registry.

    Attributes:
        registry: What the page shows.
        draining: 1 once the server is asked to end.
    """

    def __init__(self, version: str, product: str) -> None:
        """Creates all counters.

        Args:
            version: Version of the server.
            product: Product it serves.
        """
        self.registry = CollectorRegistry()
        build = Gauge(
            "npugrad_build_info",
            "Version and product, value 1.",
            ("version", "product"),
            registry=self.registry,
        )
        build.labels(version, product).set(1)
        self.draining = Gauge(
            "npugrad_draining", "1 once the server has been asked to shut down.", registry=self.registry
        )
        ProcessCollector(registry=self.registry)
        self._make_call_counters(self.registry)
        self._make_pool_counters(self.registry)
        self.registry.register(LogCollector())

    def _make_call_counters(self, registry: CollectorRegistry) -> None:
        self._calls = CounterTally(
            "npugrad_calls",
            "Calls answered, by gRPC status and error reason; device is empty for calls without a result.",
            ("method", "operator", "status", "reason", "device"),
            registry,
        )
        self._call_seconds = HistogramTally(
            "npugrad_call_seconds",
            "Seconds from the arrival of a call to its answer; of Execute with the upload, of a unary call "
            "from when its whole message has arrived.",
            ("method", "operator"),
            registry,
            buckets=_SECONDS,
        )
        self._received = CounterTally(
            "npugrad_received_bytes", "Bytes of operands of answered calls.", ("operator",), registry
        )
        self._sent = CounterTally(
            "npugrad_sent_bytes", "Bytes of results of answered calls.", ("operator",), registry
        )
        self._tenants = CounterTally(
            "npugrad_tenant_calls", "Calls answered, by tenant and reason.", ("tenant", "reason"), registry
        )
        self._tenant_seconds = CounterTally(
            "npugrad_tenant_device_seconds",
            "Device stream seconds used by successful calls, by tenant.",
            ("tenant",),
            registry,
        )
        self._active = GaugeTally(
            "npugrad_active_calls",
            "Calls in progress, including those not yet admitted.",
            ("method",),
            registry,
        )

    def _make_pool_counters(self, registry: CollectorRegistry) -> None:
        self._accepted = CounterTally("npugrad_accepted_calls", "Calls admitted.", ("operator",), registry)
        self._stages = SummaryTally(
            "npugrad_stage_seconds",
            "Seconds of each stage of a successful call: decode, validate, receive, queued, copy_in, run, "
            "copy_out, verify, encode, send_back.",
            ("operator", "device", "stage"),
            registry,
        )
        self._ratios = HistogramTally(
            "npugrad_run_time_ratio",
            "Run time of successful calls, copies included, divided by the predicted run time.",
            ("operator", "device"),
            registry,
            buckets=_RATIOS,
        )
        self._rerun = CounterTally(
            "npugrad_calls_rerun",
            "Calls to be run again because their worker died.",
            ("device",),
            registry,
        )
        self._redirected = CounterTally(
            "npugrad_calls_redirected",
            "Calls requeued for another device because one could not take them, by reason.",
            ("device", "reason"),
            registry,
        )
        self._workspaces = CounterTally(
            "npugrad_workspaces_asked",
            "Calls that needed more workspace than reserved, by outcome: granted, postponed, refused.",
            ("device", "answer"),
            registry,
        )
        self._postponed = CounterTally(
            "npugrad_calls_postponed",
            "Calls requeued because their device had no memory for their workspace.",
            ("device",),
            registry,
        )
        self._attempts = CounterTally(
            "npugrad_attempts", "Calls handed to a device, counting every attempt.", ("device",), registry
        )
        self._transitions = CounterTally(
            "npugrad_device_transitions",
            "Transitions of a device into a state.",
            ("device", "state"),
            registry,
        )
        self._canaries = CounterTally(
            "npugrad_canaries",
            "Self-test calls computed by devices, by result: ok, mismatch, error.",
            ("device", "result"),
            registry,
        )
        self._compared = CounterTally(
            "npugrad_compared_results",
            "Calls picked for comparison with the reference, by kind (verify, sample) and result.",
            ("device", "kind", "result"),
            registry,
        )
        self._mismatches = CounterTally(
            "npugrad_device_mismatches",
            "Wrong results from a device that reported no error; two within ten minutes quarantine it.",
            ("device", "operator"),
            registry,
        )
        self._lost = CounterTally(
            "npugrad_workers_lost",
            "Worker processes that died, failed to start, or were killed by the server, except at its "
            "shutdown.",
            ("device",),
            registry,
        )
        self._opened = CounterTally(
            "npugrad_circuits_opened",
            "Circuits opened: calls of one tenant and signature, or operator, refused for a while because "
            "they killed workers. npugrad_calls_total counts the refusals, with reason CIRCUIT_OPEN.",
            ("operator",),
            registry,
        )
        self._rejected = CounterTally(
            "npugrad_device_rejections",
            "Calls that passed validation but failed on a device with an aclnn code; 161001, 161002 and "
            "561002 mean a bug in an operator record.",
            ("operator", "code"),
            registry,
        )

    # ------------------------------------------------------------------------- the gRPC side

    def call_arrived(self, method: str) -> None:
        """A call of an RPC came in."""
        self._active.values[(method,)] += 1

    def call_answered(
        self,
        method: str,
        operator: str,
        status: str,
        reason: str,
        device: str,
        seconds: float,
        *,
        tenant: str,
    ) -> None:
        """A call of an RPC was answered or abandoned.

        Args:
            method: Name of the RPC.
            operator: Operator, empty for RPCs that run none or when it is unknown.
            status: gRPC status name.
            reason: ``"OK"`` or the row of the error table.
            device: Device that ran it; empty for none.
            seconds: Seconds since it arrived.
            tenant: Its tenant's name in metrics.
        """
        self._tenants.counts[tenant, reason] += 1
        self._active.values[(method,)] -= 1
        self._calls.counts[method, operator, status, reason, device] += 1
        self._call_seconds.observed.append(((method, operator), seconds))
        if len(self._call_seconds.observed) >= _MOST_OBSERVED:
            self._call_seconds.count()

    def bytes_moved(self, operator: str, received: int, sent: int) -> None:
        """Content bytes of one call, in and out."""
        self._received.counts[(operator,)] += received
        self._sent.counts[(operator,)] += sent

    def stages_passed(self, operator: str, device: str, marks: Sequence[Mark]) -> None:
        """The stages of a successful call that `call_finished` does not report."""
        for (_, start_s), (stage, end_s) in pairwise(marks):
            if stage in _OUTSIDE:
                self._stages.add((operator, device, stage), end_s - start_s)

    def device_rejected(self, operator: str, code: int) -> None:
        """A device refused a call that the validator had passed."""
        self._rejected.counts[operator, str(code)] += 1

    # ------------------------------------------------------------------------- the pool's side

    def call_accepted(self, planned: PlannedCall) -> None:
        """A call was admitted."""
        self._accepted.counts[(planned.plan.record.name,)] += 1

    def call_started(self, planned: PlannedCall, device: str, attempt: int, queued_s: float) -> None:
        """A call was handed to a device."""
        self._attempts.counts[(device,)] += 1

    def call_finished(
        self, planned: PlannedCall, reason: str, seconds: float, info: ExecutionInfo | None
    ) -> None:
        """A call was answered; if it succeeded, its stages are recorded."""
        if info is None:
            return
        operator, device = planned.plan.record.name, info.device
        run_s = info.copy_in_s + info.run_s + info.copy_out_s
        self._tenant_seconds.counts[(planned.tenant.shown,)] += run_s
        if info.predicted_run_s:
            self._ratios.observed.append(((operator, device), run_s / info.predicted_run_s))
            if len(self._ratios.observed) >= _MOST_OBSERVED:
                self._ratios.count()
        for stage, name in _STAGES:
            self._stages.add((operator, device, stage), getattr(info, name))

    def call_requeued(self, planned: PlannedCall, device: str) -> None:
        """The worker of a device died under a call, which will run again."""
        self._rerun.counts[(device,)] += 1

    def call_redirected(self, planned: PlannedCall, device: str, reason: str) -> None:
        """A device could not take a call now."""
        self._redirected.counts[device, reason] += 1

    def workspace_asked(self, device: str, answer: str) -> None:
        """A call needed more workspace than was reserved for it."""
        self._workspaces.counts[device, answer] += 1

    def call_postponed(self, planned: PlannedCall, device: str) -> None:
        """A call was requeued because there was no memory for its workspace."""
        self._postponed.counts[(device,)] += 1

    def worker_lost(self, device: str, reason: str) -> None:
        """A worker process ended."""
        self._lost.counts[(device,)] += 1

    def circuit_opened(self, planned: PlannedCall) -> None:
        """Calls of a tenant and signature are refused for a while."""
        self._opened.counts[(planned.plan.record.name,)] += 1

    def device_changed(self, status: DeviceStatus) -> None:
        """A device changed its state."""
        self._transitions.counts[status.name, str(status.state)] += 1

    def canaries_run(self, device: str, result: str, count: int) -> None:
        """A device ran canaries."""
        self._canaries.counts[device, result] += count

    def results_compared(self, device: str, kind: str, result: str) -> None:
        """Results were compared with the reference."""
        self._compared.counts[device, kind, result] += 1

    def device_mismatched(self, device: str, operator: str) -> None:
        """A device computed a wrong result."""
        self._mismatches.counts[device, operator] += 1

    # ------------------------------------------------------------------------------- the page

    def show_pool(self, pool: PoolFigures, loop: asyncio.AbstractEventLoop) -> None:
        """Adds figures of the pool, read on its loop at every scrape."""
        for device in pool.devices():  # so that a rate exists before the first loss
            self._lost.counts[(device.name,)] += 0
            self._rerun.counts[(device.name,)] += 0
            for operator in OPERATORS:
                self._mismatches.counts[device.name, operator] += 0
        self.registry.register(PoolCollector(pool, loop))
