"""The device under the service's own pool: workers that end are restarted, as in the server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from npugrad.errors import NpugradError
from npugrad.layout import view
from npugrad_server.acceptance.link import DeviceGone
from npugrad_server.pool import DevicePool

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    import numpy.typing as npt

    from npugrad.call import ExecutionInfo
    from npugrad_server.acceptance.job import Job
    from npugrad_server.acceptance.loop import LoopThread
    from npugrad_server.pool import DeviceStatus, PoolSettings

    Outputs = dict[str, npt.NDArray[Any]]

_MARGIN_S = 5.0


class SupervisedDevice:
    """A pool of one device, driven from a plain thread; made by `Rig.pool`.

    Attributes:
        pool: The pool; to be used only on its loop, with `on_loop`.
        start_limit_s: Seconds that the start of a worker may take in total.
    """

    def __init__(self, loop: LoopThread, settings: PoolSettings) -> None:
        """Opens the pool."""
        self._loop, self.start_limit_s = loop, settings.start_limit_s
        self.pool = loop.run(DevicePool.open(settings))

    def wait_ready(self) -> None:
        """Waits until the device is open.

        Raises:
            DeviceGone: It does not open.
        """
        try:
            self._loop.run(self.pool.wait_ready(self.start_limit_s + _MARGIN_S))
        except NpugradError as error:
            raise DeviceGone(str(error)) from None

    def submit(self, job: Job) -> Future[tuple[Outputs, ExecutionInfo]]:
        """Sends a job and returns at once; the future gets its outputs, or what `DevicePool.run` raises."""
        return self._loop.submit(self._run(job))

    def run(self, job: Job) -> tuple[Outputs, ExecutionInfo]:
        """Runs a job; raises what `DevicePool.admit` and `DevicePool.run` raise."""
        return self.submit(job).result()

    async def _run(self, job: Job) -> tuple[Outputs, ExecutionInfo]:
        planned = job.planned()
        with self.pool.admit(planned) as ticket:
            for name, meta in job.call.inputs.items():
                if meta is not None:
                    job.write(name, ticket.view(name))
            outcome = await self.pool.run(ticket)
            metas = {name: meta for name, meta in planned.plan.outputs.items() if meta is not None}
            return {n: view(meta, outcome.contents[n]).copy() for n, meta in metas.items()}, outcome.info

    def status(self) -> DeviceStatus:
        """Returns the device's current status."""
        return self._loop.call(lambda: self.pool.devices()[0])

    def wait(self, condition: Callable[[DeviceStatus], bool], timeout_s: float) -> DeviceStatus:
        """Waits until the device's status is as wanted or the time is up; returns the status then."""
        return self._loop.run(self._until(condition, timeout_s))

    async def _until(self, condition: Callable[[DeviceStatus], bool], timeout_s: float) -> DeviceStatus:
        changed = asyncio.Event()
        self.pool.on_change.append(changed.set)
        end = asyncio.get_running_loop().time() + timeout_s
        try:
            while not condition(self.pool.devices()[0]):
                changed.clear()
                await asyncio.wait_for(changed.wait(), end - asyncio.get_running_loop().time())
        except asyncio.TimeoutError:
            pass
        finally:
            self.pool.on_change.remove(changed.set)
        return self.pool.devices()[0]

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """Calls a function on the pool's loop, and returns its result."""
        return self._loop.call(function)

    def close(self) -> None:
        """Ends the pool and its worker."""
        self._loop.run(self.pool.close())
