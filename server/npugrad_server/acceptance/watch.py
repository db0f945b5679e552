"""The states a device goes through under the service's pool, with their times."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from npugrad_server.pool import DeviceState

if TYPE_CHECKING:
    from npugrad_server.acceptance.step import StepLog
    from npugrad_server.acceptance.supervised import SupervisedDevice
    from npugrad_server.pool import DeviceStatus


@dataclass(frozen=True)
class Moment:
    """A device entered a state.

    Attributes:
        at_s: `time.monotonic()`.
        status: Status of the device then.
    """

    at_s: float
    status: DeviceStatus


class Watch:
    """Records every state of a device from now on.

    Attributes:
        before: Status of the device at the start.
    """

    def __init__(self, device: SupervisedDevice) -> None:
        """Starts recording."""
        self.before = device.status()
        self._device, self._moments = device, list[Moment]()
        device.on_loop(lambda: device.pool.on_change.append(self._note))

    def _note(self) -> None:
        self._moments.append(Moment(time.monotonic(), self._device.pool.devices()[0]))

    def wait_back(self) -> Moment | None:
        """Waits until the device is ready in a new process; returns None if it does not come back."""
        self._device.wait(self._is_settled, self._device.start_limit_s)
        found = [moment for moment in self._moments if self._is_settled(moment.status)]
        return found[0] if found and found[0].status.state is DeviceState.READY else None

    def _is_settled(self, status: DeviceStatus) -> bool:
        if status.state is DeviceState.DOWN:
            return True
        return status.state is DeviceState.READY and status.restarts > self.before.restarts

    @property
    def left(self) -> Moment | None:
        """When it first was not ready; None if it always was."""
        return next((m for m in self._moments if m.status.state is not DeviceState.READY), None)

    @property
    def path(self) -> str:
        """The states in order, as text."""
        states = [str(self.before.state), *(str(moment.status.state) for moment in self._moments)]
        return " -> ".join(state for state, _ in groupby(states))

    def check_back(self, out: StepLog, name: str) -> None:
        """Checks that the device, having lost its worker, comes back in a new process; records how fast.

        Args:
            out: Receives the checks and the table.
            name: How the worker was lost.
        """
        back, left = self.wait_back(), self.left
        out.check(
            f"{name}: the device leaves the pool and comes back",
            back is not None and left is not None,
            f"ready in a new process within {self._device.start_limit_s:g} s",
            self.path,
        )
        if back is None or left is None:
            return
        out.check(
            f"{name}: another process has the device",
            back.status.pid not in (None, self.before.pid),
            f"another one than {self.before.pid}",
            back.status.pid,
        )
        out.table(
            f"Replacing the worker: {name}",
            ("from", "to", "took [s]"),
            [("the device leaves the pool", "it is ready again", back.at_s - left.at_s)],
        )
