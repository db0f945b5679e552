"""One worker process as the pool sees it: start, talk, end, wait.

Guarantees
    - `on_end` is called as soon as the process has ended, unless it reported why: it takes no more calls.
    - `on_exit` is called exactly once, after the process and all its descendants have ended: from then on
      they write nothing, and hold neither memory nor device.
    - Messages that the process sent before it ended are delivered first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from typing import TYPE_CHECKING

from npugrad_server.pool.arena import OutputArena
from npugrad_server.pool.reaper import collect_child, start_child
from npugrad_server.pool.sent_plans import SentPlans
from npugrad_server.pool.types import WORKER_MODULE
from npugrad_server.worker.descendants import MARK, end_descendants
from npugrad_server.worker.packets import MAX_MESSAGE_BYTES, decode, encode
from npugrad_server.worker.protocol import (
    DeviceFailed,
    OpenDevice,
    OpenFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad_server.pool.arena import InputArena
    from npugrad_server.pool.types import PoolSettings
    from npugrad_server.worker.protocol import Message

_log = logging.getLogger(__name__)

_DESCENDANTS_S = 5.0
"""Seconds to wait for the kernel to end the descendants that a worker left behind."""
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""Signals by which a process ends for its own faults. Others may come from anybody."""
_THREAD_SETTINGS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerProcess:
    """A process, its socket and its output arena. Created in a thread, then used on one event loop.

    Attributes:
        device: Name with options.
        incarnation: Number of this process among those of the device.
        exited: Set after everything has ended.
        outputs: Its output arena.
        plans: Plans sent to it, which later calls can refer to by number.
        was_killed: Whether it was ended by a signal that anybody may have sent.
    """

    def __init__(
        self,
        device: str,
        incarnation: int,
        inputs: InputArena,
        output_arena_bytes: int,
        threads: int,
        *,
        print_fd: int = 2,
        module: str = WORKER_MODULE,
        cann: str = "",
    ) -> None:
        """Starts the process; takes some milliseconds.

        Args:
            device: Name with options.
            incarnation: Number of this process among those of the device.
            inputs: Arena of the operands.
            output_arena_bytes: Size of its results' arena.
            threads: Number of linear algebra threads, unless the environment sets one.
            print_fd: Descriptor that it prints to.
            module: Module that it runs.
            cann: Release of CANN whose pages its records follow; empty for their own.

        Raises:
            OSError: The host is out of processes, memory or descriptors.
        """
        self.device = device
        self.incarnation = incarnation
        self.exited = asyncio.Event()
        self.plans = SentPlans(self.send)
        self._mark = uuid.uuid4().hex
        self._inputs = inputs
        self._release = [cann] * bool(cann)
        self._last_words = ""
        self.was_killed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.outputs = OutputArena(output_arena_bytes)
        try:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except BaseException:
            self.outputs.close()
            raise
        self._control.setblocking(False)
        try:
            self._process = self._spawn(module, theirs, threads, print_fd)
        except BaseException:
            self._control.close()
            self.outputs.close()
            raise
        finally:
            theirs.close()

    def _spawn(
        self, module: str, theirs: socket.socket, threads: int, print_fd: int
    ) -> subprocess.Popen[bytes]:
        # Libraries prefer different variables, so one that is set fills in for those that are not.
        given = next((os.environ[name] for name in _THREAD_SETTINGS if name in os.environ), str(threads))
        environment = dict.fromkeys(_THREAD_SETTINGS, given) | dict(os.environ) | {MARK: self._mark}
        return start_child(
            lambda: subprocess.Popen(
                [sys.executable, "-m", module, self.device, str(theirs.fileno()), *self._release],
                pass_fds=(theirs.fileno(), self._inputs.worker_fd, self.outputs.fd),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=print_fd,  # a library's prints must not mix with a command's output
                stderr=print_fd,
                # Ctrl-C must reach only the server, which then drains; the worker's children join its group.
                start_new_session=True,
            )
        )

    @property
    def pid(self) -> int:
        """Process number."""
        return self._process.pid

    def attach(
        self,
        on_message: Callable[[Message], None],
        on_exit: Callable[[str], None],
        on_end: Callable[[str], None] | None = None,
    ) -> None:
        """Starts listening, on the running event loop.

        Args:
            on_message: Called with every message.
            on_exit: Called last, with a readable description of how the process ended.
            on_end: Called with such a description as soon as it has ended, unless it reported why.

        Raises:
            RuntimeError: No thread can be started to wait for the process.
        """
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_exit, self._on_end = on_message, on_exit, on_end
        self._loop.add_reader(self._control, self._receive)
        self._waiter = threading.Thread(target=self._wait, name=f"wait-{self.device}", daemon=True)
        self._waiter.start()

    def open(self, settings: PoolSettings, canary_rounds: int = 1) -> None:
        """Tells it to open its device; the answer comes as a message."""
        message = OpenDevice(
            device=self.device,
            product=settings.product.value,
            streams=settings.streams_per_device,
            input_fd=self._inputs.worker_fd,
            input_bytes=self._inputs.nbytes,
            output_fd=self.outputs.fd,
            output_bytes=self.outputs.nbytes,
            prefault_bytes=settings.prefault_bytes,
            hang_grace_s=settings.hang_grace_s,
            run_limit_s=settings.run_limit_s,
            canary_rounds=canary_rounds,
        )
        self.send(message)

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Sends a message, with a descriptor if one is given; kills a process that cannot take it."""
        try:
            if descriptor is None:
                self._control.send(encode(message))
            else:
                socket.send_fds(self._control, [encode(message)], [descriptor])
        except OSError:  # gone, or it stopped reading: the buffer holds all that may be pending
            self.kill()

    def kill(self) -> None:
        """Kills it and its process group; `on_exit` follows."""
        # The number is not reused before `_reap`, so this never hits another process group.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def discard(self) -> None:
        """Kills a process whose `attach` failed, and waits for it; `on_exit` does not follow."""
        self.hang_up()
        self.kill()
        collect_child(self._process)
        self.outputs.close()

    def hang_up(self) -> None:
        """Closes our end of the socket, so that it ends by itself; `on_exit` follows. Idempotent."""
        if self._loop is not None and self._control.fileno() >= 0:
            self._loop.remove_reader(self._control)
        self._control.close()

    def _receive(self) -> None:
        """Reads all pending messages; kills a process that closed its end or sent an invalid one."""
        try:
            while packet := self._control.recv(MAX_MESSAGE_BYTES):
                message = decode(packet)
                if isinstance(message, (OpenFailed, DeviceFailed)):
                    self._last_words = message.message
                self._on_message(message)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            pass
        if self._loop is not None and self._control.fileno() >= 0:
            self._loop.remove_reader(self._control)
        self.kill()

    def _wait(self) -> None:
        """Waits, in a thread, until the process has ended, but leaves it to `_reap` to collect it.

        Until then its process and session numbers are not reused; by the latter its descendants are found.
        """
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        if ended is not None:
            exited = ended.si_code == os.CLD_EXITED
            self.was_killed = not exited and ended.si_status not in _CRASHES
            self._tell(self._ended, ended.si_status if exited else -ended.si_status)
        self.kill()  # its group; needs no descriptor, so it works even when none is left
        try:
            left = end_descendants(self._mark, self._process.pid, _DESCENDANTS_S)
        except OSError as error:
            _log.error("%s: cannot look for what its worker has left behind: %s", self.device, error)
        else:
            if left:
                _log.error("%s: processes %s of its worker did not end even after SIGKILL", self.device, left)
        self._tell(self._reap)

    def _tell(self, what: Callable[..., None], *words: int) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is listening
                self._loop.call_soon_threadsafe(what, *words)

    def _ended(self, status: int) -> None:
        if self._control.fileno() >= 0:
            self._receive()
        if self._on_end is not None and not self._last_words:
            self._on_end(_describe(status))

    def _reap(self) -> None:
        if self._control.fileno() >= 0:
            self._receive()
            self.hang_up()
        status = collect_child(self._process)
        self._waiter.join()
        self.exited.set()
        self._on_exit(self._last_words or _describe(status))


def _describe(status: int) -> str:
    if status >= 0:
        return f"the worker process ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"the worker process was killed by signal {-status} ({name})"
