"""A device without torch_npu: CANN alone takes it, allocates memory and streams, and releases them.

Only for the first check of a node: calls are served with torch_npu's allocators.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad_server.acl.libraries import RUNTIME_LIBRARY, Loader, bind
from npugrad_server.acl.symbols import DEVICE

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from npugrad_server.acl.runtime import Runtime

_HUGE_FIRST = 0
"""aclrtMemMallocPolicy."""
_PADDING_BYTES = 32
"""What CANN requires after each tensor."""


class BareDevice:
    """One device; for one thread."""

    def __init__(self, runtime: Runtime, loader: Loader | None = None) -> None:
        """Binds the functions; nothing is taken.

        Args:
            runtime: Checks the codes.
            loader: How to load libascendcl.

        Raises:
            LibraryError: It cannot be loaded.
        """
        library = (loader or Loader()).require(RUNTIME_LIBRARY)
        self._functions = bind(DEVICE, {RUNTIME_LIBRARY: library})
        self._runtime = runtime
        self._give_back: list[Callable[[], None]] = []

    def take(self, index: int) -> None:
        """Binds the thread to a device; all methods raise `AclError` if CANN refuses."""
        self._call("aclrtSetDevice", index)
        self._give_back.append(lambda: self._call("aclrtResetDevice", index))

    def stream(self) -> int:
        """A new raw stream."""
        return self._made("aclrtCreateStream", "aclrtDestroyStream")

    def allocate(self, nbytes: int) -> int:
        """Address of new device memory, not initialized."""
        return self._made("aclrtMalloc", "aclrtFree", max(nbytes, 1) + _PADDING_BYTES, _HUGE_FIRST)

    def pinned(self, nbytes: int) -> tuple[int, npt.NDArray[np.uint8]]:
        """Address of new pinned host memory, and the memory."""
        size = max(nbytes, 1)
        address = self._made("aclrtMallocHost", "aclrtFreeHost", size)
        return address, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))[:nbytes]

    def close(self) -> None:
        """Releases everything, last taken first; nothing may still be queued."""
        while self._give_back:
            self._give_back.pop()()

    def _made(self, make: str, give_back: str, *arguments: Any) -> int:
        found = ctypes.c_void_p()
        self._call(make, found, *arguments)
        made = found.value or 0
        self._give_back.append(lambda: self._call(give_back, made))
        return made

    def _call(self, name: str, *arguments: Any) -> None:
        self._runtime.call(self._functions[name], *arguments)
