"""State of one try of a call, for error messages and progress."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from npugrad.errors import DeadlineExceeded
from npugrad.status import grpc_status_name

if TYPE_CHECKING:
    from npugrad.errors import NpugradError
    from npugrad_client._channels import Stubs

LEAST_AGE_S = 5.0
"""Age below which a silent channel is not given up for a new one."""


@dataclass
class Attempt:
    """One try of a call.

    Attributes:
        what: Operator or service that is called.
        operator: Operator concerned; empty for none.
        target: Address of the server.
        timeout_s: Deadline of the try in seconds; None for none.
        is_encrypted: Whether the client speaks TLS.
        proxy: What sends the connection through a proxy; empty for none.
        is_streamed: Whether it is a streamed call.
        upload_bytes: Bytes that a streamed call sends in chunks; 0 for a call sent as one message.
        sent_bytes: How many of them gRPC has taken so far.
        download_bytes: Bytes of a streamed reply that come in chunks; None until its first frame.
        received_bytes: How many of them have arrived.
        started_s: When the try began, on the monotonic clock, like the times below; 0.0 if not reached.
        packed_s: When its message was made.
        sent_s: When gRPC had taken all frames of a streamed call.
        first_s: When the first frame of a streamed reply arrived.
        received_s: When the whole reply had arrived.
        ended_s: When it failed, or its results were read.
        error: Class of its error; empty for none.
        error_text: Message of that error.
        status: Name of its gRPC status.
        number: 1 for the first try of a call.
        stages: The server's report of its stages, serialized.
        metadata: gRPC metadata to send with it; None for none.
        stubs: Stubs of the channel that carries it; None until there is one.
    """

    what: str
    target: str
    timeout_s: float | None = None
    is_encrypted: bool = False
    proxy: str = ""
    upload_bytes: int = 0
    sent_bytes: int = 0
    download_bytes: int | None = None
    received_bytes: int = 0
    started_s: float = field(default_factory=time.monotonic)
    operator: str = ""
    packed_s: float = 0.0
    sent_s: float = 0.0
    first_s: float = 0.0
    received_s: float = 0.0
    ended_s: float = 0.0
    error: str = ""
    error_text: str = ""
    status: str = ""
    number: int = 1
    is_streamed: bool = False
    stages: bytes = b""
    metadata: tuple[tuple[str, str], ...] | None = None
    stubs: Stubs | None = None

    def carried_by(self, stubs: Stubs) -> None:
        """Records which channel carries it."""
        self.stubs, self.proxy = stubs, stubs.proxy

    def hear(self) -> None:
        """Records that something arrived from the server."""
        if self.stubs is not None:
            self.stubs.heard_s = time.monotonic()

    def silent(self, error: NpugradError) -> Stubs | None:
        """Its channel, if the deadline passed and nothing had arrived on it since the try began, else None.

        A NAT or a balancer that has lost its state drops packets silently. A slow server is silent as well,
        so a channel that was just opened is kept.
        """
        found = self.stubs
        if found is None or not isinstance(error, DeadlineExceeded) or found.heard_s >= self.started_s:
            return None
        return found if time.monotonic() - found.opened_s >= LEAST_AGE_S else None

    def fail(self, error: NpugradError) -> None:
        """Records that the try failed."""
        self.ended_s, self.error = time.monotonic(), type(error).__name__
        self.error_text, self.status = str(error), grpc_status_name(error)

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.started_s

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed."""
        return self.timeout_s is not None and self.elapsed_s >= self.timeout_s

    @property
    def is_uploading(self) -> bool:
        """Whether some of its data is still to be sent."""
        return self.sent_bytes < self.upload_bytes

    def late_text(self) -> str:
        """Explains why the deadline passed: the upload or the answer took too long."""
        deadline = f"{round(self.timeout_s or 0.0, 3):g} s"
        if not self.is_uploading:
            return f"no answer from {self.target} within {deadline}"
        found, total = f"the deadline of {deadline} passed", bytes_text(self.upload_bytes)
        if self.sent_bytes == 0:
            return f"{found} before any of {total} had been sent to {self.target}"
        rate = self.sent_bytes / max(self.elapsed_s, 1e-9)
        return (
            f"{found} after {bytes_text(self.sent_bytes)} of {total} had been sent to {self.target} at "
            f"{bytes_text(round(rate))}/s; at that rate the upload alone takes "
            f"{self.upload_bytes / rate:.2g} s"
        )


def bytes_text(count: int) -> str:
    """Formats bytes, such as ``1.5 GiB``."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
