"""The device pool: admission, scheduling, worker processes and the memory they share."""

from __future__ import annotations

from npugrad_server.pool.device_pool import DevicePool
from npugrad_server.pool.reaper import keep_reaping
from npugrad_server.pool.ticket import Ticket
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
    "CallPlan",
    "DevicePool",
    "DeviceState",
    "DeviceStatus",
    "Outcome",
    "PlannedCall",
    "PoolObserver",
    "PoolSettings",
    "PoolStats",
    "Ticket",
    "keep_reaping",
]
