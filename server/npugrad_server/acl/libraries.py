"""Finds CANN's libraries and binds their functions.

The operators are in a split set (``libopapi_nn.so``, ``libopapi_cv.so``, ``libopapi_transformer.so``) or in
one ``libopapi.so``. The vendor forbids mixing them, so only the first layout whose leading library loads is
searched. ``libcust_opapi.so`` is never searched: add-ons export functions with the same names but other
tensor layouts from it.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npugrad_server.acl.symbols import RUNTIME, SIMULATION_MARKER, TENSORS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from npugrad_server.acl.symbols import Symbol

RUNTIME_LIBRARY, TENSOR_LIBRARY = "libascendcl.so", "libnnopbase.so"
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "split": ("libopapi_nn.so", "libopapi_cv.so", "libopapi_transformer.so"),
    "single": ("libopapi.so",),
    "by purpose": ("libaclnn_ops_train.so",),
}
"""Layouts in order of preference; the first library of each decides, and layouts are never mixed."""
_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")


class LibraryError(RuntimeError):
    """Libraries or functions of CANN are missing; the message lists what was tried, and why it failed."""


class SymbolMissing(RuntimeError):
    """No library has a called function; the message names the CANN release that introduced it."""


@dataclass(frozen=True)
class LoadAttempt:
    """One try to load a library.

    Attributes:
        what: Name or path.
        problem: What the loader said; empty when it was loaded.
    """

    what: str
    problem: str

    def __str__(self) -> str:
        """What was tried, and how it went."""
        return f"{self.what}: {self.problem or 'loaded'}"


class Missing:
    """Stands for a function that no library has.

    Attributes:
        symbol: The function.
        reason: Where it was looked for, and which release of CANN has it.
    """

    def __init__(self, symbol: Symbol, libraries: Iterable[str]) -> None:
        self.symbol = symbol
        self.reason = (
            f"{symbol.name} is not in {', '.join(libraries) or 'any library'}; expected CANN "
            f"{symbol.since} or newer"
        )

    def __call__(self, *_: object) -> Any:
        """Does not return.

        Raises:
            SymbolMissing: Always.
        """
        raise SymbolMissing(self.reason)


@dataclass(frozen=True)
class Functions:
    """Bound functions by name, with a `Missing` in place of each missing one."""

    by_name: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """The function, or its `Missing`."""
        return self.by_name[name]

    def has(self, name: str) -> bool:
        """Whether a library has it."""
        return not isinstance(self.by_name[name], Missing)

    @property
    def missing(self) -> tuple[Missing, ...]:
        """All that are missing, optional ones included."""
        return tuple(found for found in self.by_name.values() if isinstance(found, Missing))


@dataclass
class Loader:
    """Loads libraries and remembers every try.

    Attributes:
        folders: Where to look if the system's own search, including LD_LIBRARY_PATH, finds nothing.
        attempts: Every try so far.
    """

    folders: Sequence[Path] = field(default_factory=lambda: cann_folders())
    attempts: list[LoadAttempt] = field(default_factory=list)

    def load(self, name: str) -> ctypes.CDLL | None:
        """Loads a library; None if no place has a usable one."""
        for what in (name, *(str(folder / name) for folder in self.folders)):
            try:
                library = ctypes.CDLL(what)
            except OSError as error:
                self.attempts.append(LoadAttempt(what, str(error).removeprefix(f"{what}: ")))
                continue
            self.attempts.append(LoadAttempt(what, ""))
            return library
        return None

    def require(self, name: str) -> ctypes.CDLL:
        """Loads a library that must be there.

        Raises:
            LibraryError: It cannot be loaded.
        """
        library = self.load(name)
        if library is None:
            raise self.error(f"{name} cannot be loaded, so there is no usable CANN here")
        return library

    def error(self, what: str) -> LibraryError:
        """The error that says what is missing and lists all that was tried."""
        tried = "; ".join(str(attempt) for attempt in self.attempts)
        homes = ", ".join(f"{name}={os.environ.get(name, 'not set')}" for name in _HOMES)
        return LibraryError(
            f"{what}. Tried {tried}. {homes}. With CANN installed, load its environment first (set_env.sh)"
        )


def cann_folders() -> tuple[Path, ...]:
    """The library folders of the CANN installations that the environment names."""
    return tuple(home / "lib64" for home in cann_homes())


def cann_homes() -> tuple[Path, ...]:
    """The CANN installations that the environment names."""
    homes = dict.fromkeys(os.environ[name] for name in _HOMES if os.environ.get(name))
    return tuple(Path(home) for home in homes)


class Cann:
    """The functions of one CANN installation, found and typed.

    Attributes:
        runtime: Functions of `symbols.RUNTIME`.
        tensors: Functions of `symbols.TENSORS`.
        layout: Which of `LAYOUTS` the operators are in.
        libraries: Loaded operator libraries by name.
        attempts: Every try to load a library.
        simulated: Whether this is the simulated CANN of the tests.
    """

    def __init__(self, loader: Loader | None = None) -> None:
        """Loads all libraries.

        Args:
            loader: How to load; by default from the system's search and the environment's CANN.

        Raises:
            LibraryError: A library or a function that is always needed is missing.
        """
        loader = loader or Loader()
        runtime = loader.require(RUNTIME_LIBRARY)
        self.simulated = hasattr(runtime, SIMULATION_MARKER)
        self.runtime = bind(RUNTIME, {RUNTIME_LIBRARY: runtime})
        tensors = loader.require(TENSOR_LIBRARY)
        self.tensors = bind(TENSORS, {TENSOR_LIBRARY: tensors})
        self.layout, self.libraries = _operator_libraries(loader)
        self.attempts = tuple(loader.attempts)
        needed = [m.reason for m in self.runtime.missing + self.tensors.missing if not m.symbol.optional]
        if needed:
            raise loader.error("; ".join(needed))

    def operator(self, symbols: Iterable[Symbol]) -> Functions:
        """Binds functions of the operator libraries; a missing one becomes a `Missing`."""
        return bind(symbols, self.libraries)


def load_runtime(loader: Loader | None = None) -> tuple[Functions, bool]:
    """The functions of `symbols.RUNTIME` alone, and whether they are simulated.

    Raises:
        LibraryError: Their library cannot be loaded.
    """
    library = (loader or Loader()).require(RUNTIME_LIBRARY)
    return bind(RUNTIME, {RUNTIME_LIBRARY: library}), hasattr(library, SIMULATION_MARKER)


def _operator_libraries(loader: Loader) -> tuple[str, dict[str, ctypes.CDLL]]:
    for layout, names in LAYOUTS.items():
        first = loader.load(names[0])
        if first is not None:
            loaded = {names[0]: first}
            for name in names[1:]:
                library = loader.load(name)
                if library is not None:
                    loaded[name] = library
            return layout, loaded
    leading = " or ".join(names[0] for names in LAYOUTS.values())
    raise loader.error(f"no operator library: {leading} cannot be loaded")


def bind(symbols: Iterable[Symbol], libraries: Mapping[str, ctypes.CDLL]) -> Functions:
    """Looks each function up in the libraries, in order, and gives it its types."""
    found: dict[str, Any] = {}
    for symbol in symbols:
        function = next((f for f in (_lookup(lib, symbol) for lib in libraries.values()) if f), None)
        found[symbol.name] = function or Missing(symbol, libraries)
    return Functions(found)


def _lookup(library: ctypes.CDLL, symbol: Symbol) -> Any:
    try:
        # By index: attribute access would share one object, with its types, with all other users.
        function = library[symbol.name]
    except AttributeError:
        return None
    function.argtypes, function.restype = symbol.arguments, symbol.result
    return function


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


def origin(function: Any) -> str:
    """Path of the library that a bound function really comes from; empty if the loader does not say."""
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes, dladdr.restype = (ctypes.c_void_p, ctypes.POINTER(_DlInfo)), ctypes.c_int
    info = _DlInfo()
    if isinstance(function, Missing) or not dladdr(ctypes.cast(function, ctypes.c_void_p), info):
        return ""
    return os.fsdecode(info.dli_fname or b"")
