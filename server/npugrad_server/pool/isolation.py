"""Isolation: where and when calls that may kill workers run. Part of the scheduler.

Guarantees
    - A call under which a worker died, or whose tenant is suspect with its operator (`circuit_breaker`), runs
      only on a worker that runs nothing else.
    - While a tenant that is not suspect has calls, or had some within `CircuitBreaker.window_s`, calls of
      other tenants that are suspect leave it one of the ready devices that run them. Where there is only one,
      they may cost it a start once in the time of `circuit_breaker.PACE` starts.
    - Calls of a suspect that died together with others run one at a time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from npugrad_server.pool.circuit_breaker import CircuitBreaker
from npugrad_server.pool.fair_queue import FairQueue
from npugrad_server.pool.types import DeviceState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from npugrad_server.pool.state import CallState, WorkerState


class Isolation:
    """Keeps suspect calls apart.

    Attributes:
        circuits: Suspects calls when workers die.
        queue: Calls that wait for a worker.
        again_s: When a suspect call that has to wait may start even if nothing happens.
    """

    def __init__(self, circuit_deaths: int) -> None:
        """Isolates nothing yet; the argument is as in `PoolSettings`."""
        self.circuits = CircuitBreaker(circuit_deaths)
        self.queue: FairQueue[CallState] = FairQueue()
        self.again_s: float | None = None

    def begin(self, now: float) -> None:
        """Forgets what is over; before calls are started."""
        self.again_s = None
        if len(self.circuits):
            self.circuits.forget(now)

    def isolates(self, call: CallState) -> bool:
        """Whether a call runs only on a worker that runs nothing else."""
        return call.deaths > 0 or self.circuits.suspects(call)

    def admits(self, call: CallState, worker: WorkerState) -> bool:
        """Whether a call may join those that run on a worker now, memory aside."""
        if not worker.admits(call):
            return False
        return not worker.running or not any(map(self.isolates, (call, *worker.running.values())))

    def leaves_enough(
        self, call: CallState, worker: WorkerState, devices: Sequence[WorkerState], now: float
    ) -> bool:
        """Whether a call may run on a worker as far as other tenants are concerned.

        Args:
            call: The call.
            worker: The worker.
            devices: All that run such calls.
            now: Current time.
        """
        if not self.circuits.suspects(call):
            return True
        self._look_again(self.circuits.expires_s(call), now)
        others = [each for each in devices if each is not worker]
        if self.circuits.is_serial(call) and any(
            running.owner == call.owner for each in others for running in each.running.values()
        ):
            return False
        protected_s = self._protected_s(call, now)
        if protected_s <= now:
            return True
        self._look_again(protected_s, now)
        if others:
            return any(each.state is DeviceState.READY and not self._is_risky(each) for each in others)
        next_s = self.circuits.next_s(call)
        self._look_again(next_s, now)
        return now >= next_s

    def _look_again(self, when: float, now: float) -> None:
        if when > now:
            self.again_s = when if self.again_s is None else min(self.again_s, when)

    def _is_risky(self, worker: WorkerState) -> bool:
        return any(map(self.circuits.suspects, worker.running.values()))

    def _protected_s(self, call: CallState, now: float) -> float:
        """Until when other tenants, none of them suspect, count as having calls."""
        seen: Iterable[tuple[str, float]] = self.queue.seen(now)
        return max(
            (
                at + self.circuits.window_s
                for name, at in seen
                if name != call.tenant.name and not self.circuits.suspects_tenant(name)
            ),
            default=-math.inf,
        )
