"""Kernels of a library that this process cannot load: a driver, perhaps emulated, computes with them.

`driver.cpp` is the other end, and says what goes over the pipes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import itertools
import os
import queue
import shlex
import struct
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from npugrad import OPERATORS
from npugrad_server.backends.cpu.calls import Layout
from npugrad_server.backends.cpu.kernels import ABI_VERSION, SCRATCH_BYTES, Kernels, _Bound, _Call

SOURCE = Path(__file__).with_name("driver.cpp")
DRIVER = "NPUGRAD_TEST_KERNELS_DRIVER"
"""Environment variable: the command that runs the driver; without it this process loads the libraries."""
_HELLO, _CALL, _DONE, _ASK, _ANSWER, _CONVERT, _SCRATCH, _KEPT = range(8)
_NULL, _INPUT, _OUTPUT = range(3)
_BESIDE, _OPERAND = 100, 101
_HEADER = struct.Struct("=QIIQ")
_PAGE = 4096
_ITEMSIZES = {0: 4, 1: 2, 2: 1, 3: 4, 4: 1, 6: 2, 7: 2, 8: 4, 9: 8, 10: 8, 11: 8, 12: 1, 27: 2}
"""Bytes of an element by the number of aclDataType."""


class _Tensor(ctypes.Structure):
    """`npugrad_tensor` of `abi.h`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )


def driver_command() -> list[str]:
    """The command that the environment gives; empty when it gives none."""
    return shlex.split(os.environ.get(DRIVER, ""))


def build_driver(path: Path, compiler: Sequence[str], flags: Sequence[str] = ()) -> Path:
    """Compiles the driver unless it is up to date.

    Args:
        path: Where it shall lie; a stamp beside it tells what it was made of.
        compiler: Command of the C++ compiler.
        flags: More of them, such as a sanitizer's.
    """
    command = [*compiler, "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-pthread", *flags, str(SOURCE)]
    abi = SOURCE.parents[3] / "server" / "kernels" / "abi.h"
    key = hashlib.sha256("\0".join(command).encode() + SOURCE.read_bytes() + abi.read_bytes()).hexdigest()
    stamp = path.with_name(f".{path.name}.stamp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path.is_file() and stamp.is_file() and stamp.read_text() == key):
            stamp.unlink(missing_ok=True)
            made = [*command, "-o", str(path), "-ldl"]
            done = subprocess.run(made, check=False, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
            stamp.write_text(key)
    return path


class DrivenKernels(Kernels):
    """Kernels whose calls a driver computes; everything else of `Kernels` is as it is.

    Beside what the kernel answers, a call fails when it wrote an operand or memory around any tensor.
    """

    def __init__(
        self,
        threads: int,
        library: Path,
        scratch_bytes: int = SCRATCH_BYTES,
        command: Sequence[str] | None = None,
        *,
        float64_coordinates: bool = False,
    ) -> None:
        """Starts a driver.

        Args:
            threads: How many compute at once.
            library: What it loads.
            scratch_bytes: Unused scratch memory that is kept.
            command: Runs the driver; None for what the environment gives.
            float64_coordinates: As of `Kernels`.
        """
        options = map(str, (threads, scratch_bytes, int(float64_coordinates)))
        self._driver = _Driver([*(command or driver_command()), str(library), *options])
        body = self._driver.hello()
        version, self._threads, count = struct.unpack_from("=iii", body)
        assert version == ABI_VERSION
        strided = struct.unpack_from(f"={count}Q", body, 12)
        self.variant, self.compiler, *names = body[12 + 8 * count :].decode().split("\n")
        self.operators = tuple(names)
        self._bound = {
            name: _Bound(functools.partial(self._compute, place, name), strided[place])
            for place, name in enumerate(names)
        }
        self._layouts = {}
        self._functions = _Probes(self._driver, self._threads)
        self._context: int | None = 1

    @property
    def ended(self) -> bool:
        """Whether the driver is gone, which no call survives."""
        return self._driver.ended

    def _compute(self, place: int, name: str, _: int | None, address: int) -> int:
        call = _Call.from_address(address)
        tensors = ctypes.cast(call.tensors, ctypes.POINTER(ctypes.POINTER(_Tensor)))
        inputs = {param.name for param in OPERATORS[name].inputs}
        roles = [_INPUT if tensor in inputs else _OUTPUT for tensor in Layout(OPERATORS[name]).tensors]
        outputs: list[tuple[int, int]] = []
        body = bytearray(struct.pack("=ii", place, bool(call.poll)))
        body += struct.pack("=4i", call.tensor_count, call.integer_count, call.real_count, call.bool_count)
        for i, role in enumerate(roles):
            body += _packed(tensors[i], role, outputs)
        body += struct.pack(f"={call.integer_count}q", *call.integers[: call.integer_count])
        body += struct.pack(f"={call.real_count}d", *call.reals[: call.real_count])
        body += struct.pack(f"={call.bool_count}B", *call.bools[: call.bool_count])
        status, answer = self._driver.computed(
            _CALL, body, (lambda: call.poll(call.user)) if call.poll else None
        )
        start = 0
        for address, size in outputs:
            ctypes.memmove(address, answer[start : start + size], size)
            start += size
        return status

    def close(self) -> None:
        """Ends the driver, which must have nothing to say.

        Raises:
            RuntimeError: It ended with an error: a sanitizer's report, or a crash.
        """
        context, self._context = self._context, None
        if context is not None:
            self._driver.close()


def _packed(pointer: Any, role: int, outputs: list[tuple[int, int]]) -> bytes:
    if not pointer:
        return struct.pack("=4iq", _NULL, 0, 0, 0, 0)
    tensor = pointer.contents
    shape, strides = tensor.shape[: tensor.rank], tensor.strides[: tensor.rank]
    span = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    size = 0 if 0 in shape else span * _ITEMSIZES[tensor.dtype]
    address = tensor.data or 0
    if role == _OUTPUT:
        outputs.append((address, size))
    head = struct.pack("=4iq", role, tensor.dtype, tensor.rank, address % _PAGE, size)
    sizes = struct.pack(f"={2 * tensor.rank}q", *shape, *strides)
    return head + sizes + (ctypes.string_at(address, size) if size else b"")


class _Probes:
    """What tests ask of a library beside calls."""

    def __init__(self, driver: _Driver, threads: int) -> None:
        self._driver, self._threads = driver, threads

    def npugrad_threads(self, _: int | None) -> int:
        return self._threads

    def npugrad_kept_bytes(self, _: int | None) -> int:
        return int(struct.unpack("=q", self._driver.ask(_KEPT, b""))[0])

    def npugrad_probe_scratch(self, _: int | None, size: int, blocks: int) -> int:
        return self._driver.computed(_SCRATCH, struct.pack("=qi", size, blocks))[0]

    def npugrad_probe_convert(
        self, source: int, source_dtype: int, target: int, target_dtype: int, count: int
    ) -> int:
        read, written = count * _ITEMSIZES[source_dtype], count * _ITEMSIZES[target_dtype]
        body = struct.pack("=4i3q", source_dtype, target_dtype, target % _PAGE, 0, count, read, written)
        body += ctypes.string_at(source, read) + ctypes.string_at(target, written)
        status, answer = self._driver.computed(_CONVERT, body)
        ctypes.memmove(target, answer, written)
        return status

    def __getattr__(self, name: str) -> NoReturn:
        pytest.skip(f"{name} calls back into Python: only for a library in this process")


class _Driver:
    """The driver's process, and who waits for which of its answers."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._greeting: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._waiting = {0: self._greeting}
        self.ended = False
        self._said: list[bytes] = []
        self._readers = [
            threading.Thread(target=target, daemon=True) for target in (self._read_answers, self._read_words)
        ]
        for reader in self._readers:
            reader.start()

    def hello(self) -> bytes:
        """What it says at its start."""
        return self._next(self._greeting)[1]

    def ask(self, kind: int, body: bytes | bytearray, check: Any = None) -> bytes:
        answers: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answers
            if self.ended:
                self._fail()
        self._send(number, kind, body)
        while True:
            kind, answer = self._next(answers)
            if kind != _ASK:
                return answer
            self._send(number, _ANSWER, struct.pack("=i", check()))

    def computed(self, kind: int, body: bytes | bytearray, check: Any = None) -> tuple[int, bytes]:
        """Status and the rest of an answer.

        Raises:
            RuntimeError: Memory was written that is none of the outputs'.
        """
        answer = self.ask(kind, body, check)
        (status,) = struct.unpack_from("=i", answer)
        if status == _BESIDE:
            raise RuntimeError("the kernel wrote beside a tensor")
        if status == _OPERAND:
            raise RuntimeError("the kernel wrote an operand")
        return status, answer[4:]

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        for reader in self._readers:
            reader.join(60)
        status = self._process.wait(60)
        if status or self._said:
            raise RuntimeError(f"the driver ended with {status}:\n{self._words()}")

    def _send(self, number: int, kind: int, body: bytes | bytearray) -> None:
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(_HEADER.pack(number, kind, 0, len(body)))
                self._process.stdin.write(body)
                self._process.stdin.flush()
            except BrokenPipeError:
                self._fail()

    def _next(self, answers: queue.SimpleQueue[tuple[int, bytes]]) -> tuple[int, bytes]:
        kind, answer = answers.get()
        if kind < 0:
            self._fail()
        return kind, answer

    def _fail(self) -> NoReturn:
        self._readers[1].join(30)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        raise RuntimeError(f"the driver ended with {self._process.wait(30)}:\n{self._words()}")

    def _words(self) -> str:
        return b"".join(self._said)[-20_000:].decode(errors="replace")

    def _read_words(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as words:
            while part := words.read1(1 << 16):  # type: ignore[attr-defined]
                self._said.append(part)

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as frames:
            while len(header := frames.read(_HEADER.size)) == _HEADER.size:
                number, kind, _, size = _HEADER.unpack(header)
                body = frames.read(size)
                with self._lock:
                    answers = self._waiting[number] if kind == _ASK else self._waiting.pop(number)
                answers.put((kind, body))
        with self._lock:
            self.ended = True
            for answers in self._waiting.values():
                answers.put((-1, b""))
