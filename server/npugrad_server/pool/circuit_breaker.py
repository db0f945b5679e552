"""Circuit breaker: calls that kill workers are refused for a while, by tenant and signature.

It has no clock: each event brings its time.

Guarantees
    - A circuit opens after a number of deaths within `WINDOW_S`. It is half-open `OPEN_S` later: one call
      at a time is let through as its trial. A trial that succeeds closes the circuit; the death of its
      worker opens it again; any other end leaves it half-open.
    - A key is forgotten `WINDOW_S + OPEN_S` after its last death. At most `MOST_KEYS` keys are kept: the one
      whose last death was longest ago is dropped first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

WINDOW_S = 60.0
OPEN_S = 10.0
MOST_KEYS = 4096
_TRIAL_S = 1.0
"""Seconds that a caller is asked to wait while a trial, whose outcome decides, is in progress."""


class Death(str, Enum):
    """How a worker ended under a call; the value says it to people."""

    DIED = "died"
    TIMED_OUT = "ended by the server after a time-out"
    WRONG = "ended by the server for wrong results"

    def __str__(self) -> str:
        """The words."""
        return str(self.value)


@dataclass(frozen=True)
class Refusal:
    """Why a call is not let through.

    Attributes:
        deaths: How the workers ended that were lost under such calls within `WINDOW_S`.
        opens_at: How many deaths open a circuit.
        retry_after_s: Seconds until such a call may be tried.
    """

    deaths: tuple[Death, ...]
    opens_at: int
    retry_after_s: float

    @property
    def counts(self) -> str:
        """Such as ``"1 died, 2 ended by the server after a time-out"``."""
        counts = Counter(self.deaths)
        return ", ".join(f"{counts[death]} {death}" for death in Death if counts[death])

    @property
    def detail(self) -> str:
        """Human-readable description."""
        return (
            f"found {len(self.deaths)} workers lost under calls of this signature within {WINDOW_S:g} s "
            f"({self.counts}); expected fewer than {self.opens_at}; one may be tried again in "
            f"{self.retry_after_s:.1f} s"
        )


@dataclass
class _Circuit:
    """Circuit of a key: times and kinds of deaths; when it opened, None while closed; its trial call."""

    deaths: list[tuple[float, Death]] = field(default_factory=list)
    opened_s: float | None = None
    trial: int | None = None


class CircuitBreaker:
    """The circuits of all keys under which workers died; every other key's circuit is closed."""

    def __init__(self, opens_at: int) -> None:
        """Starts with every circuit closed.

        Args:
            opens_at: Deaths within `WINDOW_S` that open a circuit; 0 for never.
        """
        self._opens_at = opens_at
        self._circuits: OrderedDict[Hashable, _Circuit] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of keys kept; if 0, every call is let through."""
        return len(self._circuits)

    @property
    def open_count(self) -> int:
        """Circuits that are open or half-open."""
        return sum(circuit.opened_s is not None for circuit in self._circuits.values())

    def refusal(self, key: Hashable, now: float) -> Refusal | None:
        """Returns why a call with this key would not be let through; None if it would."""
        self._forget(now)
        circuit = self._circuits.get(key)
        if circuit is None or circuit.opened_s is None:
            return None
        left_s = circuit.opened_s + OPEN_S - now
        if left_s <= 0 and circuit.trial is None:
            return None
        deaths = tuple(death for _, death in circuit.deaths)
        return Refusal(deaths, self._opens_at, left_s if left_s > 0 else _TRIAL_S)

    def enter(self, key: Hashable, call: int, now: float) -> Refusal | None:
        """Lets a call through, as the trial if its circuit is half-open, or returns why not.

        Args:
            key: Its key.
            call: Its number.
            now: Current time.
        """
        refusal = self.refusal(key, now)
        circuit = self._circuits.get(key)
        if refusal is None and circuit is not None and circuit.opened_s is not None:
            circuit.trial = call
        return refusal

    def is_trial(self, key: Hashable, call: int) -> bool:
        """Whether a call is the trial of a half-open circuit."""
        circuit = self._circuits.get(key)
        return circuit is not None and circuit.trial == call

    def died(self, key: Hashable, call: int, now: float, death: Death = Death.DIED) -> bool:
        """Counts a worker's death that a call caused; returns whether its circuit opened."""
        if not self._opens_at:
            return False
        self._forget(now)
        circuit = self._circuits.setdefault(key, _Circuit())
        self._circuits.move_to_end(key)
        circuit.deaths = [(at, how) for at, how in circuit.deaths if at > now - WINDOW_S] + [(now, death)]
        was_trial, was_open = circuit.trial == call, circuit.opened_s is not None
        if was_trial or len(circuit.deaths) >= self._opens_at:
            circuit.opened_s = max(now, circuit.opened_s or now)
        if was_trial:
            circuit.trial = None
        if len(self._circuits) > MOST_KEYS:
            self._circuits.popitem(last=False)
        return circuit.opened_s is not None and (was_trial or not was_open)

    def succeeded(self, key: Hashable, call: int) -> bool:
        """Notes that a call succeeded; returns whether that closed its circuit."""
        if not self.is_trial(key, call):
            return False
        del self._circuits[key]
        return True

    def left(self, key: Hashable, call: int) -> None:
        """Notes that a call ended; if it was an undecided trial, another call may be the next one."""
        circuit = self._circuits.get(key)
        if circuit is not None and circuit.trial == call:
            circuit.trial = None

    def _forget(self, now: float) -> None:
        while self._circuits:
            key, circuit = next(iter(self._circuits.items()))
            if circuit.trial is not None or circuit.deaths[-1][0] + WINDOW_S + OPEN_S > now:
                return
            del self._circuits[key]
