"""State of one try of a call, for error messages and progress."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from npugrad.status import grpc_status_name

if TYPE_CHECKING:
    from npugrad.errors import NpugradError


@dataclass
class Attempt:
    """One try of a call.

    Attributes:
        what: Operator or service that is called.
        operator: Operator that it is about; empty for none.
        target: Address of the server.
        timeout_s: Deadline of the try in seconds; None for none.
        is_encrypted: Whether the client speaks TLS.
        is_streamed: Whether it is a call that is streamed.
        upload_bytes: What a streamed call sends in chunks; 0 for one that travels whole.
        sent_bytes: How much of that gRPC has taken so far.
        download_bytes: What a streamed reply brings in chunks; None until its first frame says so.
        received_bytes: How much of that has arrived.
        started_s: When the try began, on the monotonic clock, as all that follow; 0.0 for what was not.
        packed_s: When its message was made.
        sent_s: When gRPC had taken all frames of a streamed call.
        first_s: When the first frame of a streamed reply came.
        received_s: When the whole reply was there.
        ended_s: When it failed, or its results were read.
        error: Class of its error; empty while there is none.
        error_text: Message of that error.
        status: Name of its gRPC status.
        number: 1 for the first try of a call.
        stages: What the server said of its stages, serialized.
        metadata: What is sent with it; None for nothing.
    """

    what: str
    target: str
    timeout_s: float | None = None
    is_encrypted: bool = False
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

    def fail(self, error: NpugradError) -> None:
        """The try has failed."""
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
        """Whether some of its data has not gone yet."""
        return self.sent_bytes < self.upload_bytes

    def late_text(self) -> str:
        """What happened where the deadline has passed: the upload took too long, or the answer."""
        deadline = f"{round(self.timeout_s or 0.0, 3):g} s"
        if not self.is_uploading:
            return f"no answer from {self.target} within {deadline}"
        found, total = f"the deadline of {deadline} passed", bytes_text(self.upload_bytes)
        if self.sent_bytes == 0:
            return f"{found} before any of {total} had gone to {self.target}"
        rate = self.sent_bytes / max(self.elapsed_s, 1e-9)
        return (
            f"{found} after {bytes_text(self.sent_bytes)} of {total} had gone to {self.target} at "
            f"{bytes_text(round(rate))}/s; all of it takes more than {self.upload_bytes / rate:.2g} s"
        )


def bytes_text(count: int) -> str:
    """Formats bytes, such as ``1.5 GiB``."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
