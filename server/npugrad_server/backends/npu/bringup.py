"""Brings a device up with torch_npu, and takes memory and streams from it: the only user of torch here.

torch_npu is asked for four things only: the device, streams, device memory and pinned memory, the latter two
from its caching allocators. The imports are inside functions, because the environment variables that control
them must be set first.
"""

from __future__ import annotations

import gc
import os
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from npugrad_server.acl.faults import Action
from npugrad_server.acl.runtime import AclError
from npugrad_server.backends.base import DeviceUnusable, RestartPolicy, unheard
from npugrad_server.npus import OP_INIT_MODE, and_visibility, op_init_mode, op_init_problem

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

_ENVIRONMENT = {
    # A plain `import torch` would load torch_npu, and fail without CANN.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    # torch_npu's own queue would report failures later, as texts without their numbers.
    "TASK_QUEUE_ENABLE": "0",
}
_POOLED_STREAMS = 8
"""Streams that torch_npu is told to make at once, instead of its 32."""
_CODE = re.compile(r"error code is (\d{6})", re.IGNORECASE)
_CAUSE = re.compile(r"\[Error\]: |E[A-Z0-9]\d{4}: ")
"""Start of a line in which the vendor states the cause; torch_npu's own lines surround these."""
_ADVICE = re.compile(r"\s*If reserved memory is .*")
"""torch's closing advice, about settings that do not apply here."""
_MOST_CHARACTERS = 400
_LACKS_FUNCTION = "Failed to find function"
_OUT_OF_MEMORY = 207001
_PAIR = re.compile(r"\d+\.\d+")


@dataclass(frozen=True)
class DeviceBuffer:
    """Device memory; it returns to torch_npu's allocator with the last reference to it.

    Attributes:
        address: Where it starts.
        nbytes: Requested size.
        owner: The torch tensor that owns it; never used to compute.
    """

    address: int
    nbytes: int
    owner: Any


@dataclass(frozen=True)
class PinnedBuffer:
    """Pinned host memory.

    Attributes:
        address: Where it starts.
        data: The same memory as an array of bytes.
        owner: The torch tensor that owns it.
    """

    address: int
    data: npt.NDArray[np.uint8]
    owner: Any


@dataclass(frozen=True)
class Stream:
    """A stream of torch_npu."""

    owner: Any

    @property
    def raw(self) -> int:
        """The runtime's handle; read anew for every call, because reading it drains torch_npu's queue."""
        return int(self.owner.npu_stream)


class NpuDevice:
    """One device of this process."""

    def __init__(self, index: int, streams: int, on_stage: Callable[[str], None] = unheard) -> None:
        """Imports torch_npu and takes the device.

        Args:
            index: Number of the device.
            streams: How many streams will be asked for.
            on_stage: Called with each stage before it starts.

        Raises:
            DeviceUnusable: torch_npu is missing or does not fit, or the device cannot be taken.
        """
        self.index = index
        self.versions = check_packages()
        on_stage("importing torch_npu")
        self._torch, npu = _import(streams)
        on_stage("taking the device")
        self._npu: Any = npu
        self._place = f"npu:{index}"
        self._void: list[Any] = []
        try:
            count = npu.device_count()
            if index >= count:
                found = f"found {count} NPU{'s' * (count != 1)} for torch_npu"
                raise DeviceUnusable(
                    and_visibility(f"{found}; expected {self._place} to be among them"), RestartPolicy.SLOWLY
                )
            npu.set_device(index)
            self.empty(1)  # the device is taken by its first use
        except RuntimeError as error:
            raise error if isinstance(error, DeviceUnusable) else _not_taken(error) from error
        except AclError as error:
            raise _not_taken(error) from error

    def use_thread(self) -> None:
        """Binds the calling thread to the device; cheap when it is bound already."""
        self._npu.set_device(self.index)

    def stream(self) -> Stream:
        """A stream not returned before, for up to as many streams as the device was opened with."""
        return Stream(self._npu.Stream(device=self._place))

    def empty(self, nbytes: int) -> DeviceBuffer:
        """Device memory, not initialized.

        Raises:
            AclError: 207001 if there is not enough, or another number from torch_npu's error.
        """
        # An empty tensor would have no address.
        owner = self._allocate(max(nbytes, 1), device=self._place)
        return DeviceBuffer(owner.data_ptr(), nbytes, owner)

    def pinned(self, nbytes: int) -> PinnedBuffer:
        """Pinned host memory, not initialized; errors as for `empty`."""
        owner = self._allocate(max(nbytes, 1), pin_memory=True)
        if not owner.data_ptr():
            # torch_npu does not notice that CANN has none left: it returns a tensor at address 0, and if it
            # got the tensor back, it would hand it to the next caller.
            self._void.append(owner)
            raise AclError(_OUT_OF_MEMORY, "torch_npu's allocator of pinned memory", "it returned address 0")
        return PinnedBuffer(owner.data_ptr(), owner.numpy(), owner)

    def _allocate(self, nbytes: int, **where: Any) -> Any:
        try:
            return self._torch.empty(nbytes, dtype=self._torch.uint8, **where)
        except self._torch.OutOfMemoryError as error:
            text = _ADVICE.sub("", _words(error))
            raise AclError(_OUT_OF_MEMORY, "torch_npu's allocator", text) from None
        except RuntimeError as error:
            raise _numbered(error) from None

    def empty_cache(self) -> None:
        """Makes torch_npu return to the device what no buffer uses.

        Raises:
            AclError: The device failed.
        """
        try:
            self._npu.empty_cache()
        except RuntimeError as error:
            raise _numbered(error) from None


def check_packages() -> dict[str, str]:
    """Versions of torch and torch_npu by name.

    Raises:
        DeviceUnusable: One is missing, or their versions do not match.
    """
    found: dict[str, str] = {}
    missing = []
    for name in ("torch", "torch_npu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        raise DeviceUnusable(
            f"{' and '.join(missing)} not installed; expected the extra npu "
            "(pip install . './server[npu]' in a checkout of npugrad), "
            "in the versions that fit the node's CANN"
        )
    pairs = {name: _PAIR.match(text) for name, text in found.items()}
    if len({match.group() if match else name for name, match in pairs.items()}) > 1:
        raise DeviceUnusable(
            f"found torch {found['torch']} and torch_npu {found['torch_npu']}; expected the same major and "
            "minor version of both"
        )
    return found


def _import(streams: int) -> tuple[Any, Any]:
    os.environ.update(_ENVIRONMENT)
    os.environ[OP_INIT_MODE] = op_init_mode()
    if streams <= _POOLED_STREAMS:
        os.environ.setdefault("STREAMS_PER_DEVICE", str(_POOLED_STREAMS))
    # 400,000 objects and hardly any garbage: collections would take a seventh of the time of these imports.
    gc.disable()
    try:
        import torch
        import torch_npu  # pyright: ignore[reportMissingImports] - it has an environment of its own
    except Exception as error:
        homes = ", ".join(
            f"{name}={os.environ.get(name, 'not set')}" for name in ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH")
        )
        raise DeviceUnusable(
            f"torch_npu cannot be imported: {type(error).__name__}: {_words(error)}; expected a CANN "
            f"that fits it and its environment to be loaded (set_env.sh); {homes}"
        ) from error
    finally:
        gc.freeze()
        gc.enable()
    return torch, torch_npu.npu


def _not_taken(error: Exception) -> DeviceUnusable:
    numbered = error if isinstance(error, AclError) else _numbered(error)
    restart_policy = RestartPolicy.SLOWLY
    if numbered.fault.action is Action.QUARANTINE:
        restart_policy = RestartPolicy.NEVER
    elif _LACKS_FUNCTION in numbered.text:  # permanent until somebody fixes this CANN
        restart_policy = RestartPolicy.MENDED
    problem = op_init_problem()
    return DeviceUnusable(f"cannot be taken: {numbered}{'; ' if problem else ''}{problem}", restart_policy)


def _numbered(error: Exception) -> AclError:
    """The error with the number in torch_npu's text; 0 if it has none."""
    match = _CODE.search(str(error))
    return AclError(int(match[1]) if match else 0, "torch_npu", _words(error))


def _words(error: Exception) -> str:
    """The first line, which says where torch_npu was, and the lines in which the vendor states the cause."""
    first, *others = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()] or [""]
    causes = dict.fromkeys(line for line in others if _CAUSE.match(line))
    words = [first[:_MOST_CHARACTERS], " ".join(causes)[:_MOST_CHARACTERS]]
    return " ".join(filter(None, words)) or type(error).__name__
