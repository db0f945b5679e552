"""Loads the compiled CPU kernels: picks the variant that fits the processor, binds its C interface.

The interface is `server/kernels/abi.h`; the libraries are in `lib` next to this module.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from npugrad_server.backends.cpu.calls import Block, Layout, described

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from npugrad.operator import OpRecord
    from npugrad_server.backends.cpu.calls import Arrays

ABI_VERSION = 2
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
"""CPU flags that each variant needs, by machine, the best variant first."""
COMPUTED = frozenset(
    {
        "fused_floyd_attention_grad",
        "grid_sampler_2d_backward",
        "grid_sampler_3d_backward",
        "group_norm_backward",
        "layer_norm_backward",
        "multi_scale_deformable_attention_grad",
    }
)
"""Operators with a kernel in every library. Where that refuses a call, or there is no library, the reference
computes: PyTorch's operators lose more digits than these kernels do."""
_OK, _CANCELLED, _UNSUPPORTED, _INVALID, _NO_MEMORY, _INTERNAL = range(6)


class KernelsUnavailable(RuntimeError):
    """There are no compiled kernels for this host; the message says what was tried."""


class KernelUnsupported(Exception):
    """The kernel does not compute such a call; nothing was written."""


_Poll = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)


class _Call(ctypes.Structure):
    _fields_ = (
        ("tensors", ctypes.c_void_p),
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


_Run = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)


class _Operator(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("run", _Run), ("strided", ctypes.c_uint64))


_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
_FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "npugrad_abi_version": (ctypes.c_int32, ()),
    "npugrad_variant": (ctypes.c_char_p, ()),
    "npugrad_compiler": (ctypes.c_char_p, ()),
    "npugrad_operators": (ctypes.POINTER(_Operator), (ctypes.POINTER(ctypes.c_int32),)),
    "npugrad_open": (ctypes.c_void_p, (ctypes.c_int32, ctypes.c_int64, ctypes.c_int32)),
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
    """CPU flags as Linux names them; empty if it does not tell.

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
    """Finds the library of the best variant that exists and runs here, or of the environment's variant.

    Args:
        folder: Folder of the libraries.

    Raises:
        KernelsUnavailable: There is none, or the environment asks for none or for one that does not run here.
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
    others = ", ".join(sorted(path.stem.rpartition("_")[2] for path in folder.glob("*.so")))
    if others and not wanted:
        raise KernelsUnavailable(
            f"npugrad-server was installed for another processor: found kernels for {others}; "
            f"expected {' or '.join(tried)}"
        )
    raise KernelsUnavailable(
        f"not built for {' or '.join(tried)}: npugrad-server was installed without a C++ compiler, or with "
        "NPUGRAD_BUILD_KERNELS=0"
    )


@dataclass(frozen=True)
class _Bound:
    """A kernel, and a bit mask of the tensors, by position in the record, that it takes with any strides."""

    run: Any
    strided: int


class Kernels:
    """One library, with its own threads and scratch memory.

    Thread safety: any thread may call `run`; concurrent calls share the threads. `close` comes after all.

    Attributes:
        variant: Its instruction set: avx512, avx2, baseline or neon.
        compiler: What built it.
        operators: Names of the operators that it computes.
    """

    def __init__(
        self,
        threads: int,
        library: Path | None = None,
        scratch_bytes: int = SCRATCH_BYTES,
        *,
        float64_coordinates: bool = False,
    ) -> None:
        """Loads the library and starts its threads.

        Args:
            threads: How many compute at once, callers included; at least 1.
            library: Its path; None for the one that fits.
            scratch_bytes: Unused scratch memory that is kept.
            float64_coordinates: Whether sampling coordinates become pixels by the rule ``float64`` instead of
                each operator's first rule.

        Raises:
            KernelsUnavailable: No library can be loaded.
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
        self._layouts: dict[str, Layout] = {}
        self._context: int | None = self._functions.npugrad_open(
            max(1, threads), scratch_bytes, float64_coordinates
        )
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
        """The bound functions, for tests and benchmarks; most of them take `context` first."""
        return self._functions

    @property
    def context(self) -> int | None:
        """Handle of threads and scratch memory."""
        return self._context

    def takes_strides(self, record: OpRecord, name: str) -> bool:
        """Whether the operator's kernel takes an operand with any strides."""
        return bool(self._bound[record.name].strided >> self._layout(record).tensors.index(name) & 1)

    def _layout(self, record: OpRecord) -> Layout:
        found = self._layouts.get(record.name)
        if found is None or found.record is not record:
            self._layouts[record.name] = found = Layout(record)
        return found

    def run(
        self,
        record: OpRecord,
        inputs: Arrays,
        attrs: Mapping[str, Any],
        outputs: Mapping[str, npt.NDArray[Any]],
        check_wanted: Callable[[], None] | None = None,
        *,
        spare: list[Block] | None = None,
    ) -> None:
        """Computes a call.

        Args:
            record: Record of one of `operators`.
            inputs: Operands by name, None for null; C-contiguous unless the kernel takes strides.
            attrs: Attributes by name.
            outputs: Wanted outputs by name, C-contiguous; every element is written.
            check_wanted: Called before the start and then between tasks, at most a hundred times a second; an
                exception that it raises ends the call.
            spare: Blocks of calls that differ from this one only in their arrays' addresses, and have
                `check_wanted` if it has; one is taken, or made, and put back. Several threads may share it.

        Raises:
            KernelUnsupported: The kernel does not compute such a call; nothing was written.
            MemoryError: There is no scratch memory.
            RuntimeError: The kernel has a bug, or operands do not fit each other.
        """
        # `inputs` and `outputs` keep the arrays alive until the kernel has returned.
        block = _taken(spare)
        if block is None:
            layout = self._layout(record)
            arrays = layout.arrays(inputs, outputs)
            block = Block(
                layout, arrays, described(layout, arrays, attrs, _ASK_ADDRESS if check_wanted else 0)
            )
        else:
            block.point_to(inputs, outputs)
        run = self._bound[record.name].run
        if check_wanted is None:
            status = run(self._context, block.address)
        else:
            with _Polled(block.address, check_wanted):
                status = run(self._context, block.address)
        if spare is not None:
            spare.append(block)
        if status == _UNSUPPORTED:
            raise KernelUnsupported(f"{record.name}: no kernel for these operands")
        if status == _NO_MEMORY:
            raise MemoryError(f"{record.name}: no scratch memory")
        if status != _OK:
            raise RuntimeError(f"{record.name}: the kernel ended with status {status}")

    def close(self) -> None:
        """Ends the threads and frees the memory; no call may be running. May be called again."""
        context, self._context = self._context, None
        if context is not None:
            self._functions.npugrad_close(context)


def _taken(spare: list[Block] | None) -> Block | None:
    try:
        return spare.pop() if spare else None
    except IndexError:  # another thread took the last one
        return None


class _Polled:
    """`check_wanted` as C calls it: its exception is kept until the kernel has returned."""

    _running: ClassVar[dict[int, _Polled]] = {}
    """Those of the running calls, by the call's address."""

    def __init__(self, address: int, check_wanted: Callable[[], None]) -> None:
        self._address, self._check_wanted = address, check_wanted
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        self._running[self._address] = self

    def __exit__(self, *_: object) -> None:
        del self._running[self._address]
        if self._error is not None:
            raise self._error

    @classmethod
    def ask(cls, address: int) -> int:
        """Whether to give up the call at that address."""
        polled = cls._running[address]
        try:
            polled._check_wanted()
        except BaseException as error:
            polled._error = error
            return 1
        return 0


_ASK = _Poll(_Polled.ask)
_ASK_ADDRESS = ctypes.cast(_ASK, ctypes.c_void_p).value or 0


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
