"""Loads the compiled CPU kernels: picks the variant that fits the processor, binds its C interface.

The interface is `server/kernels/abi.h`; the libraries lie in `lib` beside this module.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npugrad.dtypes import dtype_from_name
from npugrad.spec import AttrParam, TensorParam

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from npugrad.spec import OpSpec

ABI_VERSION = 1
SETTING = "NPUGRAD_KERNELS_VARIANT"
"""Environment variable that names the variant to load; ``none`` loads none."""
LIBRARIES = Path(__file__).parent / "lib"
SCRATCH_BYTES = 256 * 2**20
"""Unused scratch memory that is kept for the next call."""

VARIANTS: Mapping[str, Mapping[str, frozenset[str]]] = {
    "x86_64": {
        "avx512": frozenset(
            {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c", "bmi1", "bmi2"}
        ),
        "avx2": frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"}),
        "baseline": frozenset(),
    },
    "aarch64": {"neon": frozenset()},
}
"""Flags of the processor that each variant needs, by machine, the best one first."""
_OK, _CANCELLED, _UNSUPPORTED, _INVALID, _NO_MEMORY, _INTERNAL = range(6)


class KernelsUnavailable(RuntimeError):
    """There are no compiled kernels for this host; the message says what was tried."""


class KernelUnsupported(Exception):
    """The kernel does not compute such a call; nothing was written."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )


_Poll = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)


class _Call(ctypes.Structure):
    _fields_ = (
        ("tensors", ctypes.POINTER(ctypes.POINTER(_Tensor))),
        ("integers", ctypes.POINTER(ctypes.c_int64)),
        ("reals", ctypes.POINTER(ctypes.c_double)),
        ("bools", ctypes.POINTER(ctypes.c_uint8)),
        ("tensor_count", ctypes.c_int32),
        ("integer_count", ctypes.c_int32),
        ("real_count", ctypes.c_int32),
        ("bool_count", ctypes.c_int32),
        ("poll", _Poll),
        ("user", ctypes.c_void_p),
    )


_Run = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(_Call))


class _Operator(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("run", _Run), ("strided", ctypes.c_uint64))


_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
_FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "npugrad_abi_version": (ctypes.c_int32, ()),
    "npugrad_variant": (ctypes.c_char_p, ()),
    "npugrad_compiler": (ctypes.c_char_p, ()),
    "npugrad_operators": (ctypes.POINTER(_Operator), (ctypes.POINTER(ctypes.c_int32),)),
    "npugrad_open": (ctypes.c_void_p, (ctypes.c_int32, ctypes.c_int64)),
    "npugrad_close": (None, (ctypes.c_void_p,)),
    "npugrad_threads": (ctypes.c_int32, (ctypes.c_void_p,)),
    "npugrad_kept_bytes": (ctypes.c_int64, (ctypes.c_void_p,)),
    "npugrad_probe_convert": (
        ctypes.c_int32,
        (ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64),
    ),
    "npugrad_probe_tasks": (
        ctypes.c_int32,
        (ctypes.c_void_p, ctypes.POINTER(_Call), ctypes.c_int64, _Body, ctypes.c_void_p),
    ),
    "npugrad_probe_triad": (
        ctypes.c_int32,
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32),
    ),
    "npugrad_probe_fma": (ctypes.c_double, (ctypes.c_void_p, ctypes.c_int64)),
    "npugrad_probe_scratch": (ctypes.c_int32, (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)),
}


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Flags of the processor as Linux names them; empty where it does not tell.

    Args:
        root: Root of the file system; another one in tests.
    """
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(found.partition(":")[2].split())


def usable_variants(machine: str | None = None, flags: frozenset[str] | None = None) -> tuple[str, ...]:
    """Variants that the processor can run, the best one first.

    Args:
        machine: Family of the processor; None for this one.
        flags: Its flags; None for this one.
    """
    known = VARIANTS.get(machine or platform.machine(), {})
    present = cpu_flags() if flags is None else flags
    return tuple(name for name, needed in known.items() if needed <= present)


def find_library(folder: Path = LIBRARIES) -> Path:
    """The best variant's library that is there and runs here, or the one that the environment names.

    Args:
        folder: Where the libraries lie.

    Raises:
        KernelsUnavailable: There is none, or the environment asks for another.
    """
    wanted = os.environ.get(SETTING, "")
    if wanted == "none":
        raise KernelsUnavailable(f"{SETTING}=none")
    usable = usable_variants()
    if wanted and wanted not in usable:
        raise KernelsUnavailable(f"found {SETTING}={wanted}; expected {', '.join((*usable, 'none'))}")
    tried = (wanted,) if wanted else usable
    for name in tried:
        path = folder / f"libnpugrad_kernels_{name}.so"
        if path.is_file():
            return path
    if not usable:
        raise KernelsUnavailable(f"no kernels for {platform.system()} on {platform.machine()}")
    raise KernelsUnavailable(
        f"not built for {' or '.join(tried)}: no C++ compiler when npugrad was installed?"
    )


@dataclass(frozen=True)
class _Bound:
    """A kernel and which tensors, by their place in the record, it takes with any strides."""

    run: Any
    strided: int


class Kernels:
    """One library, with threads and scratch memory of its own.

    Thread safety: any thread may call `run`; calls at once share the threads. `close` comes after them all.

    Attributes:
        variant: Its instruction set: avx512, avx2, baseline or neon.
        compiler: What built it.
        operators: Names of the operators that it computes.
    """

    def __init__(self, threads: int, library: Path | None = None, scratch_bytes: int = SCRATCH_BYTES) -> None:
        """Loads the library and starts its threads.

        Args:
            threads: How many compute at once, callers included; at least 1.
            library: Which; None for the one that fits.
            scratch_bytes: Unused scratch memory that is kept.

        Raises:
            KernelsUnavailable: There is none that can be loaded.
            MemoryError: There is no memory for it.
        """
        path = library or find_library()
        self._functions = _bind(path)
        self.variant = self._functions.npugrad_variant().decode()
        self.compiler = self._functions.npugrad_compiler().decode()
        count = ctypes.c_int32()
        table = self._functions.npugrad_operators(ctypes.byref(count))
        self._bound = {
            table[i].name.decode(): _Bound(table[i].run, table[i].strided) for i in range(count.value)
        }
        self.operators = tuple(self._bound)
        self._context: int | None = self._functions.npugrad_open(max(1, threads), scratch_bytes)
        if self._context is None:
            raise MemoryError("no memory for the threads of the kernels")

    @property
    def threads(self) -> int:
        """How many compute at once, callers included."""
        return int(self._functions.npugrad_threads(self._context))

    @property
    def kept_bytes(self) -> int:
        """Unused scratch memory that is kept now."""
        return int(self._functions.npugrad_kept_bytes(self._context))

    @property
    def functions(self) -> Any:
        """The bound functions, for tests and benchmarks; `context` is what most of them take first."""
        return self._functions

    @property
    def context(self) -> int | None:
        """Handle of threads and scratch memory."""
        return self._context

    def takes_strides(self, spec: OpSpec, name: str) -> bool:
        """Whether the operator's kernel takes an operand as it lies, whatever its strides."""
        index = [param.name for param in _tensors(spec)].index(name)
        return bool(self._bound[spec.name].strided >> index & 1)

    def run(
        self,
        spec: OpSpec,
        inputs: Mapping[str, npt.NDArray[Any] | None],
        attrs: Mapping[str, Any],
        outputs: Mapping[str, npt.NDArray[Any]],
        check_wanted: Callable[[], None] | None = None,
    ) -> None:
        """Computes a call.

        Args:
            spec: Record of one of `operators`.
            inputs: Operands by name, None for null; C-contiguous unless the kernel takes strides.
            attrs: Attributes by name.
            outputs: Wanted outputs by name, C-contiguous; every element is written.
            check_wanted: Called before the start and then between tasks, at most a hundred times a second;
                what it raises ends the call.

        Raises:
            KernelUnsupported: The kernel does not compute such a call; nothing was written.
            MemoryError: There is no scratch memory.
            RuntimeError: The kernel has a bug, or operands do not fit each other.
        """
        poll = _Polled(check_wanted)
        marshalled = _Marshalled(spec, inputs, attrs, outputs, poll)
        status = self._bound[spec.name].run(self._context, ctypes.byref(marshalled.call))
        poll.raise_what_it_met()
        if status == _UNSUPPORTED:
            raise KernelUnsupported(f"{spec.name}: no kernel for such operands")
        if status == _NO_MEMORY:
            raise MemoryError(f"{spec.name}: no scratch memory")
        if status != _OK:
            raise RuntimeError(f"{spec.name}: the kernel ended with status {status}")

    def close(self) -> None:
        """Ends the threads and gives the memory back; no call runs. May be called again."""
        context, self._context = self._context, None
        if context is not None:
            self._functions.npugrad_close(context)


class _Polled:
    """`check_wanted` as C calls it: what it raises is kept until the kernel has returned."""

    def __init__(self, check_wanted: Callable[[], None] | None) -> None:
        self._check_wanted = check_wanted
        self._error: BaseException | None = None
        self.function = _Poll(self._ask) if check_wanted else _Poll()

    def _ask(self, _: int | None) -> int:
        try:
            if self._check_wanted:
                self._check_wanted()
        except BaseException as error:
            self._error = error
            return 1
        return 0

    def raise_what_it_met(self) -> None:
        if self._error is not None:
            raise self._error


class _Marshalled:
    """The C description of a call; keeps everything alive that it points to."""

    def __init__(
        self,
        spec: OpSpec,
        inputs: Mapping[str, npt.NDArray[Any] | None],
        attrs: Mapping[str, Any],
        outputs: Mapping[str, npt.NDArray[Any]],
        poll: _Polled,
    ) -> None:
        arrays = [(inputs if param.role == "input" else outputs).get(param.name) for param in _tensors(spec)]
        self._kept = [None if array is None else _described(array) for array in arrays]
        pointers = (ctypes.POINTER(_Tensor) * len(arrays))(
            *(ctypes.POINTER(_Tensor)() if kept is None else ctypes.pointer(kept[0]) for kept in self._kept)
        )
        values: dict[str, list[Any]] = {"int64": [], "double": [], "bool": []}
        for param in spec.params:
            if isinstance(param, AttrParam):
                given = attrs[param.name]
                kind = "bool" if param.type == "bool_array" else param.type
                values[kind] += given or () if param.type == "bool_array" else [given]
        integers = (ctypes.c_int64 * len(values["int64"]))(*values["int64"])
        reals = (ctypes.c_double * len(values["double"]))(*values["double"])
        bools = (ctypes.c_uint8 * len(values["bool"]))(*values["bool"])
        counts = len(arrays), len(integers), len(reals), len(bools)
        self.call = _Call(pointers, integers, reals, bools, *counts, poll.function, None)


def _tensors(spec: OpSpec) -> list[TensorParam]:
    return [param for param in spec.params if isinstance(param, TensorParam)]


def _described(array: npt.NDArray[Any]) -> tuple[Any, ...]:
    itemsize = array.itemsize
    if any(step < 0 or step % itemsize for step in array.strides):
        raise ValueError("found strides that are negative or no multiple of an element")
    sizes = (ctypes.c_int64 * array.ndim)(*array.shape)
    steps = (ctypes.c_int64 * array.ndim)(*(step // itemsize for step in array.strides))
    dtype = dtype_from_name(array.dtype)
    return _Tensor(array.ctypes.data, dtype.acl, array.ndim, sizes, steps), array


def _bind(path: Path) -> Any:
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"{path.name} cannot be loaded: {error}") from error
    found = library.npugrad_abi_version()
    if found != ABI_VERSION:
        raise KernelsUnavailable(
            f"{path.name}: found version {found} of the interface; expected {ABI_VERSION}"
        )
    return library
