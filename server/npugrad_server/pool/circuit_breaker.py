"""Circuit breaker: who is suspected when workers die, and which calls are refused for it.

It has no clock: each event brings its time.

Guarantees
    - A death makes tenant and operator of the calls that may have caused it suspect, until those calls were
      answered, or for `window_s`. Calls of suspects run isolated (`isolation`).
    - Evidence is the death of a worker under an isolated call that was not answered later. Nobody can tell
      who sent a SIGKILL, so such a death weighs half of any other (`_WEIGHTS`). Deaths of two devices within
      `TOGETHER_S`, under calls that ran at the same time, are evidence against nobody.
    - A circuit opens once the evidence weighs as much as so many workers that died. That of a tenant and
      signature needs calls of that signature; that of a tenant and operator, calls of several signatures.
    - A circuit is half-open `OPEN_S` later: one call at a time is let through as its trial. A trial that
      succeeds closes the circuit; the death of its worker opens it again; any other end leaves it half-open.
    - A suspect is forgotten `window_s + OPEN_S` after its last death. At most `MOST_KEYS` are kept: the one
      whose last death was longest ago is dropped first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from npugrad_server.pool.state import CallState, Signed

WINDOW_S = 60.0
"""The shortest `window_s`."""
OPEN_S = 10.0
TOGETHER_S = 1.0
PACE = 10
"""Times that a device takes to open, for which calls of a suspect wait before they may cost another start."""
MOST_KEYS = 4096
_TRIAL_S = 1.0
"""Seconds that a caller is asked to wait while a trial, whose outcome decides, is in progress."""


class Death(str, Enum):
    """How a worker ended under a call; the value says it to people."""

    DIED = "died"
    TIMED_OUT = "ended by the server after a time-out"
    KILLED = "killed from outside or for lack of memory"

    def __str__(self) -> str:
        """The words."""
        return str(self.value)


_WEIGHTS = {Death.DIED: 2, Death.TIMED_OUT: 2, Death.KILLED: 1}
_FULL = 2
"""Weight of a death that only the call or its device can have caused."""


@dataclass(frozen=True)
class Refusal:
    """Why a call is not let through.

    Attributes:
        deaths: How the workers ended that are held against such calls.
        opens_at: How many that died open a circuit.
        window_s: Seconds within which they count.
        retry_after_s: Seconds until such a call may be tried.
        whole: Whether all calls of the operator are refused, not only those of one signature.
    """

    deaths: tuple[Death, ...]
    opens_at: int
    window_s: float
    retry_after_s: float
    whole: bool = False

    @property
    def counts(self) -> str:
        """Such as ``"1 died, 2 ended by the server after a time-out"``."""
        counts = Counter(self.deaths)
        return ", ".join(f"{counts[death]} {death}" for death in Death if counts[death])

    @property
    def detail(self) -> str:
        """Human-readable description."""
        what = "of different signatures of this caller and operator" if self.whole else "of this signature"
        return (
            f"found {len(self.deaths)} workers lost under isolated calls {what} within {self.window_s:g} s "
            f"({self.counts}); expected fewer than {self.opens_at}, or {_FULL * self.opens_at} if killed; "
            f"one may be tried again in {self.retry_after_s:.1f} s"
        )


@dataclass(eq=False)
class _Loss:
    """A worker's death: when, of which device, and whether another device's was at the same time."""

    at: float
    device: int
    together: bool = False
    records: list[_Record] = field(default_factory=list)


@dataclass(eq=False)
class _Record:
    """A worker's death under a call that may have caused it."""

    call: CallState
    loss: _Loss
    death: Death
    counts: bool

    @property
    def signature(self) -> Hashable:
        return None if self.call.plan is None else self.call.plan.signature


@dataclass
class _Circuit:
    """When it opened, and its trial call."""

    opened_s: float
    trial: int | None = None


@dataclass
class _Suspicion:
    """What is held against a tenant and operator; circuits by signature, None for all of the operator."""

    records: list[_Record] = field(default_factory=list)
    circuits: dict[Hashable, _Circuit] = field(default_factory=dict)

    @property
    def last_s(self) -> float:
        return max((record.loss.at for record in self.records), default=float("-inf"))


class CircuitBreaker:
    """Suspects, and the circuits of those against whom there is enough; all others' circuits are closed.

    Attributes:
        opening_s: Seconds that a device took last, from its loss until it was ready again.
    """

    def __init__(self, opens_at: int) -> None:
        """Suspects nobody.

        Args:
            opens_at: Workers that must die for a circuit to open; 0 for never.
        """
        self._opens_at = opens_at
        self._suspicions: OrderedDict[tuple[str, str], _Suspicion] = OrderedDict()
        self._losses: deque[_Loss] = deque()
        self._look_s = float("-inf")
        self.opening_s = 0.0

    def __len__(self) -> int:
        """Returns the number of suspects; if 0, every call is let through."""
        return len(self._suspicions)

    @property
    def window_s(self) -> float:
        """Seconds for which a death is remembered: long enough for devices that open slowly."""
        return max(WINDOW_S, PACE * self.opening_s)

    @property
    def open_count(self) -> int:
        """Circuits that are open or half-open."""
        return sum(len(found.circuits) for found in self._suspicions.values())

    def opened(self, seconds: float) -> None:
        """Notes how long a device took from its loss until it was ready again."""
        self.opening_s, self._look_s = seconds, float("-inf")

    # --------------------------------------------------------------------------------------------- suspects

    def suspects(self, call: CallState) -> bool:
        """Whether the tenant of a call is suspect with its operator."""
        return bool(self._suspicions) and call.plan is not None and call.owner in self._suspicions

    def suspects_tenant(self, tenant: str) -> bool:
        """Whether a tenant is suspect with any operator."""
        return any(name == tenant for name, _ in self._suspicions)

    def is_serial(self, call: CallState) -> bool:
        """Whether suspect calls like this one run one at a time: some died together with others.

        Otherwise they could do so again and again, and nobody would learn whose fault it is.
        """
        found = self._suspicions.get(call.owner)
        return found is not None and any(record.loss.together for record in found.records)

    def next_s(self, call: CallState) -> float:
        """When a suspect call may cost the only device another start."""
        found = self._suspicions[call.owner]
        is_heavy = sum(_WEIGHTS[record.death] for record in found.records) >= _FULL
        return found.last_s + PACE * self.opening_s if is_heavy else found.last_s

    def expires_s(self, call: CallState) -> float:
        """When a suspect is forgotten if nothing happens."""
        return self._suspicions[call.owner].last_s + self.window_s + OPEN_S

    def forget(self, now: float) -> None:
        """Forgets suspects whose last death was long ago."""
        if now < self._look_s:
            return
        kept_s = self.window_s + OPEN_S
        for owner, found in list(self._suspicions.items()):
            is_tried = any(circuit.trial is not None for circuit in found.circuits.values())
            if not is_tried and found.last_s + kept_s <= now:
                del self._suspicions[owner]
        self._look_s = min((found.last_s + kept_s for found in self._suspicions.values()), default=now)

    # --------------------------------------------------------------------------------------------- circuits

    def refusal(self, owner: tuple[str, str], plan: Signed, now: float, call: int = 0) -> Refusal | None:
        """Returns why a call would not be let through; None if it would.

        Args:
            owner: Its tenant and operator.
            plan: Has its signature.
            now: Current time.
            call: Its number, if it may be the trial.
        """
        self.forget(now)
        found = self._suspicions.get(owner)
        for key in (plan.signature, None) if found and found.circuits else ():
            circuit = found.circuits.get(key) if found else None
            if found is None or circuit is None:
                continue
            left_s = circuit.opened_s + OPEN_S - now
            if left_s > 0 or circuit.trial not in (None, call):
                return self._refusal(found, key, left_s if left_s > 0 else _TRIAL_S, now)
        return None

    def _refusal(self, found: _Suspicion, key: Hashable, retry_after_s: float, now: float) -> Refusal:
        deaths = tuple(record.death for record in self._evidence(found, key, now))
        return Refusal(deaths, self._opens_at, self.window_s, retry_after_s, key is None)

    def enter(self, call: CallState, now: float) -> Refusal | None:
        """Lets a call through, as the trial of half-open circuits, or returns why not."""
        if call.plan is None:
            return None
        refusal = self.refusal(call.owner, call.plan, now, call.id)
        if refusal is None:
            for circuit in self._circuits_of(call).values():
                circuit.trial = call.id
        return refusal

    def _circuits_of(self, call: CallState) -> dict[Hashable, _Circuit]:
        """The circuits that refuse calls like this one unless they are half-open."""
        found = self._suspicions.get(call.owner)
        if call.plan is None or found is None or not found.circuits:
            return {}
        return {key: found.circuits[key] for key in (call.plan.signature, None) if key in found.circuits}

    def is_trial(self, call: CallState) -> bool:
        """Whether a call is the trial of a half-open circuit."""
        return any(circuit.trial == call.id for circuit in self._circuits_of(call).values())

    def died(
        self,
        device: int,
        at: float,
        death: Death,
        calls: Iterable[CallState],
        began_s: float,
        now: float | None = None,
    ) -> list[tuple[CallState, Refusal]]:
        """A worker died.

        Args:
            device: Of which device.
            at: When.
            death: How.
            calls: Those that may have caused it.
            began_s: When the first of its calls was started; infinitely early without any.
            now: Current time, from which circuits are open; by default that of the death.

        Returns:
            The circuits that opened, each with the call that opened it.
        """
        now = at if now is None else now
        self.forget(now)
        while self._losses and self._losses[0].at < at - TOGETHER_S:
            self._losses.popleft()
        loss = _Loss(at, device)
        for other in self._losses:
            if other.device != device and began_s < other.at:
                _count_for_nobody(loss)
                _count_for_nobody(other)
        self._losses.append(loss)
        known = [call for call in calls if call.plan is not None]
        return [(call, refusal) for call in known for refusal in self._suspect(call, loss, death, now)]

    def _suspect(self, call: CallState, loss: _Loss, death: Death, now: float) -> Sequence[Refusal]:
        found = self._suspicions.setdefault(call.owner, _Suspicion())
        self._suspicions.move_to_end(call.owner)
        found.records = [old for old in found.records if old.loss.at > loss.at - self.window_s]
        record = _Record(call, loss, death, counts=call.ran_isolated)
        found.records.append(record)
        loss.records.append(record)
        call.spared += loss.together or death is Death.KILLED
        if len(self._suspicions) > MOST_KEYS:
            self._suspicions.popitem(last=False)
        if loss.together or not (record.counts and self._opens_at):
            return ()
        keys = [key for key in (record.signature, None) if self._opens(found, key, call, now)]
        return [self._refusal(found, key, OPEN_S, now) for key in keys]

    def _opens(self, found: _Suspicion, key: Hashable, call: CallState, now: float) -> bool:
        """Opens a circuit after a death if that was its trial's or there is enough; whether that is news."""
        circuit = found.circuits.get(key)
        was_trial = circuit is not None and circuit.trial == call.id
        if not was_trial and self._weight(found, key, now) < self._limit(key):
            return False
        found.circuits[key] = _Circuit(now, None if was_trial or circuit is None else circuit.trial)
        return was_trial or circuit is None

    def _limit(self, key: Hashable) -> int:
        """Weight of evidence that opens a circuit; for a whole operator that of two signatures at least."""
        return _FULL * (self._opens_at if key is not None else max(2, self._opens_at))

    def _evidence(self, found: _Suspicion, key: Hashable, now: float) -> list[_Record]:
        return [
            record
            for record in found.records
            if record.counts and not record.loss.together and record.loss.at > now - self.window_s
            if key in (None, record.signature)
        ]

    def _weight(self, found: _Suspicion, key: Hashable, now: float) -> int:
        """What the evidence weighs; for all of an operator, each signature counts as one death at most."""
        weights = Counter[object]()
        for record in self._evidence(found, key, now):
            weights[record.signature] += _WEIGHTS[record.death]
        return sum(weight if key is not None else min(weight, _FULL) for weight in weights.values())

    def answered(self, call: CallState, now: float, *, good: bool) -> list[bool]:
        """A call was answered, so what died under it earlier is not held against it any more.

        Returns:
            For each circuit that this closed whether it was that of the whole operator.
        """
        found = self._suspicions.get(call.owner)
        if found is None or call.plan is None:
            return []
        closed = [key for key, c in self._circuits_of(call).items() if good and c.trial == call.id]
        before, self._look_s = len(found.records), now
        signatures = {key for key in closed if key is not None}
        found.records = [r for r in found.records if r.call is not call and r.signature not in signatures]
        if len(found.records) < before:
            closed += [
                key
                for key in self._circuits_of(call)
                if key not in closed and self._weight(found, key, now) < self._limit(key)
            ]
        for key in closed:
            del found.circuits[key]
        if not found.records and not found.circuits:
            del self._suspicions[call.owner]
        return [key is None for key in closed]

    def left(self, call: CallState) -> None:
        """Notes that a call ended; if it was an undecided trial, another call may be the next one."""
        for circuit in self._circuits_of(call).values():
            if circuit.trial == call.id:
                circuit.trial = None


def _count_for_nobody(loss: _Loss) -> None:
    """Takes a death back that came together with another device's."""
    if not loss.together:
        loss.together = True
        for record in loss.records:
            record.call.spared += record.death is not Death.KILLED
