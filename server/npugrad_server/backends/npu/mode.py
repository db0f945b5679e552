"""CANN's deterministic option: how a release treats it, and which calls rely on it.

Up to 8.5, CANN reads the context's option once, when the process loads its first kernel: a worker has one
mode, set before its first launch. From 9.0, it reads the process's option in the first phase of a call; all
streams of the process share it, so it changes only while none of them has a call.
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
        kept: Mode that it must keep for every call; None if each call chooses.
        refusal: Why none of its calls is deterministic; empty if they can be.
    """

    kept: bool | None
    refusal: str = ""


def offer(release: CannRelease | None, wanted: bool | None, process_option_missing: str) -> Offer:
    """Decides what a worker can do about determinism.

    Args:
        release: Release of CANN; None if unknown: one mode from the start is then right on any release.
        wanted: Mode that the device's name asks for; None if it asks for none.
        process_option_missing: Why the process's option cannot be set; empty if it can.
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
    """The deterministic option of process and context, changed only while no call uses it."""

    def __init__(self, runtime: Runtime, kept: bool | None) -> None:
        """Sets the option if one mode is kept; made after the device is taken and before any launch.

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
        """Keeps the option as a call wants it, unless one mode is kept, from its first phase to its end.

        Raises:
            DeviceError: The option cannot be set.
            DeviceLost: The process must exit.
        """
        wanted = wanted if self._kept is None else self._kept
        with self._condition:
            # The scheduler never runs calls of different modes at once; this only makes sure.
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
        """Keeps the option as it is, once nobody waits for it to change."""
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
