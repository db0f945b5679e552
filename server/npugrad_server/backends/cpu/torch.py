"""PyTorch's operators, for operators without a compiled kernel; imported when the first such call comes.

The import takes seconds, and 200 MiB that stay, so neither opening the device nor a canary waits for it.
Operands of 16 bits are computed in float32, and their results rounded once: PyTorch lacks kernels for some,
and adds up gradients of parameters in 16 bits for others.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from npugrad_server.backends.cpu.kernels import COMPUTED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt

    from npugrad.operator import OpRecord
    from npugrad_server.backends.base import DeviceCall
    from npugrad_server.backends.cpu.calls import Arrays

SETTING = "NPUGRAD_KERNELS_TORCH"
"""Environment variable; with ``off``, PyTorch is not used even where it is installed."""
_LOOK_S = 0.1
"""How often a call that waits for the import looks whether it is still wanted, in seconds."""
_NO_KERNEL = "not implemented for"
_NO_MEMORY = "can't allocate memory"
_log = logging.getLogger(__name__)


class Torch:
    """PyTorch in this process, if it is installed.

    Thread safety: any number of threads may call `run`. Every call is deterministic, and its bits depend on
    the number of threads.

    Attributes:
        is_found: Whether it is there to be imported, or imported.
        trouble: Why it is not used although it is installed; empty for no reason.
    """

    def __init__(self, threads: int, search: Iterable[str] | None = None) -> None:
        """Looks for it, and imports nothing.

        Args:
            threads: How many compute one call.
            search: Folders of its package; None for where Python finds it.
        """
        self.is_found, self.trouble = False, ""
        self._threads, self._lock = threads, threading.Lock()
        self._module: Any = None
        self._importing: threading.Thread | None = None
        self._noted: set[tuple[str, ...]] = set()
        if os.environ.get(SETTING) == "off":
            self.trouble = f"{SETTING}=off"
            return
        if search is None:
            spec = find_spec("torch")
            search = spec.submodule_search_locations or () if spec else ()
        for folder in search:
            self.is_found, self.trouble = True, _trouble(Path(folder))
        self.is_found = self.is_found and not self.trouble

    @staticmethod
    def has(record: OpRecord) -> bool:
        """Whether the CPU may have its operator, and no kernel or coordinate rule is to be kept to."""
        is_ours = record.name in COMPUTED or record.references_by_rule
        return record.binding is not None and record.binding.is_aten and not is_ours

    def run(self, record: OpRecord, inputs: Arrays, call: DeviceCall) -> bool:
        """Computes a call, if it can.

        Args:
            record: The operator.
            inputs: Operands by name, contiguous; they are not written, and may be read-only memory.
            call: The call, with its outputs.

        Returns:
            Whether it did; otherwise the outputs hold anything.

        Raises:
            MemoryError: There is no memory for the results.
            CallAbandoned: The caller went during the import.
            DeadlineExceeded: The import took too long.
        """
        binding = record.binding
        if binding is None or not self.is_found or not self.has(record) or not binding.takes(call.meta):
            return False
        if any(array is not None and not array.size for array in inputs.values()):
            return False  # some operators divide by a size, which ends the process
        kinds = (record.name, *("" if array is None else array.dtype.name for array in inputs.values()))
        if kinds in self._noted or not (self._module or self._loads(call)):
            return False
        torch = self._module
        try:
            with torch.inference_mode():
                tensors = {n: None if a is None else _widened(tensor(torch, a)) for n, a in inputs.items()}
                results = binding.call(torch.ops, {**tensors, **call.meta.attrs})
                _store(torch, dict(zip((p.name for p in record.outputs), results, strict=True)), call.outputs)
        except Exception as error:
            if _NO_MEMORY in str(error):
                raise MemoryError(f"{record.name}: no memory for PyTorch's results") from error
            self._note(kinds, error)
            return False
        return True

    def _loads(self, call: DeviceCall) -> bool:
        """Imports it, unless a canary asks; returns whether it is there.

        On a thread of its own: a call whose time is over meanwhile ends, and the next one finds more of it.
        """
        if call.is_canary:
            return False
        with self._lock:
            if self._importing is None:
                self._importing = threading.Thread(target=self._import, name="import-torch", daemon=True)
                self._importing.start()
        while self._importing.is_alive():
            self._importing.join(_LOOK_S)
            call.check_wanted()
        return self.is_found

    def _import(self) -> None:
        try:
            self._module = _imported(self._threads)
        except Exception as error:  # an ABI of another NumPy or C library, for example
            self.is_found = False
            self.trouble = f"it cannot be imported: {type(error).__name__}: {error}"
            _log.warning("PyTorch is not used on the CPU, as %s", self.trouble)

    def _note(self, kinds: tuple[str, ...], error: Exception) -> None:
        """Remembers types for which there is no kernel, and says any other failure of an operator once."""
        if _NO_KERNEL in str(error):
            self._noted.add(kinds)
            return
        said = (kinds[0], type(error).__name__)
        if said not in self._noted:
            self._noted.add(said)
            _log.warning(
                "%s: PyTorch's operator failed, and the reference computes such calls: %s: %s",
                *said,
                " ".join(str(error).split())[:500],
            )


def tensor(torch: Any, array: npt.NDArray[Any]) -> Any:
    """A tensor in the memory of an array, without torch's warning that it may be read-only."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.asarray(_Memory(array.view(np.int16)))).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(_Memory(array)))


def _widened(given: Any) -> Any:
    return given.float() if given.is_floating_point() and given.itemsize == 2 else given


class _Memory:
    """An array's memory, said to be writable."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def _store(torch: Any, results: Mapping[str, Any], outputs: Mapping[str, npt.NDArray[Any]]) -> None:
    """Copies the wanted results, rounding where the operator computes in another type."""
    for name, output in outputs.items():
        result = results[name]
        found = None if result is None else list(result.shape)
        if found != list(output.shape):
            raise ValueError(f"{name}: found shape {found}; expected {list(output.shape)}")
        tensor(torch, output).copy_(result)


def _trouble(folder: Path) -> str:
    """Why a package of torch does not fit this Python; empty if it seems to."""
    if any((folder / f"_C{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
        return ""
    others = ", ".join(sorted(path.name for path in folder.glob("_C.*"))) or "none"
    return f"it is not built for this Python: found {others}; expected _C{EXTENSION_SUFFIXES[0]}"


def _imported(threads: int) -> Any:
    # A plain import would load torch_npu where that is installed, and fail without CANN.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    import torch

    torch.from_numpy(np.zeros(1))  # fails if torch was built for another NumPy
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # Otherwise deterministic mode fills what an operator overwrites anyway.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return sys.modules["torch"]
