"""The deterministic option of CANN: what a release makes of it, and who holds it while a call is on its way.

Up to 8.5 CANN reads the option of the context once, when the process loads its first kernel: a worker has one
mode from before its first launch. From 9.0 it reads the option of the process in the first phase of a call;
all streams of the process share that, so it changes only while none of them has a call.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npugrad.releases import CannRelease
from npugrad_server.acl.runtime import AclError
from npugrad_server.backends.npu.failures import device_error, device_lost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad.operator import OpRecord
    from npugrad_server.acl.runtime import Runtime

FIRST_TO_SWITCH = CannRelease.parse("9.0.0-beta.1")
"""Oldest release whose public source reads the option again for each call."""


@dataclass(frozen=True)
class Offer:
    """What a worker can do about determinism.

    Attributes:
        kept: Mode that it has to keep for every call; None where each call chooses.
        refusal: Why none of its calls is deterministic; empty where they can be.
    """

    kept: bool | None
    refusal: str = ""


def offer(release: CannRelease | None, wanted: bool | None, process_option_missing: str) -> Offer:
    """What a worker offers.

    Args:
        release: Release of CANN; None when unknown. Then one mode from the start is right on any.
        wanted: Mode that the device is to keep, as its name says; None without a wish.
        process_option_missing: Why the option of the process cannot be set; empty when it can.
    """
    reads_once = release is not None and release < FIRST_TO_SWITCH
    reads = f"CANN {release} reads" if release is not None else "CANN of unknown release may read"
    if wanted is False:
        return Offer(False, "the device was named with deterministic=0")
    if process_option_missing and not reads_once:
        return Offer(False, f"{reads} the option of the process, and {process_option_missing}")
    if wanted or (release is not None and not reads_once):
        return Offer(wanted)
    return Offer(
        False,
        f"{reads} the option once, before the first launch, which was without it; name the device with "
        "?deterministic=1, such as npu:0?deterministic=1, to have every call of it deterministic",
    )


class Mode:
    """The deterministic option of process and context: changed only while nobody uses them."""

    def __init__(self, runtime: Runtime, kept: bool | None) -> None:
        """Sets it where it is to be kept; to be made after the device was taken and before any launch.

        Raises:
            AclError: It cannot be set.
        """
        self._runtime, self._kept = runtime, kept
        self._condition = threading.Condition()
        self._users = 0
        self._waiting = 0
        self._deterministic: bool | None = None
        if kept is not None:
            runtime.set_deterministic(kept)
            self._deterministic = kept

    @contextmanager
    def held(self, record: OpRecord, wanted: bool) -> Iterator[None]:
        """Keeps the option as a call wants it, unless it is kept for all, from its first phase to its end.

        Raises:
            DeviceError: The option cannot be set.
            DeviceLost: The process has to go.
        """
        wanted = wanted if self._kept is None else self._kept
        with self._condition:
            # The scheduler lets no calls of different modes meet here; this only makes sure.
            self._waiting += 1
            self._condition.wait_for(lambda: not self._users or self._deterministic == wanted)
            self._waiting -= 1
            self._condition.notify_all()
            self._set(record, wanted)
            self._users += 1
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def as_it_is(self) -> Iterator[None]:
        """Keeps the option, whatever it is, behind those who wait for it to change."""
        with self._condition:
            self._condition.wait_for(lambda: not self._waiting)
            self._users += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._condition:
            self._users -= 1
            self._condition.notify_all()

    def _set(self, record: OpRecord, wanted: bool) -> None:
        if self._deterministic == wanted:
            return
        self._deterministic = None
        try:
            self._runtime.set_deterministic(wanted)
        except AclError as error:
            if error.fault.action.ends_worker:
                raise device_lost(record.name, error) from error
            raise device_error(record.name, error) from None
        self._deterministic = wanted
