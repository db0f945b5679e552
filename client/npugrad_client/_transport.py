"""The channel to a server: unary calls, streamed calls, and the one place where grpc's errors end.

Small calls are unary; larger ones go through Execute in 1 MiB chunks, so that no message limit ever
reaches a user and neither side holds a call twice.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from npugrad_client._channels import (
    LARGEST_UNARY_BYTES,
    REFUSAL_WAIT_S,
    STREAM_FROM_BYTES,
    Stubs,
    channel_options,
    check_target,
    closed,
    grpc_timeout,
)
from npugrad_client._frames import read_frames, read_response, request_frames, unary_request
from npugrad_client.errors import translate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad_client._call import Answer, Prepared

_OPEN: dict[int, tuple[int, str]] = {}
"""Process and target of each transport that was not closed, so that a process knows what a fork left it."""
_TRUE = ("1", "true", "yes")


class Transport:
    """One channel to one target.

    Thread safety: every method may be called from several threads at once; grpc multiplexes them.
    """

    def __init__(self, target: str, stream_from_bytes: int = STREAM_FROM_BYTES) -> None:
        """Opens the channel lazily; nothing is sent before the first call.

        Raises:
            TypeError: The target is no text.
            ValueError: The target is empty.
            RuntimeError: The process was forked while a client was open, where grpc would hang.
        """
        check_target(target)
        _check_fork()
        self.target = target
        self._stream_from_bytes = min(stream_from_bytes, LARGEST_UNARY_BYTES)
        self._channel = grpc.insecure_channel(target, options=channel_options(target))
        self._process = os.getpid()
        self._is_closed = False
        _OPEN[id(self)] = (self._process, target)
        self._forget = weakref.finalize(self, _OPEN.pop, id(self), None)
        self._stubs = Stubs(self._channel)

    def close(self) -> None:
        """Closes the channel; calls in flight are cancelled."""
        self._is_closed = True
        self._forget()
        self._channel.close()

    def ask(self, service: str, request: Any, timeout_s: float | None) -> Any:
        """One of the small services: `validate`, `server_info` or `list_operators`; errors as in `run`."""
        call: Any = self._stubs.services[service]
        with self._calling(service, timeout_s) as timeout:
            return call(request, timeout=timeout)

    def run(self, prepared: Prepared, timeout_s: float | None) -> Answer:
        """Runs a call, streamed or not by its size.

        Raises:
            NpugradError: What the server answered, or that it did not; its message names the target.
            RuntimeError: The client is closed, or was opened by another process.
        """
        send = self._streamed if prepared.nbytes >= self._stream_from_bytes else self._unary
        with self._calling(prepared.spec.name, timeout_s) as timeout:
            return send(prepared, timeout)

    @contextmanager
    def _calling(self, what: str, timeout_s: float | None) -> Iterator[float | None]:
        """Looks at client and timeout before a call, and turns what grpc raises into errors of ours."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"found a client for {self.target} that another process opened; expected one opened after "
                "the fork, because connections do not survive it"
            )
        timeout = grpc_timeout(timeout_s, what)
        try:
            yield timeout
        except grpc.RpcError as error:
            raise translate(error, what, self.target, timeout_s) from None
        except ValueError:
            if not self._is_closed:
                raise
            raise closed(self.target) from None

    def _unary(self, prepared: Prepared, timeout_s: float | None) -> Answer:
        method = self._stubs.unary(prepared.spec)
        return read_response(prepared, method(unary_request(prepared), timeout=timeout_s))

    def _streamed(self, prepared: Prepared, timeout_s: float | None) -> Answer:
        ended = threading.Event()
        frames = request_frames(prepared, lambda: ended.wait(REFUSAL_WAIT_S))
        stream: Any = self._stubs.execute(frames, timeout=timeout_s)
        if not stream.add_callback(ended.set):
            ended.set()
        try:
            return read_frames(prepared, iter(stream))
        finally:
            stream.cancel()  # no effect after a complete answer; frees the stream when ours was refused


def _check_fork() -> None:
    # A list at once: other threads may open clients meanwhile.
    inherited = next((target for process, target in list(_OPEN.values()) if process != os.getpid()), None)
    if inherited is None or os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower() in _TRUE:
        return
    raise RuntimeError(
        f"found a process that was forked while a client for {inherited} was open, in which gRPC would hang; "
        "expected that client closed before the fork, a process started by spawn, or "
        "GRPC_ENABLE_FORK_SUPPORT=1 in the environment from the start"
    )
