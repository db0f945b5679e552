"""The channel to a server: unary calls, streamed calls, and the one place where grpc's errors end.

Small calls are unary; larger ones go through Execute in 1 MiB chunks, so that no message limit ever
reaches a user and neither side holds a call twice.
"""

from __future__ import annotations

import math
import os
import re
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from npugrad import codec
from npugrad.errors import DeadlineExceeded
from npugrad.v1 import backward_pb2_grpc, server_pb2_grpc, validation_pb2_grpc
from npugrad_client._frames import read_frames, read_response, request_frames, unary_request
from npugrad_client.errors import translate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad_client._call import Answer, Prepared

STREAM_FROM_BYTES = 2**20
"""Calls with this much data either way are streamed: below, one message is quicker; above, grpc copies a
message several times into fresh memory."""
_LARGEST_UNARY_BYTES = 2**30
"""No setting makes a message larger than this: protobuf ends at 2 GiB."""
_REFUSAL_WAIT_S = 1.0
"""How long the data of a call that the local record refuses waits for the server to refuse it, too."""
_ENDLESS_S = 1e9
"""Timeouts from here on are none; grpc's clock cannot hold much more."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", codec.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", codec.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # A server that comes back is found again within seconds, not grpc's two minutes.
    ("grpc.max_reconnect_backoff_ms", 5_000),
)
_LOOPBACK = re.compile(r"(dns:/*|ipv4:|ipv6:)?(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?", re.I)


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
        _check_target(target)
        _check_fork()
        self.target = target
        self._stream_from_bytes = min(stream_from_bytes, _LARGEST_UNARY_BYTES)
        self._channel = grpc.insecure_channel(target, options=_channel_options(target))
        self._process = os.getpid()
        self._is_closed = False
        _OPEN[id(self)] = (self._process, target)
        self._forget = weakref.finalize(self, _OPEN.pop, id(self), None)
        self._backward = backward_pb2_grpc.BackwardServiceStub(self._channel)
        self._services = {
            "validate": validation_pb2_grpc.ValidationServiceStub(self._channel).Validate,
            "server_info": server_pb2_grpc.ServerServiceStub(self._channel).GetServerInfo,
            "list_operators": server_pb2_grpc.ServerServiceStub(self._channel).ListOperators,
        }

    def close(self) -> None:
        """Closes the channel; calls in flight are cancelled."""
        self._is_closed = True
        self._forget()
        self._channel.close()

    def ask(self, service: str, request: Any, timeout_s: float | None) -> Any:
        """One of the small services: `validate`, `server_info` or `list_operators`; errors as in `run`."""
        call: Any = self._services[service]
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
        timeout = _grpc_timeout(timeout_s, what)
        try:
            yield timeout
        except grpc.RpcError as error:
            raise translate(error, what, self.target, timeout_s) from None
        except ValueError:
            if not self._is_closed:
                raise
            raise RuntimeError(
                f"found the client for {self.target} closed; expected calls before close()"
            ) from None

    def _unary(self, prepared: Prepared, timeout_s: float | None) -> Answer:
        method: Any = getattr(self._backward, prepared.spec.rpc)
        return read_response(prepared, method(unary_request(prepared), timeout=timeout_s))

    def _streamed(self, prepared: Prepared, timeout_s: float | None) -> Answer:
        ended = threading.Event()
        frames = request_frames(prepared, lambda: ended.wait(_REFUSAL_WAIT_S))
        stream: Any = self._backward.Execute(frames, timeout=timeout_s)
        if not stream.add_callback(ended.set):
            ended.set()
        try:
            return read_frames(prepared, iter(stream))
        finally:
            stream.cancel()  # no effect after a complete answer; frees the stream when ours was refused


def _check_target(target: object) -> None:
    if not isinstance(target, str):
        raise TypeError(f"target: found {type(target).__name__}; expected text such as 'localhost:50051'")
    if not target:
        raise ValueError("target: found empty text; expected host:port, unix:path or dns:///name:port")


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


def _channel_options(target: str) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = list(_OPTIONS)
    if _LOOPBACK.fullmatch(target):
        options.append(("grpc.enable_http_proxy", 0))  # grpc would ask a proxy for this very host
    return options


def _grpc_timeout(timeout_s: float | None, what: str) -> float | None:
    """The timeout as grpc takes it, which reads 0 as none and refuses infinity."""
    if timeout_s is None:
        return None
    if math.isnan(timeout_s):
        raise ValueError(f"{what}: timeout_s: found nan; expected seconds or None")
    if timeout_s <= 0:
        raise DeadlineExceeded(
            f"{what}: found a deadline of {timeout_s:g} s, which has passed; expected one above 0"
        )
    return None if timeout_s >= _ENDLESS_S else timeout_s
