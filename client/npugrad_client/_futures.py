"""Calls in threads: futures that can be cancelled on the server, and batches of calls."""

from __future__ import annotations

import os
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from npugrad_client._arrays import copied, keeping_grad_mode
from npugrad_client._batch import arguments
from npugrad_client._channels import closed
from npugrad_client._generated_ops import FutureOperators
from npugrad_client._transport import Flight
from npugrad_client.errors import Cancelled

if TYPE_CHECKING:
    from collections.abc import Callable

    from npugrad_client._batch import Batch
    from npugrad_client._client import Client
    from npugrad_client._transport import Transport

P = ParamSpec("P")
T = TypeVar("T")


class CallFuture(Future[T]):
    """Future of a call; cancelling it cancels the call, whether or not it is in flight.

    The operands of the call must not change before it is done.
    """

    def __init__(self) -> None:
        """Creates the future of a call that has not started."""
        super().__init__()
        self.flight = Flight()

    def cancel(self) -> bool:
        """Cancels the call.

        Returns:
            False if the call has finished. If it was in flight, the server gives it up and `result` raises
            `npugrad_client.Cancelled`; if it had not started, `result` raises
            `concurrent.futures.CancelledError`.
        """
        return super().cancel() or self.flight.cancel()


class Threads:
    """Thread pool for calls; each process has its own.

    Thread safety: `start` may be called from several threads at once.
    """

    def __init__(self, transport: Transport, size: int) -> None:
        """Creates a pool of at most `size` threads; none is started yet."""
        self._transport, self._size = transport, size
        self._pools: dict[int, ThreadPoolExecutor] = {}
        self._is_closed = False

    def start(self, call: Callable[[], T]) -> CallFuture[T]:
        """Starts a call as soon as a thread is free."""
        future: CallFuture[T] = CallFuture()
        if self._is_closed:
            raise closed(self._transport.name)
        inner = self._pool().submit(copy_context().run, self._work, future, keeping_grad_mode(call))
        inner.add_done_callback(lambda ended: _give_up(future) if ended.cancelled() else None)
        return future

    def _pool(self) -> ThreadPoolExecutor:
        pool = self._pools.get(os.getpid())
        if pool is None:  # no lock: a fork may have left it held by a thread that is gone
            made = ThreadPoolExecutor(self._size, "npugrad")
            pool = self._pools.setdefault(os.getpid(), made)
        return pool

    def _work(self, future: CallFuture[T], call: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            with self._transport.cancellable(future.flight):
                result = call()
        except BaseException as error:
            future.flight.end()
            future.set_exception(error)
            return
        if future.flight.end():
            future.set_exception(Cancelled(f"{self._transport.name}: the call was cancelled as it ended"))
        else:
            future.set_result(result)

    def close(self) -> None:
        """Shuts down; calls that have not started are cancelled."""
        self._is_closed = True
        pool = self._pools.get(os.getpid())
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def _give_up(future: CallFuture[Any]) -> None:
    """Ends the future of a call that its pool, which is closed, will not start."""
    if Future.cancel(future):
        future.set_running_or_notify_cancel()  # else its waiters would wait forever


class Submit(FutureOperators):
    """The methods of the client, each returning a future immediately.

    At most `Client(threads=...)` calls are in flight; others wait for a thread. Cancelling a future cancels
    its call, and closing the client cancels all of them. A call sees the context variables and
    PyTorch's gradient mode of the code that starts it.

    Operands must not change before the future is done: a call reads them when its thread is free, and again
    at each try. Else its result may be that of later values, without an error. With ``copy=True`` the method
    copies them before it returns, so that a buffer can be filled again at once; ``out`` is not copied.

    Thread safety: may be shared by any number of threads.

    Example:
        >>> future = client.submit.group_norm_backward(**call)
        >>> future.result().grad_input.shape
        (2, 6, 4)
        >>> client.submit(client.list_operators, timeout_s=5).result()[0].name
        'multi_scale_deformable_attention_grad'
    """

    def __init__(self, client: Client, threads: Threads) -> None:
        """Wraps one client."""
        self._client, self._threads = client, threads

    def __call__(self, method: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs any method of the client in a thread; operands must not change before the future is done.

        Args:
            method: Such as ``client.validate``.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        return self._threads.start(lambda: method(*args, **kwargs))

    def _start(self, operator: str, arguments: dict[str, Any], copy: bool) -> Future[Any]:
        method, given = getattr(self._client, operator), copied(arguments) if copy else arguments
        return self._threads.start(lambda: method(**given))


def run_batch(batch: Batch, method: Callable[..., T], threads: Threads, concurrency: int) -> list[Any]:
    """Runs a batch in threads; if it ends early, calls in flight are cancelled."""
    flying: dict[CallFuture[T], int] = {}
    try:
        with batch:
            while True:
                while len(flying) < concurrency and (taken := batch.take()) is not None:
                    flying[_start(threads, method, taken[1])] = taken[0]
                if not flying:
                    return batch.results()
                for future in wait(flying, return_when=FIRST_COMPLETED).done:
                    place = flying.pop(future)  # type: ignore[call-overload]
                    error = future.exception()
                    if error is None:
                        batch.answered(place, future.result())
                    elif isinstance(error, Exception):
                        batch.failed(place, error)
                    else:
                        raise error
    finally:
        for future in flying:
            future.cancel()


def _start(threads: Threads, method: Callable[..., T], call: Any) -> CallFuture[T]:
    return threads.start(lambda: method(**arguments(call)))
