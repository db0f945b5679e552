"""The runtime of a device, checked: every error code becomes an `AclError` with number, function and text.

Threads: a thread must set its device before it calls anything here; error texts are per thread.
"""

from __future__ import annotations

import ctypes
import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from npugrad_server.acl.faults import FaultRow, fault_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad_server.acl.libraries import Functions

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
"""aclrtMemcpyKind."""
_HBM = 1
"""aclrtMemAttr of the device's own memory."""
_DETERMINISTIC = 0
"""aclSysParamOpt of deterministic computing."""
_EVENT_TIME_LINE = 8
"""ACL_EVENT_TIME_LINE: the event records times, and may be recorded repeatedly."""
_EVENTS = ("aclrtCreateEventExWithFlag", "aclrtRecordEvent", "aclrtEventElapsedTime", "aclrtDestroyEvent")
_THREAD_LEVEL = 0
"""aclrtLastErrLevel."""
_MOST_MESSAGES = 32
"""Most error texts fetched at once: a library that never runs out of them must not block the call."""
_MOST_MS = 2**31 - 1
_VERSION_BYTES = 512
"""Size of an aclCANNPackageVersion, which begins with the version as text."""
_CANN_PACKAGE = 0
"""ACL_PKG_NAME_CANN."""


class AclError(Exception):
    """A function of CANN returned an error.

    Attributes:
        code: The vendor's number; 0 if the function gives none.
        function: The function that returned it.
        text: What CANN said about it; may be empty.
        last_error: The runtime's last error on this thread; 0 if none.
        subject: What the call was for, such as an operand's name; empty if unknown.
    """

    def __init__(self, code: int, function: str, text: str = "", last_error: int = 0) -> None:
        super().__init__(code, function, text, last_error)
        self.code, self.function, self.text, self.last_error = code, function, text, last_error
        self.subject = ""

    @property
    def fault(self) -> FaultRow:
        """Its row of the table of codes."""
        return fault_of(self.code, self.last_error)

    @property
    def head(self) -> str:
        """Subject, function, number and meaning."""
        subject = f"{self.subject}: " if self.subject else ""
        found = f"returned {self.code}" if self.code else "failed without a number"
        hidden = self.last_error not in (0, self.code)
        noted = f", the runtime's last error is {self.last_error}" if hidden else ""
        return f"{subject}{self.function} {found} ({self.fault.meaning}{noted})"

    def __str__(self) -> str:
        """One line: `head` and CANN's text."""
        return f"{self.head}: {self.text}" if self.text else self.head


@contextmanager
def concerning(subject: str) -> Iterator[None]:
    """Sets the subject of an `AclError` that leaves the block, unless it has one."""
    try:
        yield
    except AclError as error:
        error.subject = error.subject or subject
        raise


class Runtime:
    """Queues copies, memsets and waits on raw streams and addresses, and fetches error texts."""

    def __init__(self, functions: Functions) -> None:
        """Takes the bound functions of `symbols.RUNTIME`."""
        self._functions = functions

    def call(self, function: Any, *arguments: Any) -> None:
        """Calls a bound function that returns a code.

        Raises:
            AclError: The code is not 0.
            SymbolMissing: No library has the function.
        """
        code = function(*arguments)
        if code:
            raise self.error(code, function.__name__)

    def created(self, function: Any, *arguments: Any) -> int:
        """Calls a bound function that returns a handle.

        Raises:
            AclError: The handle is null; the code is 0, because the function returns none.
        """
        handle: int | None = function(*arguments)
        if not handle:
            raise self.error(0, function.__name__)
        return handle

    def error(self, code: int, function: str) -> AclError:
        """The error for a code just returned on this thread, with what CANN says about it."""
        last_error = 0
        if self._functions.has("aclrtPeekAtLastError"):
            last_error = self._functions["aclrtPeekAtLastError"](_THREAD_LEVEL)
        return AclError(code, function, self.fetch_texts(), last_error)

    def forget_errors(self) -> None:
        """Discards texts and codes of earlier, tolerated failures, so later calls are not blamed for them."""
        self.fetch_texts()
        if self._functions.has("aclrtGetLastError"):
            self._functions["aclrtGetLastError"](_THREAD_LEVEL)

    def fetch_texts(self) -> str:
        """All error texts of this thread since the last fetch, in one line."""
        texts: list[str] = []
        while len(texts) < _MOST_MESSAGES:
            # ctypes copies it at once; the next call invalidates the pointer.
            text: bytes | None = self._functions["aclGetRecentErrMsg"]()
            if not text:
                break
            texts.append(" ".join(text.decode("utf-8", "replace").split()))
        return "; ".join(filter(None, texts))

    def copy_in(self, device: int, host: int, nbytes: int, stream: int) -> None:
        """Queues a copy from host to device; both must stay until the stream was waited for."""
        copy = self._functions["aclrtMemcpyAsync"]
        self.call(copy, device, nbytes, host, nbytes, HOST_TO_DEVICE, stream)

    def copy_out(self, host: int, device: int, nbytes: int, stream: int) -> None:
        """Queues a copy from device to host; both must stay until the stream was waited for."""
        copy = self._functions["aclrtMemcpyAsync"]
        self.call(copy, host, nbytes, device, nbytes, DEVICE_TO_HOST, stream)

    def zero(self, device: int, nbytes: int, stream: int) -> None:
        """Queues filling device memory with zeros."""
        self.call(self._functions["aclrtMemsetAsync"], device, nbytes, 0, nbytes, stream)

    def wait(self, stream: int, until_s: float) -> None:
        """Waits until everything queued on a stream has run.

        Args:
            stream: Raw stream.
            until_s: `time.monotonic()` at which to give up.

        Raises:
            AclError: 507046 if it was not done by then, or the code of what failed on the stream.
        """
        left_ms = (until_s - time.monotonic()) * 1000
        # At least a millisecond: -1 would mean forever, and 0 is undefined.
        ms = _MOST_MS if left_ms >= _MOST_MS else math.ceil(max(1.0, left_ms))
        self.call(self._functions["aclrtSynchronizeStreamWithTimeout"], stream, ms)

    @property
    def has_events(self) -> bool:
        """Whether CANN has all functions that timing by events needs."""
        return all(self._functions.has(name) for name in _EVENTS)

    def make_event(self) -> int:
        """A new event that records times; their number is not limited."""
        event = ctypes.c_void_p()
        self.call(self._functions["aclrtCreateEventExWithFlag"], event, _EVENT_TIME_LINE)
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """Destroys an event; no record of it may be pending."""
        self.call(self._functions["aclrtDestroyEvent"], event)

    def record(self, event: int, stream: int) -> None:
        """Queues recording the time when a stream gets there, in place of any earlier record."""
        self.call(self._functions["aclrtRecordEvent"], event, stream)

    def elapsed_s(self, first: int, last: int) -> float:
        """Device seconds between two recorded events; their streams must have been waited for."""
        milliseconds = ctypes.c_float()
        self.call(self._functions["aclrtEventElapsedTime"], milliseconds, first, last)
        return milliseconds.value / 1000

    def set_deterministic(self, wanted: bool) -> None:
        """Sets the deterministic option of process and context; nothing may run or be queued in either.

        The operators' documents name the context's option. CANN's operator base reads that one up to 8.5, and
        later for fused operators; from 9.0 it reads the process's option for all others. torch_npu sets both
        before each of its own operators. ACL_OPT_STRONG_CONSISTENCY is off unless set, and nothing here sets
        it.
        """
        if self._functions.has("aclrtSetSysParamOpt"):
            self.call(self._functions["aclrtSetSysParamOpt"], _DETERMINISTIC, int(wanted))
        self.call(self._functions["aclrtCtxSetSysParamOpt"], _DETERMINISTIC, int(wanted))

    def memory_bytes(self) -> tuple[int, int]:
        """Free and total bytes of the thread's device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call(self._functions["aclrtGetMemInfo"], _HBM, free, total)
        return free.value, total.value

    def soc_name(self) -> str:
        """Name of the chip, such as ``"Ascend910B2"``; empty when CANN does not say."""
        name: bytes | None = self._functions["aclrtGetSocName"]()
        return (name or b"").decode("ascii", "replace")

    def device_count(self) -> int:
        """Devices of this host that the process may use."""
        count = ctypes.c_uint32()
        self.call(self._functions["aclrtGetDeviceCount"], count)
        return count.value

    def versions(self) -> Iterator[str]:
        """CANN's version by each function that returns it, such as ``"9.1.0"``; none before 8.1."""
        for name, package in (("aclsysGetVersionStr", b"runtime"), ("aclsysGetCANNVersion", _CANN_PACKAGE)):
            if self._functions.has(name):
                text = ctypes.create_string_buffer(_VERSION_BYTES)
                code: int = self._functions[name](package, text)
                if not code:
                    yield text.value.decode("ascii", "replace")

    def initialize(self) -> None:
        """Initializes the process; only needed without torch_npu, which does it itself."""
        self.call(self._functions["aclInit"], None)

    def finalize(self) -> None:
        """Ends what `initialize` began."""
        self.call(self._functions["aclFinalize"])
