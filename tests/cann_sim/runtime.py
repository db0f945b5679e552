"""The least one needs to run an operator on the simulator: its libraries through ctypes, nothing of torch.

Tests use it to drive the simulator by itself. It is no launcher of the service, and shares no code with one.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_longlong,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.cann_sim.build import ARITHMETIC, Installation

H2H, H2D, D2H, D2D, DEFAULT = range(5)
HBM = 1
DETERMINISTIC = 0
STOP_ON_FAILURE = 1
EVENT_SYNC = 1
EVENT_TIME_LINE = 8
ND = 2

SUCCESS = 0
PARAM_INVALID = 107000
INVALID_DEVICE = 107001
NO_CONTEXT = 107002
FOREIGN_STREAM = 107003
TIMESTAMP_INVALID = 107006
TIMESTAMP_REVERSAL = 107007
OUT_OF_MEMORY = 207001
AICORE_EXCEPTION = 507015
SYNC_TIMEOUT = 507046

_PP = POINTER(c_void_p)
_ASCENDCL: dict[str, list[Any]] = {
    "aclInit": [c_char_p],
    "aclFinalize": [],
    "aclrtSetDevice": [c_int32],
    "aclrtResetDevice": [c_int32],
    "aclrtGetDevice": [POINTER(c_int32)],
    "aclrtGetDeviceCount": [POINTER(c_uint32)],
    "aclrtCreateContext": [_PP, c_int32],
    "aclrtDestroyContext": [c_void_p],
    "aclrtSetCurrentContext": [c_void_p],
    "aclrtGetCurrentContext": [_PP],
    "aclrtCtxSetSysParamOpt": [c_int, c_int64],
    "aclrtCtxGetSysParamOpt": [c_int, POINTER(c_int64)],
    "aclrtSetSysParamOpt": [c_int, c_int64],
    "aclrtGetSysParamOpt": [c_int, POINTER(c_int64)],
    "aclrtMalloc": [_PP, c_size_t, c_int],
    "aclrtFree": [c_void_p],
    "aclrtMallocHost": [_PP, c_size_t],
    "aclrtFreeHost": [c_void_p],
    "aclrtHostRegisterV2": [c_void_p, c_uint64, c_uint32],
    "aclrtHostUnregister": [c_void_p],
    "aclrtMemcpy": [c_void_p, c_size_t, c_void_p, c_size_t, c_int],
    "aclrtMemcpyAsync": [c_void_p, c_size_t, c_void_p, c_size_t, c_int, c_void_p],
    "aclrtMemset": [c_void_p, c_size_t, c_int32, c_size_t],
    "aclrtMemsetAsync": [c_void_p, c_size_t, c_int32, c_size_t, c_void_p],
    "aclrtGetMemInfo": [c_int, POINTER(c_size_t), POINTER(c_size_t)],
    "aclrtCreateStream": [_PP],
    "aclrtDestroyStream": [c_void_p],
    "aclrtDestroyStreamForce": [c_void_p],
    "aclrtSetStreamFailureMode": [c_void_p, c_uint64],
    "aclrtStreamQuery": [c_void_p, POINTER(c_int)],
    "aclrtSynchronizeStream": [c_void_p],
    "aclrtSynchronizeStreamWithTimeout": [c_void_p, c_int32],
    "aclrtSynchronizeDevice": [],
    "aclrtCreateEvent": [_PP],
    "aclrtCreateEventExWithFlag": [_PP, c_uint32],
    "aclrtDestroyEvent": [c_void_p],
    "aclrtRecordEvent": [c_void_p, c_void_p],
    "aclrtStreamWaitEvent": [c_void_p, c_void_p],
    "aclrtQueryEventStatus": [c_void_p, POINTER(c_int)],
    "aclrtSynchronizeEvent": [c_void_p],
    "aclrtEventElapsedTime": [POINTER(c_float), c_void_p, c_void_p],
    "aclrtPeekAtLastError": [c_int],
    "aclrtGetLastError": [c_int],
    "aclsysGetVersionStr": [c_char_p, c_char_p],
    "aclsysGetCANNVersion": [c_int, c_char_p],
}
_BY_RELEASE = ("aclsysGetVersionStr", "aclsysGetCANNVersion")
"""What older releases lack."""
_NNOPBASE: dict[str, list[Any]] = {
    "aclDestroyTensor": [c_void_p],
    "aclDestroyBoolArray": [c_void_p],
    "aclDestroyIntArray": [c_void_p],
    "aclDestroyFloatArray": [c_void_p],
    "aclDestroyScalar": [c_void_p],
    "aclDestroyAclOpExecutor": [c_void_p],
}
_BY_VALUE = {
    "int64_t": c_int64,
    "int": c_int,
    "int8_t": c_int8,
    "uint64_t": c_uint64,
    "double": c_double,
    "float": c_float,
    "bool": c_bool,
    "char*": c_char_p,
}
"""Parameters of phase 1 that are no handles, by C type."""
_PHASE_ONE = re.compile(r"^(?:extern \"C\" )?int (aclnn\w+)GetWorkspaceSize\(([^)]*)\) {", re.MULTILINE)


def _operators(installation: Installation) -> dict[str, list[Any]]:
    """Types of phase 1 of each operator, before workspaceSize and executor, as its source defines it."""
    return {
        name: [_BY_VALUE.get(one.split()[-2], c_void_p) for one in parameters.split(",")[:-2]]
        for path in installation.operator_sources
        for name, parameters in _PHASE_ONE.findall(path.read_text())
    }


class CannError(Exception):
    """A function of the simulator returned an error.

    Attributes:
        function: Its name.
        code: What it returned.
    """

    def __init__(self, function: str, code: int, message: str) -> None:
        super().__init__(f"{function} returned {code}: {message}")
        self.function = function
        self.code = code


class Runtime:
    """The libraries of an installation, with the types of their functions.

    Args:
        installation: Loaded by path, so that the process needs no LD_LIBRARY_PATH.
    """

    def __init__(self, installation: Installation) -> None:
        folder = installation.libraries
        if installation.arithmetic:
            os.environ[ARITHMETIC] = str(installation.arithmetic)
        self._functions: dict[str, Any] = {}
        self._bind(folder / "libascendcl.so", _ASCENDCL)
        self._bind(folder / "libnnopbase.so", _NNOPBASE)
        operators = _operators(installation)
        for library in sorted(folder.glob("libopapi*.so")):
            self._bind_operators(library, operators)
        self._bind_pointers(
            ctypes.CDLL(str(folder / "libascendcl.so")), ctypes.CDLL(str(folder / "libnnopbase.so"))
        )

    def _bind(self, library: Path, signatures: dict[str, list[Any]]) -> None:
        loaded = ctypes.CDLL(str(library))
        for name, argtypes in signatures.items():
            if name in _BY_RELEASE and not hasattr(loaded, name):
                continue
            function = getattr(loaded, name)
            function.argtypes, function.restype = argtypes, c_int32
            self._functions[name] = function

    def _bind_operators(self, library: Path, operators: dict[str, list[Any]]) -> None:
        loaded = ctypes.CDLL(str(library))
        for name, argtypes in operators.items():
            if hasattr(loaded, name):
                plan, launch = getattr(loaded, f"{name}GetWorkspaceSize"), getattr(loaded, name)
                plan.argtypes, plan.restype = [*argtypes, POINTER(c_uint64), _PP], c_int32
                launch.argtypes, launch.restype = [c_void_p, c_uint64, c_void_p, c_void_p], c_int32
                self._functions[f"{name}GetWorkspaceSize"] = plan
                self._functions[name] = launch

    def _bind_pointers(self, ascendcl: Any, nnopbase: Any) -> None:
        dims = POINTER(c_int64)
        self._create_tensor = nnopbase.aclCreateTensor
        self._create_tensor.restype = c_void_p
        self._create_tensor.argtypes = [dims, c_uint64, c_int, dims, c_int64, c_int, dims, c_uint64, c_void_p]
        self._create_array = {}
        for entry, name in ((c_bool, "Bool"), (c_int64, "Int"), (c_float, "Float")):
            create = self._create_array[entry] = getattr(nnopbase, f"aclCreate{name}Array")
            create.restype, create.argtypes = c_void_p, [POINTER(entry), c_uint64]
        self._create_scalar = nnopbase.aclCreateScalar
        self._create_scalar.restype, self._create_scalar.argtypes = c_void_p, [c_void_p, c_int]
        self._recent_message = ascendcl.aclGetRecentErrMsg
        self._recent_message.restype, self._recent_message.argtypes = c_char_p, []
        self._soc_name = ascendcl.aclrtGetSocName
        self._soc_name.restype, self._soc_name.argtypes = c_char_p, []
        self._counter = ascendcl.cann_sim_counter
        self._counter.restype, self._counter.argtypes = c_longlong, [c_char_p]
        self._set_plan = ascendcl.cann_sim_set_plan
        self._set_plan.restype, self._set_plan.argtypes = None, [c_char_p]
        self.marker: int = ascendcl.cann_sim_marker()

    def has(self, function: str) -> bool:
        """Whether this installation has an operator, or a function that older releases lack."""
        return function in self._functions

    def status(self, function: str, *arguments: Any) -> int:
        """Calls a function and returns its code."""
        return int(self._functions[function](*arguments))

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a function; CannError if it fails."""
        code = self.status(function, *arguments)
        if code:
            raise CannError(function, code, self.message())

    def message(self) -> str:
        """Error texts of this thread since the last time, oldest first."""
        text = self._recent_message()
        return text.decode() if text else ""

    def soc_name(self) -> str:
        """Name of the chip."""
        return str(self._soc_name().decode())

    def version(self) -> str:
        """Version of CANN that is played; empty where it has no function that tells it."""
        text = ctypes.create_string_buffer(512)
        for function, package in (("aclsysGetVersionStr", b"runtime"), ("aclsysGetCANNVersion", 0)):
            if self.has(function):
                self.call(function, package, text)
                break
        return text.value.decode()

    def counter(self, name: str) -> int:
        """A counter of this process."""
        return int(self._counter(name.encode()))

    def set_plan(self, text: str) -> None:
        """Replaces settings and faults of this process."""
        self._set_plan(text.encode())

    def pointer(self, function: str, *arguments: Any) -> int:
        """Calls a function whose first parameter receives a pointer."""
        result = c_void_p()
        self.call(function, ctypes.byref(result), *arguments)
        assert result.value
        return result.value

    def number(self, function: str, kind: Any, *arguments: Any) -> Any:
        """Calls a function whose last parameter receives a number of the ctypes type `kind`."""
        result = kind()
        self.call(function, *arguments, ctypes.byref(result))
        return result.value

    def malloc(self, size: int) -> int:
        """Device memory."""
        return self.pointer("aclrtMalloc", size, 0)

    def stream(self, *, stops: bool = True) -> int:
        """A stream, by default one that stops its context when a task fails, as torch_npu makes them."""
        handle = self.pointer("aclrtCreateStream")
        if stops:
            self.call("aclrtSetStreamFailureMode", handle, STOP_ON_FAILURE)
        return handle

    def pinned(self, size: int) -> npt.NDArray[np.uint8]:
        """Pinned memory as bytes; freed with `aclrtFreeHost` of `.ctypes.data`."""
        address = self.pointer("aclrtMallocHost", size)
        return np.ctypeslib.as_array(ctypes.cast(address, POINTER(ctypes.c_uint8)), (size,))

    def upload(self, content: bytes | memoryview) -> int:
        """Device memory with this content, at least one byte of it."""
        data = np.frombuffer(content, np.uint8) if len(content) else np.zeros(1, np.uint8)
        address = self.malloc(data.nbytes)
        self.call("aclrtMemcpy", address, data.nbytes, data.ctypes.data, data.nbytes, H2D)
        return address

    def download(self, address: int, size: int) -> bytes:
        """Content of device memory."""
        data = np.empty(size, np.uint8)
        self.call("aclrtMemcpy", data.ctypes.data, size, address, size, D2H)
        return data.tobytes()

    def tensor(
        self,
        dtype: int,
        shape: Sequence[int],
        address: int | None,
        *,
        strides: Sequence[int] | None = None,
        offset: int = 0,
        form: int = ND,
        storage: Sequence[int] | None = None,
    ) -> int:
        """An aclTensor; contiguous without strides, with the shape as storage unless told."""
        rank = len(shape)
        step = None if strides is None else (c_int64 * rank)(*strides)
        sizes = shape if storage is None else storage
        handle = self._create_tensor(
            (c_int64 * rank)(*shape),
            rank,
            dtype,
            step,
            offset,
            form,
            (c_int64 * len(sizes))(*sizes),
            len(sizes),
            address,
        )
        if not handle:
            raise CannError("aclCreateTensor", 0, self.message())
        return int(handle)

    def array(self, entry: Any, values: Sequence[float]) -> int:
        """An aclBoolArray, aclIntArray or aclFloatArray, by the ctypes type of its entries."""
        return int(self._create_array[entry]((entry * len(values))(*values), len(values)))

    def bool_array(self, values: Sequence[bool]) -> int:
        """An aclBoolArray."""
        return self.array(c_bool, values)

    def scalar(self, dtype: int, content: bytes) -> int:
        """An aclScalar."""
        return int(self._create_scalar(content, dtype))

    def plan(self, op: str, *arguments: Any) -> tuple[int, int]:
        """Phase 1: size of the workspace, and the executor."""
        size, executor = c_uint64(), c_void_p()
        self.call(f"{op}GetWorkspaceSize", *arguments, ctypes.byref(size), ctypes.byref(executor))
        assert executor.value
        return size.value, executor.value
