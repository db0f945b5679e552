"""The device pool: admission, scheduling, worker processes and the memory they share."""

from __future__ import annotations

from npugrad_server.pool.admission import Admission
from npugrad_server.pool.device_pool import DevicePool
from npugrad_server.pool.orphans import keep_reaping
from npugrad_server.pool.types import (
    CallPlan,
    DeviceState,
    DeviceStatus,
    Outcome,
    PlannedCall,
    PoolObserver,
    PoolSettings,
    PoolStats,
)

__all__ = [
    "Admission",
    "CallPlan",
    "DevicePool",
    "DeviceState",
    "DeviceStatus",
    "Outcome",
    "PlannedCall",
    "PoolObserver",
    "PoolSettings",
    "PoolStats",
    "keep_reaping",
]
