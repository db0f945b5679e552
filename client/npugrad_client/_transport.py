"""Channels to the servers: unary calls, streamed calls, and the only place that handles grpc's errors.

Small calls are unary; larger ones go through Execute in 1 MiB chunks, so that users never meet a message
limit and neither side has a call in memory twice. A call refused as too large for one message is sent again
through Execute, and the limit of that server is remembered. `_retry` decides what is retried, and where.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import grpc

from npugrad.registry import REGISTRY, Registry
from npugrad_client._channels import REFUSAL_WAIT_S, Stubs, check_fork, closed, proxy_note
from npugrad_client._forks import GATE
from npugrad_client._frames import read_frames, request_frames, server_stages
from npugrad_client._older import lacking, lacks_operator, version_question
from npugrad_client._picker import Picker
from npugrad_client._progress import reported
from npugrad_client._retry import Launch, RetryBudget, Wait
from npugrad_client._rpcs import VERSION, Call, Query, begin, note_too_large
from npugrad_client.errors import Cancelled, NpugradError, translate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad_client._attempt import Attempt
    from npugrad_client._call import Answer, Prepared
    from npugrad_client._channels import Settings
    from npugrad_client._clock import CallClock
    from npugrad_client._retry import RetrySchedule
    from npugrad_client._rpcs import Rpc


class Flight:
    """One try in flight, which another thread may cancel.

    Thread safety: `attach` and `cancel` may be called by different threads, in any order.
    """

    def __init__(self) -> None:
        """Creates a flight before anything is sent."""
        self._lock = threading.Lock()
        self._calls: list[Any] = []
        self._is_over = False
        self._is_cancelled = False

    def attach(self, call: Any) -> Any:
        """Attaches and returns a call of grpc; cancels it at once if `cancel` was called before."""
        with self._lock:
            self._calls.append(call)
            is_late = self._is_cancelled
        if is_late:
            call.cancel()
        return call

    def cancel(self) -> bool:
        """Cancels the call; returns False if it is over."""
        with self._lock:
            if self._is_over:
                return False
            self._is_cancelled = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()
        return True

    @property
    def is_cancelled(self) -> bool:
        """Whether the call was cancelled here."""
        return self._is_cancelled

    def end(self) -> bool:
        """Marks the call as over, so that it can no longer be cancelled; returns whether it was."""
        with self._lock:
            self._is_over = True
            self._calls.clear()
            return self._is_cancelled


class _Alarm:
    """Ends a pause early: when the call is cancelled, or the client closed."""

    def __init__(self) -> None:
        self._rings = threading.Event()

    def cancel(self) -> bool:
        self._rings.set()
        return True

    def wait(self, pause_s: float) -> bool:
        return self._rings.wait(pause_s)


def open_channel(kind: Any, settings: Settings, server: int, registry: Registry) -> Stubs:
    """Returns the stubs of a new channel to a target; `kind` is the module `grpc` or `grpc.aio`."""
    target = settings.targets[server]
    options, proxy = settings.options(target), proxy_note(target)
    if settings.tls is None:
        return Stubs(kind.insecure_channel(target, options=options), registry, proxy=proxy)
    ca, certificate, key = pem = settings.tls.current()
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    return Stubs(kind.secure_channel(target, credentials, options=options), registry, pem, proxy)


class _Home:
    """The channels of one process: a fork leaves them to the parent, and the child opens its own."""

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings, self._registry = settings, registry
        self._tls = settings.tls
        self._lock = threading.Lock()
        self._stubs: dict[int, Stubs] = {}
        self._channels: weakref.WeakSet[Any] = weakref.WeakSet()
        self.picker = Picker(len(settings.targets))
        self.budget = RetryBudget(settings.retry)
        self._is_closing = False
        self._alarms: set[_Alarm] = set()

    def stubs(self, server: int) -> Stubs:
        """Returns the stubs of a server's channel, opened at the first call and after certificates change.

        A replaced channel closes when the last call that uses its stubs is over.
        """
        found = self._stubs.get(server)
        if found is None or (self._tls is not None and found.pem is not self._tls.current()):
            with self._lock:
                if self._is_closing:
                    raise closed(self._settings.name)
                if self._stubs.get(server) is found:  # else another thread was faster
                    opened = open_channel(grpc, self._settings, server, self._registry)
                    self._stubs[server] = opened
                    self._channels.add(opened.channel)
                    weakref.finalize(opened.channel, GATE.note_close).atexit = False
                found = self._stubs[server]
        return found

    def give_up(self, server: int, stubs: Stubs | None) -> None:
        """Opens a new channel for the next call, if the given one is still used; calls on it go on."""
        with self._lock:
            if stubs is not None and self._stubs.get(server) is stubs:
                del self._stubs[server]

    @contextmanager
    def alarm(self) -> Iterator[_Alarm]:
        """An alarm that rings when the channels are closed."""
        made = _Alarm()
        with self._lock:
            self._alarms.add(made)
            if self._is_closing:
                made.cancel()
        try:
            yield made
        finally:
            with self._lock:
                self._alarms.discard(made)

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            alarms = list(self._alarms)
        for alarm in alarms:
            alarm.cancel()
        for channel in list(self._channels):
            channel.close()
            GATE.note_close()


class Transport:
    """Channels to one or several servers.

    Thread safety: every method may be called from several threads at once; grpc multiplexes them.

    Processes: channels are opened at the first call of each process.
    """

    def __init__(self, settings: Settings, registry: Registry = REGISTRY) -> None:
        """Stores the settings; nothing is opened before the first call.

        Args:
            settings: Where and how to connect.
            registry: The operators and their services.
        """
        self._settings, self._registry = settings, registry
        self._stream_from_bytes = [settings.stream_from_bytes] * len(settings.targets)
        self._homes: dict[int, _Home] = {}
        self._is_closed = False
        self._scope = threading.local()

    @property
    def name(self) -> str:
        """The targets, for messages."""
        return self._settings.name

    def close(self) -> None:
        """Closes the channels; calls in flight are cancelled."""
        self._is_closed = True
        home = self._homes.get(os.getpid())
        if home is not None:
            home.close()

    def ask(self, service: str, request: Any, timeout_s: float | None) -> Any:
        """Queries `validate`, `server_info` or `list_operators`; errors as in `run`."""
        return self._follow(Query(service, request), timeout_s)[0]

    def run(
        self, prepared: Prepared, timeout_s: float | None, clock: CallClock, progress: Any = False
    ) -> Answer:
        """Runs a call, streamed or not by its size.

        Raises:
            NpugradError: The server answered with an error or not at all; the message names the target.
            ClientUnusable: The client is closed.
            WrongType: `progress` has the wrong type.
        """
        call = Call(prepared, self._settings, clock)
        if progress:
            answer, tries = self._report(call, timeout_s, progress)
        else:
            answer, tries = self._follow(call, timeout_s)
        return cast("Answer", answer if tries == 1 else answer.after(tries))

    def _report(self, call: Call, timeout_s: float | None, progress: Any) -> tuple[Any, int]:
        """Does what `_follow` does and reports progress; cancels the call if the report raises."""
        outer: Flight | None = getattr(self._scope, "flight", None)
        flight = Flight() if outer is None else outer.attach(Flight())
        with reported(call, progress, flight.cancel), self.cancellable(flight):
            return self._follow(call, timeout_s)

    @contextmanager
    def cancellable(self, flight: Flight) -> Iterator[None]:
        """Makes `flight.cancel()` cancel the calls that this thread makes in the block."""
        outer, self._scope.flight = getattr(self._scope, "flight", None), flight
        try:
            yield
        finally:
            self._scope.flight = outer

    def _home(self) -> _Home:
        """The channels of this process. No lock: a fork may have left it held by a thread that is gone."""
        if self._is_closed:
            raise closed(self._settings.name)
        process = os.getpid()
        home = self._homes.get(process)
        if home is None:
            check_fork()
            home = self._homes.setdefault(process, _Home(self._settings, self._registry))
        return home

    def _follow(self, rpc: Rpc, timeout_s: float | None) -> tuple[Any, int]:
        """Follows a schedule to its end; returns the answer and the number of tries."""
        home = self._home()
        schedule = begin(self._settings, home.budget, home.picker, rpc.what, timeout_s)
        outer: Flight | None = getattr(self._scope, "flight", None)
        try:
            if self._settings.retry.hedge_after_s is None:
                return self._alone(home, schedule, rpc, outer), schedule.tries
            return self._race(home, schedule, rpc, outer or Flight()), schedule.tries
        finally:
            schedule.abandon(time.monotonic())

    def _alone(self, home: _Home, schedule: RetrySchedule, rpc: Rpc, flight: Flight | None) -> Any:
        """Makes one try after the other, in this thread."""
        while True:
            step = schedule.next(time.monotonic())
            if isinstance(step, Wait):
                self._pause(home, rpc.what, step, flight)
                continue
            try:
                answer = self._try(home, step, rpc, flight)
            except NpugradError as error:
                schedule.failed(step.number, error, time.monotonic())
            else:
                schedule.answered(step.number, time.monotonic())
                return answer

    def _pause(self, home: _Home, what: str, step: Wait, flight: Flight | None) -> None:
        pause_s = max(0.0, (step.until or 0.0) - time.monotonic())
        with home.alarm() as alarm:
            if flight is not None:
                flight.attach(alarm)
            is_woken = alarm.wait(pause_s)
        if is_woken or self._is_closed:
            raise Cancelled(f"{what}: {self._settings.name}: the call was cancelled before its next try")

    def _race(self, home: _Home, schedule: RetrySchedule, rpc: Rpc, outer: Flight) -> Any:
        """Makes tries that may overlap, each in its own thread; cancels the losers."""
        ended: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        flights: dict[int, Flight] = {}

        def work(step: Launch, flight: Flight) -> None:
            try:
                ended.put((step.number, self._try(home, step, rpc, flight), None))
            except BaseException as error:
                ended.put((step.number, None, error))

        try:
            while True:
                step = schedule.next(time.monotonic())
                if isinstance(step, Launch):
                    flight = flights[step.number] = outer.attach(Flight())
                    threading.Thread(target=work, args=(step, flight), daemon=True).start()
                    continue
                if len(flights) == 0:
                    self._pause(home, rpc.what, step, outer)
                    continue
                try:
                    wait_s = None if step.until is None else max(0.0, step.until - time.monotonic())
                    number, answer, error = ended.get(timeout=wait_s)
                except queue.Empty:
                    continue
                del flights[number]
                if error is None:
                    schedule.answered(number, time.monotonic())
                    return answer
                if not isinstance(error, NpugradError):
                    raise error
                schedule.failed(number, error, time.monotonic())
        finally:
            for flight in flights.values():
                flight.cancel()

    def _try(self, home: _Home, step: Launch, rpc: Rpc, flight: Flight | None) -> Any:
        attempt = self._settings.attempt(rpc.what, rpc.operator, step)
        attempt.is_streamed = rpc.is_too_large or rpc.nbytes >= self._stream_from_bytes[step.server]
        if rpc.clock is not None:
            rpc.clock.begin_try(attempt)
        try:
            return self._carry(home, step.server, rpc, attempt, flight)
        except NpugradError as error:
            attempt.fail(error)
            note_too_large(rpc, error, self._stream_from_bytes, step.server)
            if not lacks_operator(error, attempt):
                raise
            refusal = error.with_traceback(None)
        info, question = None, version_question(attempt)
        with suppress(NpugradError):
            info = self._carry(home, step.server, VERSION, question, flight)
        raise lacking(refusal, attempt, info)

    def _carry(self, home: _Home, server: int, rpc: Rpc, attempt: Attempt, flight: Flight | None) -> Any:
        """Sends an RPC to a server and reads the reply; translates grpc's exceptions to ours."""
        try:
            with GATE:
                stubs = home.stubs(server)
                attempt.carried_by(stubs)
                if attempt.is_streamed and isinstance(rpc, Call):
                    return _streamed(stubs, rpc.streamed(), attempt, rpc.clock, flight)
                request = rpc.encode()
                attempt.packed_s = time.monotonic()
                reply = _unary(rpc.method(stubs), request, attempt, flight)
                attempt.received_s = time.monotonic()
                attempt.hear()
                return rpc.read(reply, attempt)
        except grpc.RpcError as error:
            is_ours = self._is_closed or (flight is not None and flight.is_cancelled)
            translated = translate(error, attempt, is_ours=is_ours, records=self._registry.records)
            home.give_up(server, attempt.silent(translated))
            raise translated from None
        except grpc.FutureCancelledError:
            raise Cancelled(f"{attempt.what}: {attempt.target}: the call was cancelled") from None
        except ValueError:
            if not self._is_closed:
                raise
            raise closed(attempt.target) from None
        finally:
            attempt.stubs = None  # what remains of a try keeps no channel open


def _unary(method: Any, request: Any, attempt: Attempt, flight: Flight | None) -> Any:
    if flight is None:  # faster than through a future
        return method(request, timeout=attempt.timeout_s, metadata=attempt.metadata)
    future = method.future(request, timeout=attempt.timeout_s, metadata=attempt.metadata)
    return flight.attach(future).result()


def _streamed(
    stubs: Stubs, prepared: Prepared, attempt: Attempt, clock: CallClock | None, flight: Flight | None
) -> Answer:
    ended = threading.Event()
    frames = request_frames(prepared, lambda: ended.wait(REFUSAL_WAIT_S), attempt)
    stream: Any = stubs.execute(frames, timeout=attempt.timeout_s, metadata=attempt.metadata)
    if flight is not None:
        flight.attach(stream)
    if not stream.add_callback(ended.set):
        ended.set()
    try:
        answer = read_frames(prepared, iter(stream), attempt, clock)
        attempt.stages = server_stages(stream.trailing_metadata())
    finally:
        stream.cancel()  # no effect after a complete answer; frees the stream otherwise
    prepared.note_streamed()
    return answer
