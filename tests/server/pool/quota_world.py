"""The scheduler's world with what tenants hold: who has to give way, and that it is counted."""

from __future__ import annotations

from collections.abc import Sequence

from tests.server.pool.pool_calls import Planned
from tests.server.pool.scheduler_world import SchedulerWorld

from npugrad_server.pool.admission import AdmissionControl
from npugrad_server.pool.quotas import TenantUse
from npugrad_server.pool.regions import EMPTY, Region
from npugrad_server.pool.tenant import Tenant


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
        """Places or bytes that a tenant has, counted one by one."""
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
        """What tenants hold is counted as it is."""
        for name, use in self.admission.quotas.uses.items():
            assert use.waiting_count == self._held(name, places=True), "places are counted wrongly"
            assert use.inflight_bytes == self._held(name, places=False), "bytes are counted wrongly"
