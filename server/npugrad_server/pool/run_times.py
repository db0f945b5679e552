"""Learned run times: how long calls of one operator, type and size occupy a stream of a device.

Sizes between two powers of two share an estimate, in which the logarithm of the time is linear in that of the
size: this fits work that grows with the square of the size as well as work that does not grow at all.
Measured is the time that a worker spends on a call, copies included. The names mean nothing here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npugrad_server.pool.types import PlannedCall

MAX_ESTIMATES = 4096
"""Maximum number of estimates kept; the one that learned least recently is dropped first."""
STALE_S = 60.0
"""Age at which an estimate is doubted: one call is then admitted as if nothing were known, since an estimate
that refuses every call would never be corrected."""
MAX_PASSED_OVER = 16
"""Calls that pass over a device that looks slow before it gets one: otherwise a time learned while the host
was busy would keep the device idle until that time is stale."""
_LEAST_WEIGHT = 0.05
"""Weight of the newest call, once there are many."""
_BOUND_DEVIATIONS = 2.33
"""Standard deviations above the mean that a promise allows for: 99 of 100 calls take no longer."""
_LEAST_DEVIATION = 0.02
"""Least standard deviation of a time's logarithm, however alike the times: timers and queues vary as much."""
_FIRST_DEVIATION = 0.3
"""Standard deviation of a time's logarithm after a single call."""
_MOST_SURPRISE = 1.5
"""Limit, in logarithms, on how far a call's time counts as off its estimate: a call delayed because its
process was swapped or stopped says nothing about the others."""
_WARM_UP_CALLS, _WARM_UP = 3, math.log(2.0)
"""The first calls may include one-time setup: one of them that is this much faster restarts the estimate."""
_PRIOR_SLOPE, _PRIOR_WEIGHT = 1.0, 0.004
"""Time is assumed proportional to bytes until the sizes seen differ enough to tell."""
_STEEPEST = 3.0
_LEAST_S = 1e-6


@dataclass(frozen=True)
class WorkSize:
    """The size of a call, by which its run time is looked up.

    Attributes:
        key: Operator, type, and logarithm of the bytes to base 2, rounded down.
        log_bytes: Natural logarithm of the bytes of all operands and results.
    """

    key: tuple[str, str, int]
    log_bytes: float


def work_size_of(planned: PlannedCall) -> WorkSize:
    """Returns the size of a call; it is the same for all calls of a plan."""
    plan = planned.plan
    metas = [meta for meta in (*plan.call.inputs.values(), *plan.outputs.values()) if meta is not None]
    nbytes = max(1, sum(meta.nbytes for meta in metas))
    dtype = str(metas[0].dtype) if metas else ""
    return WorkSize((plan.record.name, dtype, nbytes.bit_length() - 1), math.log(nbytes))


@dataclass
class Estimate:
    """An estimate for calls of similar size on one device; times and sizes are natural logarithms.

    Attributes:
        size: Mean size.
        seconds: Mean time.
        slope: How much the time grows with the size.
        size_variance: Variance of the sizes.
        covariance: Covariance of sizes and times.
        variance: Variance of the times about the line.
        count: Calls seen.
        learned_s: When it last learned, or was last doubted.
        passed_over: Calls that went to other devices because of it since then.
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
        """Learns from one more call."""
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
"""The expectation for calls never seen before."""
_MOST_DEVIATION = 1.5
"""Limit on that standard deviation in the mean time, whose logarithm grows with the square of it."""


class RunTimes:
    """Run times of completed calls, by device; bounded in memory."""

    def __init__(self) -> None:
        """Knows none yet."""
        self._estimates: dict[tuple[int, tuple[str, str, int]], Estimate] = {}

    def __len__(self) -> int:
        return len(self._estimates)

    def learn(self, device: int, work: WorkSize, seconds: float, now: float) -> None:
        """Learns from a completed call.

        Args:
            device: Index of the device.
            work: Size of the call.
            seconds: Time its worker spent on it.
            now: Current time.
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
        self._estimates[key] = estimate  # at the end: it learned last

    def expect(self, devices: Iterable[int], work: WorkSize) -> tuple[float, float]:
        """Estimates how long a call runs on any of some devices; those without an estimate do not count.

        Returns:
            Mean seconds, each device weighted by its throughput, and the seconds that 99 of 100 such calls do
            not exceed on the quickest device; 0.0 where unknown. The first calls say nothing about the
            latter: they may include one-time setup.
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
        """Whether a device did enough such calls, recently enough, to be compared with others."""
        estimate = self._estimates.get((device, work.key))
        if estimate is None or estimate.count < _WARM_UP_CALLS:
            return False
        return now - estimate.learned_s <= STALE_S

    def pass_over(self, device: int, work: WorkSize) -> bool:
        """Whether a call may pass over a device that looks slow; at most `MAX_PASSED_OVER` calls may."""
        estimate = self._estimates[device, work.key]
        estimate.passed_over += 1
        return estimate.passed_over <= MAX_PASSED_OVER

    def doubt(self, devices: Iterable[int], work: WorkSize, now: float) -> bool:
        """Whether to admit one call although it is expected to take too long: an estimate is stale."""
        found = [self._estimates.get((device, work.key)) for device in devices]
        stale = [one for one in found if one is not None and now - one.learned_s > STALE_S]
        for estimate in stale:
            estimate.learned_s = now
        return bool(stale)
