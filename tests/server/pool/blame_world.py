"""The scheduler's world with calls, and somebody outside, that kill workers: who is refused, and why."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.server.pool.scheduler_world import Call, SchedulerWorld

from npugrad_server.pool.circuit_breaker import OPEN_S, PACE, TOGETHER_S, Death
from npugrad_server.pool.commands import CircuitChanged, Command, FailCall, StartCall
from npugrad_server.pool.state import CallState, WorkerState
from npugrad_server.pool.types import DeviceState

MOST_KILLS = 3
"""From outside, of isolated calls of a suspect that are not answered yet: four look like its own fault."""
FATAL = ("crash", "out of memory", "hang")
"""What calls of a guilty signature do; of a hang the scheduler ends the worker."""
Owner = tuple[str, str]


@dataclass
class Died:
    """A worker's death under a call that may have caused it, and what was behind it."""

    call: CallState
    at: float
    told_s: float
    device: int
    death: Death
    counts: bool
    cause: str
    together: bool = False
    is_stale: bool = False
    """Whether the scheduler may have forgotten it."""

    @property
    def weight(self) -> int:
        """Of a death that only the call or its device can have caused 2."""
        return 1 if self.death is Death.KILLED else 2


class BlameWorld(SchedulerWorld):
    """Keeps its own account of deaths; what the scheduler refuses and isolates is held against it.

    Attributes:
        opens_at: Deaths that open a circuit; 0 for never.
        causes: How many deaths there were, by what was behind them.
        guilty: Who had a death of their own.
        bounded: How often a guilty one was refused.
    """

    opens_at = 0
    crime = criminal = ""
    cause = ""
    """What is behind the deaths that follow; by default what they look like."""

    def __init__(self) -> None:
        super().__init__()
        self.died: list[Died] = []
        self.losses: list[tuple[float, int, list[Died]]] = []
        self.causes: Counter[str] = Counter()
        self.guilty: set[Owner] = set()
        self.bounded = 0

    # -------------------------------------------------------------------------------------------- the account

    def _blame(self, worker: WorkerState, death: Death) -> None:
        cause = (
            self.cause
            or (death is Death.KILLED and "outside")
            or ("inside", "hang")[death is Death.TIMED_OUT]
        )
        running = [call.request.started_s for call in self._on(worker.index)]
        at = self.now if worker.ended_s is None else worker.ended_s
        self.ended = at
        began, new = min(running, default=float("-inf")), []
        for request in worker.suspects():
            new.append(Died(request, at, self.now, worker.index, death, request.ran_isolated, cause))
        self.losses = [loss for loss in self.losses if loss[0] >= at - TOGETHER_S]
        others = [loss for loss in self.losses if loss[1] != worker.index and began < loss[0]]
        self.losses.append((at, worker.index, new))
        self.died += new
        for died in new if not others else [*new, *(died for loss in others for died in loss[2])]:
            died.together |= bool(others)
        for died in new:
            self.calls[died.call.id].died.append(died)
            if cause != "outside" and not died.together:
                self.guilty.add(died.call.owner)
        self.causes["several at once" if others else cause] += 1

    def _against(self, owner: Owner) -> list[Died]:
        """What is held against a tenant and operator now."""
        since = self.now - self.scheduler.circuits.window_s
        return [died for died in self.died if died.call.owner == owner and died.at > since]

    def _ready(self, worker: int, *told: Any, **facts: Any) -> None:
        since = self.now - self.scheduler.circuits.window_s  # which may be longer from now on
        for died in self.died:
            died.is_stale |= died.at <= since
        super()._ready(worker, *told, **facts)

    def _is_suspect(self, request: CallState) -> bool:
        return not all(died.is_stale for died in self._against(request.owner))

    def _weight(self, request: CallState, *, whole: bool = False, sure: bool = False) -> int:
        """What the evidence against a signature weighs, or against all of an operator; all, or for sure."""
        weights: Counter[bytes] = Counter()
        for died in self._against(request.owner):
            if died.counts and not died.together and not (sure and died.is_stale):
                weights[died.call.plan.signature] += died.weight  # type: ignore[union-attr, index]
        if whole:
            return sum(min(2, weight) for weight in weights.values())
        return weights[request.plan.signature]  # type: ignore[union-attr, index]

    def _may_be_killed(self, worker: int) -> bool:
        """Whether somebody outside may kill a worker without looking like the call on it."""
        for call in self._on(worker):
            kills = [d for d in self._against(call.request.owner) if d.counts and d.death is Death.KILLED]
            if len(kills) >= MOST_KILLS and call.request.owner not in self.guilty:
                return False
        return True

    # ----------------------------------------------------------------------------------------------- promises

    def _checked(self, commands: Sequence[Command]) -> Iterator[Command]:
        """Holds commands against the account, each before it is carried out."""
        for command in commands:
            if isinstance(command, StartCall):
                self._check_isolation(self.calls[command.call], self.scheduler.workers[command.worker])
            elif isinstance(command, CircuitChanged) and command.deaths:
                self._check_opening(self.calls[command.call], command)
            elif isinstance(command, FailCall) and command.reason in ("CIRCUIT_OPEN", "WORKER_LOST"):
                call = self.calls[command.call].request
                assert call.owner in self.guilty, f"an innocent is told {command.reason}"
                self.bounded += 1
            yield command

    def _check_isolation(self, call: Call, worker: WorkerState) -> None:
        request = call.request
        is_suspect = self._is_suspect(request)
        assert request.ran_isolated or not (is_suspect or call.deaths), "a suspect is not isolated"
        beside = [other for other in self._on(worker.index) if other is not call]
        assert not (request.ran_isolated and beside), "an isolated call is not alone"
        for other in beside:
            joined = self._is_suspect(other.request) or other.deaths
            assert not joined, "somebody joined a suspect"
        if is_suspect:
            self._check_others_keep_a_device(call, worker)

    def _check_others_keep_a_device(self, call: Call, worker: WorkerState) -> None:
        owner = call.request.owner
        suspect = {died.call.tenant.name for died in self.died} | {owner[0]}
        waiting = [c for c in self.calls.values() if not (c.answers or c.cancelled)]
        if all(other.request.tenant.name in suspect for other in waiting):
            return
        devices = [
            w for w in self.scheduler.workers if w.runs(call.request.operator, call.request.deterministic)
        ]
        others = [w for w in devices if w is not worker]
        if not others:
            held = [died for died in self._against(owner) if not died.is_stale]
            last_s = max(died.at for died in held)
            is_paced = sum(died.weight for died in held) < 2 or (
                self.now >= last_s + PACE * self.scheduler.circuits.opening_s
            )
            assert is_paced, "a suspect costs the only device too many starts"
            return
        free = [
            w
            for w in others
            if w.state is DeviceState.READY
            and not any(self._is_suspect(c.request) for c in self._on(w.index))
        ]
        assert free, "a suspect takes the last device"

    def _check_opening(self, call: Call, command: CircuitChanged) -> None:
        key = (*call.request.owner, None if command.whole else call.request.plan.signature)  # type: ignore[union-attr]
        was_trial = key in self.opened
        enough = self._weight(call.request, whole=command.whole) >= 2 * self.opens_at > 0
        assert was_trial or enough, "a circuit opens without evidence"

    def _check_bounded(self, requests: Sequence[CallState]) -> None:
        """After deaths that are evidence enough no more such calls are let through."""
        for request in requests:
            if request.plan is None or not self.opens_at or not request.ran_isolated:
                continue
            last = max((d.at for d in self._against(request.owner) if d.call is request), default=None)
            if (
                last is None
                or last + OPEN_S <= self.now
                or any(d.together for d in self.died if d.call is request)
            ):
                continue
            if self._weight(request, sure=True) >= 2 * self.opens_at:
                refusal = self.scheduler.circuits.refusal(request.owner, request.plan, self.now)
                assert refusal is not None, "a guilty one goes on"

    def _answer(self, number: int, reason: str = "") -> None:
        request = self.calls[number].request
        is_trial = not reason and self.scheduler.circuits.is_trial(request)
        signature = request.plan and request.plan.signature
        self.died = [
            died
            for died in self.died
            if died.call is not request
            and not (
                is_trial
                and died.call.owner == request.owner
                and died.call.plan is not None
                and died.call.plan.signature == signature
            )
        ]
        super()._answer(number, reason)

    def _die(self, worker: int, death: Death = Death.KILLED) -> None:
        requests = [call.request for call in self._on(worker)]
        super()._die(worker, death)
        self._check_bounded(requests)

    # ------------------------------------------------------------------------------------------------- crimes

    def _plot(self, rng: random.Random, tenants: Sequence[str]) -> None:
        """Chooses who does what: one tenant in most worlds."""
        self.crime, self.criminal = rng.choice(["", *FATAL]), rng.choice(tenants)

    def _signature(self, rng: random.Random, tenant: str, operator: str) -> bytes:
        if self.crime and tenant == self.criminal and rng.random() < 0.7:
            return b"guilty" + (rng.randbytes(4) if rng.random() < 0.5 else b"")
        return operator.encode() + bytes([rng.randint(0, 3)])

    def _crime(self, call: Call) -> str:
        """What a call does to its worker; empty for nothing."""
        signature = None if call.request.plan is None else call.request.plan.signature
        return self.crime if isinstance(signature, bytes) and signature.startswith(b"guilty") else ""

    def _answerable(self) -> list[int]:
        return [number for number in super()._answerable() if not self._crime(self.calls[number])]
