"""Learned run times: how long calls of one operator, type and size keep a stream of a device.

Sizes share an estimate up to a power of two, and within it the times follow a line through the logarithms of
both, so that work that grows with the square of a size is told as well as work that does not grow at all.
What is measured is what a worker spends on a call, copies included. The names mean nothing here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npugrad_server.pool.types import PlannedCall

MAX_ESTIMATES = 4096
"""Estimates that are kept; the one that learned least recently goes first."""
STALE_S = 60.0
"""Age at which an estimate is doubted: one call is then let in as if nothing were known, lest an estimate
that refuses every call were never corrected."""
MAX_PASSED_OVER = 16
"""Calls that a device is passed over for, because it looked slow, before it gets one: a time that was learned
while the host was busy would otherwise keep it idle until it is stale."""
_LEAST_WEIGHT = 0.05
"""Weight of the newest call, once there are many."""
_BOUND_DEVIATIONS = 2.33
"""Standard deviations above the mean that a promise allows for: 99 of 100 calls take no longer."""
_LEAST_DEVIATION = 0.02
"""Of the logarithm of a time, however alike the times so far: timers and queues are not more exact."""
_FIRST_DEVIATION = 0.3
"""Of the logarithm of a time when a single call was seen."""
_MOST_SURPRISE = 1.5
"""How far, in logarithms, one call can be from what was expected of it: one that was held up, by its process
being swapped or stopped, is no news about the others."""
_WARM_UP_CALLS, _WARM_UP = 3, math.log(2.0)
"""The first calls may have paid for what later ones find ready: one that is so much quicker begins anew."""
_PRIOR_SLOPE, _PRIOR_WEIGHT = 1.0, 0.004
"""Seconds are in proportion to bytes until sizes differ enough to tell."""
_STEEPEST = 3.0
_LEAST_S = 1e-6


@dataclass(frozen=True)
class WorkSize:
    """What run times are looked up by.

    Attributes:
        key: Operator, type, and logarithm of the bytes to base 2, rounded down.
        log_bytes: Natural logarithm of the bytes of all operands and results.
    """

    key: tuple[str, str, int]
    log_bytes: float


def work_size_of(planned: PlannedCall) -> WorkSize:
    """The size of a call; it is the same for all calls of a plan."""
    plan = planned.plan
    metas = [meta for meta in (*plan.call.inputs.values(), *plan.outputs.values()) if meta is not None]
    nbytes = max(1, sum(meta.nbytes for meta in metas))
    dtype = str(metas[0].dtype) if metas else ""
    return WorkSize((plan.record.name, dtype, nbytes.bit_length() - 1), math.log(nbytes))


@dataclass
class Estimate:
    """What is known of calls of about one size on one device; times and sizes are natural logarithms.

    Attributes:
        size: Mean size.
        seconds: Mean time.
        slope: How much the time grows with the size.
        size_variance: Of the sizes.
        covariance: Of sizes and times.
        variance: Of the times about the line.
        count: Calls seen.
        learned_s: When it last learned, or was last doubted.
        passed_over: Calls that went to other devices since, because of it.
    """

    size: float
    seconds: float
    slope: float = _PRIOR_SLOPE
    size_variance: float = 0.0
    covariance: float = 0.0
    variance: float = _FIRST_DEVIATION**2
    count: int = 1
    learned_s: float = 0.0
    passed_over: int = 0

    def learn(self, size: float, seconds: float) -> None:
        """One more call."""
        by_size, by_time = size - self.size, seconds - self.seconds
        surprise = by_time - self.slope * by_size
        if self.count < _WARM_UP_CALLS and surprise < -_WARM_UP:
            self.size, self.seconds, self.count = size, seconds, 1
            return
        excess = surprise - min(max(surprise, -_MOST_SURPRISE), _MOST_SURPRISE)
        surprise, by_time = surprise - excess, by_time - excess
        self.count += 1
        weight = max(1 / self.count, _LEAST_WEIGHT)
        kept = 1 - weight
        self.size += weight * by_size
        self.seconds += weight * by_time
        self.size_variance = kept * (self.size_variance + weight * by_size**2)
        self.covariance = kept * (self.covariance + weight * by_size * by_time)
        self.variance = kept * self.variance + weight * surprise**2
        slope = (self.covariance + _PRIOR_SLOPE * _PRIOR_WEIGHT) / (self.size_variance + _PRIOR_WEIGHT)
        self.slope = min(max(slope, 0.0), _STEEPEST)


UNKNOWN = (0.0, 0.0)
"""What is expected of calls that nobody has seen."""
_MOST_DEVIATION = 1.5
"""Of the logarithm of a time, as far as the mean is concerned, which grows with the square of it."""


class RunTimes:
    """Times of calls that are done, by device; bounded in memory."""

    def __init__(self) -> None:
        """Knows none yet."""
        self._estimates: dict[tuple[int, tuple[str, str, int]], Estimate] = {}

    def __len__(self) -> int:
        return len(self._estimates)

    def learn(self, device: int, work: WorkSize, seconds: float, now: float) -> None:
        """A call was done.

        Args:
            device: Index of the device.
            work: Size of the call.
            seconds: What its worker spent on it.
            now: When.
        """
        key, log_s = (device, work.key), math.log(max(seconds, _LEAST_S))
        estimate = self._estimates.pop(key, None)
        if estimate is None:
            estimate = Estimate(work.log_bytes, log_s)
            if len(self._estimates) >= MAX_ESTIMATES:
                del self._estimates[next(iter(self._estimates))]
        else:
            estimate.learn(work.log_bytes, log_s)
        estimate.learned_s, estimate.passed_over = now, 0
        self._estimates[key] = estimate  # at the end, as the one that learned last

    def expect(self, devices: Iterable[int], work: WorkSize) -> tuple[float, float]:
        """How long a call is expected to run on any of some devices; those that know nothing do not count.

        Returns:
            Seconds on the average, over devices by how many calls each gets done, and seconds that 99 of 100
            such calls do not exceed on the quickest device; 0.0 where nothing is known. The first calls
            say nothing of the latter: they may have paid for what later ones find ready.
        """
        known, rate, bound_log_s = 0, 0.0, math.inf
        for device in devices:
            estimate = self._estimates.get((device, work.key))
            if estimate is not None:
                log_s = estimate.seconds + estimate.slope * (work.log_bytes - estimate.size)
                deviation = max(estimate.variance**0.5, _LEAST_DEVIATION)
                known += 1
                rate += math.exp(-log_s - min(deviation, _MOST_DEVIATION) ** 2 / 2)
                if estimate.count >= _WARM_UP_CALLS:
                    bound_log_s = min(bound_log_s, log_s + _BOUND_DEVIATIONS * deviation)
        if not known:
            return UNKNOWN
        return known / rate, math.exp(bound_log_s) if bound_log_s < math.inf else 0.0

    def is_known(self, device: int, work: WorkSize, now: float) -> bool:
        """Whether enough such calls were done on a device, and lately, to compare it with others."""
        estimate = self._estimates.get((device, work.key))
        if estimate is None or estimate.count < _WARM_UP_CALLS:
            return False
        return now - estimate.learned_s <= STALE_S

    def pass_over(self, device: int, work: WorkSize) -> bool:
        """Whether a call may pass over a device that looks slow; it is its turn after `MAX_PASSED_OVER`."""
        estimate = self._estimates[device, work.key]
        estimate.passed_over += 1
        return estimate.passed_over <= MAX_PASSED_OVER

    def doubt(self, devices: Iterable[int], work: WorkSize, now: float) -> bool:
        """Whether one call may be let in that is expected to take too long: none was done for long."""
        found = [self._estimates.get((device, work.key)) for device in devices]
        stale = [one for one in found if one is not None and now - one.learned_s > STALE_S]
        for estimate in stale:
            estimate.learned_s = now
        return bool(stale)
