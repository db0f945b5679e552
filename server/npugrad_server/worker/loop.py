"""The worker's threads: one listens, the others are streams.

The listening thread is not the main one, because the main thread opens the device, which can take long, and
a closed socket must end the process even then.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from queue import SimpleQueue
from typing import TYPE_CHECKING, NoReturn

from npugrad.ops import OPERATORS
from npugrad.products import product_from_name
from npugrad_server.backends import make_backend
from npugrad_server.backends.base import DeviceLost, DeviceUnusable
from npugrad_server.backends.canary import Canaries
from npugrad_server.devices import parse_device
from npugrad_server.worker.call import WorkerCall
from npugrad_server.worker.canary_messages import RunCanary
from npugrad_server.worker.descendants import leave
from npugrad_server.worker.execute import Arenas, canary, execute, memory, plan
from npugrad_server.worker.packets import MAX_MESSAGE_BYTES, decode, encode, pack
from npugrad_server.worker.protocol import (
    AbandonCall,
    AskMemory,
    AskWorkspace,
    CallDone,
    CallUnknown,
    DeviceFailed,
    DeviceOpening,
    DeviceReady,
    ForgetPlan,
    OpenDevice,
    OpenFailed,
    Ping,
    Pong,
    RunCall,
    WorkspaceGranted,
    WorkspaceRefused,
)
from npugrad_server.worker.run_again import RunAgain

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from npugrad.operator import OpRecord
    from npugrad_server.backends.base import Backend
    from npugrad_server.worker.plans import WorkerPlan
    from npugrad_server.worker.protocol import Message

EXIT_DEVICE_LOST = 70
"""Exit status after the device was lost; only for logs, as the pool was told before."""
OPERATORS.load()  # now, and not while a call waits
_MAX_REASON = 2000
_NO_CALL = 0
"""In place of a call's number: the device failed in a canary."""
_CLOSE_S = 1.0
"""Seconds an idle device has to close cleanly when the socket is closed."""


class Worker:
    """One process for one device."""

    def __init__(self, control: socket.socket, records: Mapping[str, OpRecord] = OPERATORS) -> None:
        """Starts to listen.

        Args:
            control: Packet socket to the pool.
            records: The operators by name.
        """
        self._control, self._records = control, records
        self._orders: SimpleQueue[WorkerCall | AskWorkspace | AskMemory | RunCanary | OpenDevice | None] = (
            SimpleQueue()
        )
        self._calls: dict[int, WorkerCall] = {}
        self._plans: dict[int, WorkerPlan] = {}  # for the listening thread; the pool bounds it by ForgetPlan
        self._in_hand = 0
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def serve(self) -> int:
        """Opens the device, then runs calls on this thread and on a thread for each other stream.

        Returns:
            Exit status: 0 if the socket was closed, 1 if the device did not open.
        """
        opening = self._orders.get()
        if not isinstance(opening, OpenDevice):
            return 0
        try:
            arenas, backend = Arenas(opening), self._open(opening)
            self._canaries = Canaries(backend, product_from_name(opening.product))
            if len(self._canaries):
                self._say_stage("comparing first, tiny calls with the reference")
            wrong = self._canaries.first_wrong(opening.canary_rounds)
        except (DeviceUnusable, DeviceLost) as error:
            self._send(OpenFailed(str(error)[:_MAX_REASON], error.restart_policy.value))
            return 1
        except Exception as error:
            self._send(OpenFailed(f"{type(error).__name__}: {error}"[:_MAX_REASON]))
            return 1
        if wrong is not None:
            message = f"{wrong.operator}: a canary was wrong twice: {wrong.detail}"
            self._send(OpenFailed(message[:_MAX_REASON], wrong=wrong.operator))
            return 1
        compared = len(self._canaries.first(opening.canary_rounds))
        self._send(_ready(backend, len(self._canaries), compared))
        others = [
            threading.Thread(target=self._stream, args=(backend, arenas, index), name=f"stream-{index}")
            for index in range(1, opening.streams)
        ]
        for thread in others:
            thread.start()
        self._stream(backend, arenas, 0)
        for thread in others:
            thread.join()
        backend.close()
        return 0

    def _open(self, opening: OpenDevice) -> Backend:
        device = parse_device(opening.device)
        backend = make_backend(device.kind, self._records)
        self._say_stage("opening the device")
        backend.open(device, product_from_name(opening.product), opening.streams, self._say_stage)
        return backend

    def _say_stage(self, stage: str) -> None:
        self._send(DeviceOpening(stage))

    def _stream(self, backend: Backend, arenas: Arenas, index: int) -> None:
        while isinstance(order := self._orders.get(), (WorkerCall, AskWorkspace, AskMemory, RunCanary)):
            call = _NO_CALL if isinstance(order, RunCanary) else order.call
            answer: Message
            try:
                if isinstance(order, WorkerCall):
                    answer = execute(backend, arenas, order, index)
                elif isinstance(order, AskWorkspace):
                    answer = plan(backend, order)
                elif isinstance(order, AskMemory):
                    answer = memory(backend, order)
                else:
                    answer = canary(self._canaries, order, index)
            except DeviceLost as lost:
                self._end(call, lost)
            with self._lock:
                # Before the answer, after which the pool may send the same call again.
                self._calls.pop(call, None)
            self._send(answer)
            with self._lock:
                self._in_hand -= 1
            del order  # with its operands, some of which are copies
        self._orders.put(None)  # for the next stream

    def _end(self, call: int, lost: DeviceLost) -> NoReturn:
        """Reports that the device is lost and ends the process; nothing of the device is released."""
        # Streams fail together; one report is enough, and no other answer may follow it.
        self._ending.acquire()
        message = str(lost)[:_MAX_REASON]
        self._send(DeviceFailed(call, message, lost.code, lost.restart_policy.value, lost.retry, lost.exempt))
        os._exit(EXIT_DEVICE_LOST)

    def _listen(self) -> None:
        """Takes orders until the pool is gone, then ends the process: at once, or cleanly if idle."""
        try:
            with contextlib.suppress(OSError):
                while packet := self._control.recv(MAX_MESSAGE_BYTES):
                    self._take(decode(packet))
        except ValueError:
            traceback.print_exc()
            os._exit(2)  # without orders the process would only block its device
        with self._lock:
            idle = not self._in_hand
        if idle:
            self._orders.put(None)
            threading.Event().wait(_CLOSE_S)
        leave(0)

    def _take(self, message: Message) -> None:  # noqa: C901 -- one branch for each kind of message
        if isinstance(message, RunAgain):
            known = self._plans.get(message.plan)
            if known is None:
                self._send(CallUnknown(message.call))
            else:
                self._begin(WorkerCall(message, self._send, plan=known))
        elif isinstance(message, RunCall):
            call = WorkerCall(message, self._send)
            if message.plan is not None:
                self._plans[message.plan] = call.plan
            self._begin(call)
        elif isinstance(message, ForgetPlan):
            self._plans.pop(message.plan, None)
        elif isinstance(message, OpenDevice):
            self._orders.put(message)
        elif isinstance(message, (AskWorkspace, AskMemory, RunCanary)):
            with self._lock:
                self._in_hand += 1
            self._orders.put(message)
        elif isinstance(message, Ping):
            self._send(Pong())
        elif isinstance(message, (AbandonCall, WorkspaceGranted, WorkspaceRefused)):
            with self._lock:
                found = self._calls.get(message.call)
            if found is not None:  # otherwise the answer is on its way
                found.hear(message)

    def _begin(self, call: WorkerCall) -> None:
        with self._lock:
            self._in_hand += 1
            self._calls[call.call] = call
        self._orders.put(call)

    def _send(self, message: Message) -> None:
        try:
            self._control.send(pack(message) if isinstance(message, CallDone) else encode(message))
        except OSError:
            leave(0)  # the pool is gone


def _ready(backend: Backend, canaries: int, compared: int) -> DeviceReady:
    return DeviceReady(
        backend.name,
        backend.description,
        backend.simulated,
        backend.one_mode,
        {name: reason[:_MAX_REASON] for name, reason in backend.unavailable.items()},
        backend.memory_bytes,
        backend.deterministic,
        backend.no_determinism[:_MAX_REASON],
        canaries,
        compared,
    )
