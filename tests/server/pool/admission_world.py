"""The scheduler's world with what lets calls in: run times and their deadlines, and what tenants hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence

from tests.server.pool.scheduler_world import Call, Planned, SchedulerWorld

from npugrad_server.pool.admission import AdmissionControl
from npugrad_server.pool.commands import FailCall, StartCall
from npugrad_server.pool.forecast import Prediction
from npugrad_server.pool.quotas import TenantUse
from npugrad_server.pool.regions import EMPTY, Region
from npugrad_server.pool.run_times import STALE_S, WorkSize
from npugrad_server.pool.state import WorkerState
from npugrad_server.pool.tenant import Tenant
from npugrad_server.pool.types import DeviceState

SECONDS = {10: 0.2, 20: 2.0}
"""How long calls run, by logarithm of their size, but for a tenth."""
SLOWNESS = (1.0, 1.0, 3.0, 0.5)
"""By device."""
LEAST, MOST = 0.9, 2.25
"""What is learned allows for the least time of such calls, and for no more than so many times the mean one:
when it knows few calls, for about twice that."""
TELLING = 3
"""So many calls of a size have to be done on a device before their time refuses any."""


class DeadlineWorld(SchedulerWorld):
    """Calls that run for about as long as others of their size, if only in what their workers tell.

    Attributes:
        taught: When each device last told of each size.
        tells: How often it did.
        waited: Calls that could not start when they came.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taught: dict[tuple[int, tuple[str, str, int]], float] = {}
        self.tells = Counter[tuple[int, tuple[str, str, int]]]()
        self.waited: set[int] = set()

    @staticmethod
    def _work(rng: random.Random, operator: str) -> WorkSize | None:
        if rng.random() < 0.2:
            return None
        size = rng.choice(list(SECONDS))
        return WorkSize((operator, "float32", size), float(size))

    def _seconds(self, call: Call) -> float | None:
        request = call.request
        if request.work is None:
            return None
        device = call.starts[-1].worker
        self.taught[device, request.work.key] = self.now
        self.tells[device, request.work.key] += 1
        spread = LEAST + (request.id % 11) * (1 - LEAST) / 5
        return SECONDS[request.work.key[2]] * SLOWNESS[device] * spread

    def _known_s(self, workers: Iterable[WorkerState], work: WorkSize | None) -> list[float | None]:
        """How long a call runs on each of some devices; None where too few told."""
        return [
            SECONDS[work.key[2]] * SLOWNESS[w.index]
            if work and self.tells[w.index, work.key] >= TELLING
            else None
            for w in workers
        ]

    def _able(self, kind: tuple[str, bool]) -> list[WorkerState]:
        preferred = self.scheduler.eligibility[kind].preferred
        return [worker for worker in preferred if worker.state is DeviceState.READY]

    def _check_late(self, planned: Planned) -> str:
        """A call that came may be refused for its deadline if it runs, or has to wait, for longer.

        Returns:
            The reason.
        """
        kind = planned.plan.record.name, planned.options.deterministic
        work, ready, forecast = (
            planned.plan.demands[self.own].work,
            self._able(kind),
            self.scheduler.forecast,
        )
        assert ready, "refused though no device could tell"
        assert planned.deadline_s is not None
        left_s = planned.deadline_s - self.now
        known = [seconds for seconds in self._known_s(ready, work) if seconds is not None]
        if not known or left_s >= MOST * min(known) + forecast._turnaround_s:
            assert self.scheduler.queue_depth or all(len(w.running) == w.spec.streams for w in ready)
            found = forecast.predict(planned.tenant, kind, work, self.now, sent=False)
            assert found.longest_s > left_s, "refused though it could be done in time"
        return "WOULD_MISS_DEADLINE"

    def _check_let_in(self, planned: Planned, prediction: Prediction) -> None:
        """A call that runs for longer than it may is let in only to learn."""
        kind = planned.plan.record.name, planned.options.deterministic
        work, ready = planned.plan.demands[self.own].work, self._able(kind)
        if prediction.is_probe:
            assert work is not None
            told = [self.taught.get((worker.index, work.key), self.now) for worker in ready]
            assert min(told) + STALE_S < self.now, "let in though it is known to run for too long"
        elif planned.deadline_s is not None:
            known = [seconds for seconds in self._known_s(ready, work) if seconds is not None]
            in_time = planned.deadline_s - self.now >= LEAST * min(known, default=0.0)
            assert in_time, "let in though it cannot be done in time"

    def _check_start(self, start: StartCall) -> None:
        """A call that had to wait starts nowhere that is known to be too slow for it by then."""
        request = self.calls[start.call].request
        if request.deadline_s is None or request.is_probe or start.call not in self.waited:
            return
        (seconds,) = self._known_s([self.scheduler.workers[start.worker]], request.work)
        assert request.deadline_s - self.now >= LEAST * (seconds or 0.0), "it starts too late"

    def _is_slow(self, worker: WorkerState, call: Call) -> bool:
        """Whether a call may wait for another device, as this one may be too slow for its deadline."""
        due_s, (seconds,) = call.request.deadline_s, self._known_s([worker], call.request.work)
        return due_s is not None and seconds is not None and due_s - self.now < MOST * seconds

    def _check_given_up(self, command: FailCall) -> None:
        """A call is given up when its turn comes if each device that is ready for it is too slow by then."""
        request = self.calls[command.call].request
        assert request.deadline_s is not None
        targets = self.scheduler._placement._targets(request)
        known = self._known_s([w for w in targets if w.state is DeviceState.READY], request.work)
        assert known, "given up though no device could tell"
        for seconds in known:
            assert seconds is not None, "given up though some device may be quick"
            assert request.deadline_s - self.now < MOST * seconds, "given up though it could be done in time"


class QuotaWorld(SchedulerWorld):
    """Calls that hold places and bytes of their tenants.

    Attributes:
        admission: Lets calls in.
        regions: Operands of every call inside.
        holding: What every call inside counts for: its tenant's use, its bytes, and whether it waits.
        dropped: How many calls gave way.
    """

    admission: AdmissionControl

    def __init__(self) -> None:
        super().__init__()
        self.regions: dict[int, Region] = {}
        self.holding: dict[int, tuple[TenantUse, int, bool]] = {}
        self.dropped = 0

    def _enter(self, number: int, planned: Planned) -> None:
        nbytes = planned.plan.demands[self.own].inflight_bytes
        self.holding[number] = self.admission.quotas.enter(planned.tenant, nbytes), nbytes, True

    def _leave(self, number: int) -> None:
        self.admission.operands.free(self.regions.pop(number))
        use, nbytes, waits = self.holding.pop(number)
        self.admission.quotas.leave(use, nbytes, waits=waits)

    def _counts_no_more(self, number: int) -> None:
        use, nbytes, waits = self.holding[number]
        use.waiting_count -= waits
        self.holding[number] = use, nbytes, False

    def _held(self, tenant: str, *, places: bool) -> int:
        mine = [held for held in self.holding.values() if held[0].tenant.name == tenant]
        return sum(waits if places else nbytes for _, nbytes, waits in mine)

    def _drop(self, tenants: Sequence[Tenant]) -> bool:
        """Has a call give way, as the pool does, whose tenant must have the most of those that can."""
        able = [t for t in tenants if self.scheduler.queue.last(t.name) is not None]
        if not able:
            return False
        uses = self.admission.quotas.uses
        order = [
            [self._held(t.name, places=places) / uses[t.name].tenant.weight for t in able]
            for places in (True, False)
        ]
        assert any(found == sorted(found, reverse=True) for found in order), "somebody else has more"
        last = self.scheduler.queue.last(able[0].name)
        assert last is not None
        self.obey(self.scheduler.drop_last(able[0].name, self.now))
        assert self.calls[last.id].answers == 1
        self._counts_no_more(last.id)
        use, nbytes, waits = self.holding[last.id]
        use.inflight_bytes -= nbytes
        self.holding[last.id] = use, 0, waits
        self.admission.operands.free(self.regions[last.id])
        self.regions[last.id] = EMPTY
        self.dropped += 1
        return True

    def _check_quotas(self) -> None:
        for name, use in self.admission.quotas.uses.items():
            assert use.waiting_count == self._held(name, places=True), "places are counted wrongly"
            assert use.inflight_bytes == self._held(name, places=False), "bytes are counted wrongly"
