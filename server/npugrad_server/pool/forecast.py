"""Predicts when a call admitted now would be done, from waiting work, others' rates and its run time.

Tenants share the devices by weight. So a call waits for its own tenant's work ahead of it and, meanwhile, for
what each other tenant gets done: at most its share, and at most what it has waiting and goes on sending.
Considering only what waits would promise too much while the queues of tenants with larger weights fill up,
which takes seconds if these ask for little more than their shares.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from npugrad_server.pool.run_times import UNKNOWN, RunTimes
from npugrad_server.pool.types import DeviceState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from npugrad_server.pool.placement import EligibilityTable
    from npugrad_server.pool.run_times import WorkSize
    from npugrad_server.pool.state import CallState, WorkerState
    from npugrad_server.pool.tenant import Tenant

_MEMORY_S = 3.0
"""Time constant of the rate at which a tenant sends."""
_LEAST_AGE_S = 0.25
"""A tenant's rate is computed as if it had been sending for at least this long."""
_FORGOTTEN_S = 10 * _MEMORY_S
MAX_LOADS = 1024
"""Loads kept at most; beyond this, some without a call waiting are forgotten."""
_RATE_MARGIN = 1.1
"""Factor by which other tenants may send more than they recently did."""
_WAIT_MARGIN = 1.25
"""Factor on the expected wait that a promise allows for: a host has other work now and then, and everything
runs slower for a second or two. Under overload, this costs no throughput."""
_ROUNDS = 4
"""Iterations when approximating a wait; each brings it down towards the right one."""
_LEAST_RETRY_S, _MOST_RETRY_S = 0.1, 30.0
"""Bounds on the seconds that a caller is asked to wait before it tries again."""
_LEAST_LEFT = 0.1
"""Fraction of its expected time that a running call is assumed to have left when it is overdue."""
_SMOOTHING = 0.05
"""Weight of the newest call in a running mean."""


@dataclass(eq=False)
class TenantLoad:
    """Work of one tenant and kind, in seconds of a stream.

    Attributes:
        tenant: The tenant.
        kind: Operator and deterministic mode, by which devices are chosen.
        lanes: Seconds of waiting work and number of waiting calls, by priority and label.
        queued_s: Seconds of waiting work in all lanes.
        queued: How many calls wait.
        sent_s: Seconds of work sent, decaying exponentially with age.
        sent_at: When `sent_s` was last updated.
        since: When the tenant began to send.
    """

    tenant: Tenant
    kind: tuple[str, bool]
    lanes: defaultdict[tuple[int, str], list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0, 0])
    )
    queued_s: float = 0.0
    queued: int = 0
    sent_s: float = 0.0
    sent_at: float = -math.inf
    since: float = 0.0

    def rate(self, now: float) -> float:
        """Returns the seconds of work that it sends per second, refused calls included."""
        age_s = max(now - self.since, _LEAST_AGE_S)
        sent_s = self.sent_s * math.exp((self.sent_at - now) / _MEMORY_S)
        return sent_s / (_MEMORY_S * (1 - math.exp(-age_s / _MEMORY_S)))


@dataclass
class Prediction:
    """The prediction for a call that has just arrived.

    Attributes:
        wait_s: Seconds until it would start.
        run_s: Mean seconds that it would run; 0.0 if unknown.
        expected_s: Seconds that it would occupy a stream, handover included; 0.0 if unknown.
        longest_wait_s: Seconds within which nearly all such calls would start.
        longest_run_s: Seconds of a stream that 99 of 100 such calls would not exceed; 0.0 if unknown.
        is_probe: Whether it is admitted to learn how long such calls take, although it is expected to take
            too long.
        is_wait_known: Whether it could start at once, or the work ahead of it is known.
    """

    wait_s: float
    run_s: float
    expected_s: float
    longest_wait_s: float
    longest_run_s: float
    is_probe: bool = False
    is_wait_known: bool = True

    @property
    def longest_s(self) -> float:
        """Seconds within which nearly all such calls would be done."""
        return self.longest_wait_s + self.longest_run_s

    @property
    def retry_after_s(self) -> float:
        """Seconds until its tenant's turn would come, for a caller that is told to try again."""
        return min(max(self.wait_s, _LEAST_RETRY_S), _MOST_RETRY_S)

    def __str__(self) -> str:
        """Describes the prediction, for an error message."""
        return (
            f"found {self.longest_s:.3g} s predicted, {self.longest_wait_s:.3g} s of waiting and "
            f"{self.longest_run_s:.3g} s of running"
        )


UNKNOWN_PREDICTION = Prediction(0.0, 0.0, 0.0, 0.0, 0.0)


class Forecast:
    """Predicts waits and run times; part of the scheduler, which tells it of waiting and completed calls.

    Attributes:
        run_times: Learned run times.
    """

    def __init__(self, workers: Sequence[WorkerState], eligibility: EligibilityTable) -> None:
        """Knows nothing yet.

        Args:
            workers: The devices.
            eligibility: Which of them calls may go to.
        """
        self.run_times = RunTimes()
        self._workers, self._eligibility = workers, eligibility
        self._loads: dict[tuple[str, tuple[str, bool]], TenantLoad] = {}
        self._queued = 0
        self._mean_s = self._turnaround_s = 0.0

    @property
    def queued_s(self) -> float:
        """Seconds of a stream that all waiting calls are expected to take."""
        return sum(load.queued_s for load in self._loads.values())

    # ------------------------------------------------------------------------------------------------- events

    def learn(self, call: CallState, device: int, seconds: float, now: float) -> None:
        """Learns from a completed call.

        Args:
            call: The call.
            device: Index of its device.
            seconds: Time its worker spent on it.
            now: Current time.
        """
        if call.work is not None:
            self.run_times.learn(device, call.work, seconds, now)
        self._mean_s += _SMOOTHING * (seconds - self._mean_s) if self._mean_s else seconds
        # Between two calls, a stream waits for messages and for the event loop that sends them.
        between_s = min(max(now - call.started_s - seconds, 0.0), seconds + 0.01)
        self._turnaround_s += _SMOOTHING * (between_s - self._turnaround_s)

    def queued(self, call: CallState) -> None:
        """Counts a call that has to wait."""
        load = self._load(call.tenant, call.kind, call.submitted_s)
        call.queued_s = call.expected_s or self._mean_s
        lane = load.lanes[call.priority, call.label]
        lane[0] += call.queued_s
        lane[1] += 1
        load.queued_s += call.queued_s
        load.queued += 1
        self._queued += 1

    def unqueued(self, call: CallState) -> None:
        """Stops counting a call as waiting."""
        if call.queued_s is None:
            return
        load, key = self._loads[call.tenant.name, call.kind], (call.priority, call.label)
        lane = load.lanes[key]
        lane[0] -= call.queued_s
        lane[1] -= 1
        if not lane[1]:
            del load.lanes[key]
        load.queued -= 1
        load.queued_s = load.queued_s - call.queued_s if load.queued else 0.0
        self._queued -= 1
        call.queued_s = None

    # -------------------------------------------------------------------------------------------- predictions

    def predict(
        self,
        tenant: Tenant,
        kind: tuple[str, bool],
        work: WorkSize | None,
        now: float,
        lane: tuple[int, str] = (0, ""),
        *,
        sent: bool = True,
    ) -> Prediction:
        """Predicts when a call that has just arrived would be done.

        Args:
            tenant: Whose call it is.
            kind: Its operator and deterministic mode.
            work: Its size.
            now: When it arrived.
            lane: Its priority and label.
            sent: Whether the tenant sends it, rather than just asking for a prediction.
        """
        devices, indices, is_free = [], [], False
        for worker in self._eligibility[kind].preferred:
            if worker.state is DeviceState.READY:
                devices.append(worker)
                indices.append(worker.index)
                is_free = is_free or len(worker.running) < worker.spec.streams
        run_s, bound_s = UNKNOWN if work is None else self.run_times.expect(indices, work)
        turnaround_s = self._turnaround_s if run_s else 0.0
        expected_s = run_s + turnaround_s
        load = self._loads.get((tenant.name, kind))
        if load is None or load.tenant is not tenant or now - load.sent_at > _FORGOTTEN_S:
            # A tenant that only asks does not begin to send.
            load = self._load(tenant, kind, now) if sent else load or TenantLoad(tenant, kind)
        if sent:
            load.sent_s = load.sent_s * math.exp((load.sent_at - now) / _MEMORY_S)
            load.sent_s += expected_s or self._mean_s
            load.sent_at = now
        wait_s = 0.0
        if self._queued or not is_free:
            wait_s = self._wait_s(load, lane, expected_s or self._mean_s, devices, now)
        longest_wait_s = wait_s * _WAIT_MARGIN
        longest_run_s = bound_s + turnaround_s if bound_s else 0.0
        is_wait_known = is_free or wait_s > 0
        return Prediction(
            wait_s, run_s, expected_s, longest_wait_s, longest_run_s, is_wait_known=is_wait_known
        )

    def probe(self, kind: tuple[str, bool], work: WorkSize, now: float) -> bool:
        """Whether to admit one call although it is expected to run too long; see `RunTimes.doubt`."""
        return self.run_times.doubt((worker.index for worker in self._ready(kind)), work, now)

    def why_late(self, call: CallState, ready: Sequence[WorkerState], now: float) -> tuple[str, str] | None:
        """Checks whether a call that could start would miss its deadline on every device ready for it.

        Returns:
            Row of the error table and what happened; None if it would not.
        """
        if call.deadline_s is None or not ready or not all(self.is_late_on(w, call, now) for w in ready):
            return None
        bound_s = min(self._run_on(worker, call)[1] for worker in ready)
        return "WOULD_MISS_DEADLINE", (
            f"deadline: found {bound_s:.3g} s of running predicted when its turn came; "
            f"expected at most {call.deadline_s - now:.3g} s, which were left"
        )

    def is_late_on(self, worker: WorkerState, call: CallState, now: float) -> bool:
        """Whether a call that could start would miss its deadline on one device."""
        if call.deadline_s is None or call.is_probe:
            return False
        _, bound_s = self._run_on(worker, call)
        return bound_s > 0 and now + bound_s > call.deadline_s

    def finish_on(self, worker: WorkerState, call: CallState, now: float) -> float:
        """Returns the seconds until a call would be done on a device with a free stream; 0.0 if unknown.

        The calls running there count too: they slow each other down, or will keep others waiting. A device
        that has run only a few such calls, or none recently, counts as unknown: its first calls may include
        one-time setup, and a device that is never chosen cannot show what it can do.
        """
        if call.work is None or not self.run_times.is_known(worker.index, call.work, now):
            return 0.0
        return self._run_on(worker, call)[0] + self._running_s((worker,), now) / worker.spec.streams

    def passes_over(self, device: int, call: CallState) -> bool:
        """Whether a call may pass over a device that is known to finish it later than others would."""
        return call.work is not None and self.run_times.pass_over(device, call.work)

    def _run_on(self, worker: WorkerState, call: CallState) -> tuple[float, float]:
        return UNKNOWN if call.work is None else self.run_times.expect((worker.index,), call.work)

    def _ready(self, kind: tuple[str, bool]) -> list[WorkerState]:
        return [w for w in self._eligibility[kind].preferred if w.state is DeviceState.READY]

    def _wait_s(
        self,
        load: TenantLoad,
        lane: tuple[int, str],
        own_s: float,
        devices: Sequence[WorkerState],
        now: float,
    ) -> float:
        """Returns the seconds until a call would start, if all streams are busy; 0.0 if no device is ready.

        Its turn comes once its tenant has had device time for the work ahead of it and for the call itself.
        By then each other tenant has had its share for as long, or all the work that it had waiting and sent.
        """
        streams = sum(worker.spec.streams for worker in devices)
        if not streams:
            return 0.0
        ahead_s, others = _ahead(load, lane, own_s), []
        for other in self._others(load, devices, now):
            if other.tenant == load.tenant:
                ahead_s += other.queued_s
            else:
                others.append(other)
        turn = (ahead_s + own_s) / load.tenant.weight
        shares = [
            (other.tenant.weight * turn, other.queued_s, _RATE_MARGIN * other.rate(now)) for other in others
        ]
        ahead_s += self._running_s(devices, now)
        wait_s = (ahead_s + sum(share_s for share_s, _, _ in shares)) / streams
        for _ in range(_ROUNDS):
            work_s = ahead_s
            for share_s, queued_s, rate in shares:
                work_s += min(share_s, queued_s + rate * wait_s)
            wait_s = work_s / streams
        return wait_s

    def _running_s(self, devices: Iterable[WorkerState], now: float) -> float:
        left_s = 0.0
        for worker in devices:
            for call in worker.running.values():
                expected_s = call.expected_s or self._mean_s
                left_s += max(expected_s - (now - call.started_s), _LEAST_LEFT * expected_s)
        return left_s

    def _others(self, load: TenantLoad, devices: Sequence[WorkerState], now: float) -> list[TenantLoad]:
        """Returns the loads that compete for some devices; forgets those inactive for long."""
        found, forgotten = [], []
        for key, other in self._loads.items():
            if not other.queued and now - other.sent_at > _FORGOTTEN_S:
                forgotten.append(key)
            elif other is not load and self._shares(other.kind, load.kind, devices):
                found.append(other)
        for key in forgotten:
            del self._loads[key]
        return found

    def _shares(
        self, kind: tuple[str, bool], other: tuple[str, bool], devices: Sequence[WorkerState]
    ) -> bool:
        if kind == other:
            return True
        preferred = self._eligibility[kind].preferred
        return any(worker in preferred for worker in devices)

    def _load(self, tenant: Tenant, kind: tuple[str, bool], now: float) -> TenantLoad:
        key = (tenant.name, kind)
        load = self._loads.get(key)
        if load is None or load.tenant != tenant:
            if len(self._loads) >= MAX_LOADS:
                self._forget_idle()
            fresh = TenantLoad(tenant, kind, sent_at=now, since=now)
            if load is None:
                load = fresh
            else:  # its weight has changed
                load.tenant = tenant
            self._loads[key] = load
        elif now - load.sent_at > _FORGOTTEN_S:
            load.since = load.sent_at = now
            load.sent_s = 0.0
        return load

    def _forget_idle(self) -> None:
        idle = [(load.sent_at, key) for key, load in self._loads.items() if not load.queued]
        for _, key in sorted(idle)[: 1 + len(idle) // 4]:
            del self._loads[key]


def _ahead(load: TenantLoad, lane: tuple[int, str], own_s: float) -> float:
    """Returns the seconds of its tenant's work that priority and label put ahead of an arriving call."""
    priority, label = lane
    own = load.lanes.get(lane, (0.0, 0))[0]
    ahead_s = own
    for (other_priority, other_label), (seconds, _) in load.lanes.items():
        if other_priority > priority:
            ahead_s += seconds
        elif other_priority == priority and other_label != label:
            ahead_s += min(seconds, own + own_s)  # labels take turns
    return ahead_s
