"""What the tests of every kernel need: run it, and hold it against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, settings
from tests.derived import random_cases, told, turns

from npugrad.dtypes import DType
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import OpRecord
from npugrad.tolerance import compare
from npugrad_server.backends.cpu.kernels import Kernels

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array | None]
Inputs = dict[str, Array | None]

DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


def examples(count: int) -> settings:
    """So many examples for hypothesis in full depth, of kernels that all of them share."""
    shared = [HealthCheck.function_scoped_fixture]
    return settings(random_cases(count), suppress_health_check=shared)


def given_array(inputs: Arrays, name: str) -> Array:
    array = inputs[name]
    assert array is not None
    return array


def outputs_for(record: OpRecord, call: CallMeta, pattern: int = 0xA5) -> dict[str, Array]:
    """Wanted outputs, filled with a pattern that no kernel may leave or read."""
    return {
        name: np.frombuffer(bytearray([pattern]) * meta.nbytes, meta.dtype.numpy).reshape(meta.shape)
        for name, meta in record.infer(call).items()
        if meta is not None
    }


@contextmanager
def result_at(meta: TensorMeta, offset_bytes: int) -> Iterator[Array]:
    """Give memory for a result, so far behind the start of a cache line; nothing around it may change."""
    memory = np.full(meta.nbytes + 128, 0xA5, np.uint8)
    start = -memory.ctypes.data % 64 + offset_bytes
    end = start + meta.nbytes
    yield memory[start:end].view(meta.dtype.numpy).reshape(meta.shape)
    assert (memory[:start] == 0xA5).all()
    assert (memory[end:] == 0xA5).all()


def computed(kernels: Kernels, record: OpRecord, call: CallMeta, inputs: Arrays) -> dict[str, Array]:
    outputs = outputs_for(record, call)
    kernels.run(record, inputs, call.attrs, outputs)
    return outputs


def golden(record: OpRecord, call: CallMeta, inputs: Arrays) -> dict[str, Array]:
    outputs = {
        name: np.empty(meta.shape, np.float64)
        for name, meta in record.infer(call).items()
        if meta is not None
    }
    record.reference(inputs, call.attrs, outputs)
    return outputs


def assert_right(
    record: OpRecord,
    call: CallMeta,
    inputs: Arrays,
    found: Mapping[str, Array],
    *,
    expected: Mapping[str, Array] | None = None,
) -> None:
    """Each output is within the tolerance of the design; of the reference, unless it is known."""
    expected = golden(record, call, inputs) if expected is None else expected
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        result = compare(values, found[name], record.extra_tolerance(inputs, call.attrs, name))
        assert result.ok, f"{name}: {result}"


def assert_same_bits(found: Mapping[str, Array], other: Mapping[str, Array]) -> None:
    assert found.keys() == other.keys()
    for name, values in found.items():
        assert values.tobytes() == other[name].tobytes(), name


def largest_error(found: Array, expected: Array) -> float:
    """max|e| / max|g|, as accuracy tables show it."""
    return float(np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max())


def assert_errors_below(
    kernels: Kernels, record: OpRecord, call: CallMeta, inputs: Arrays, limit: float
) -> None:
    """The largest error of each output is below a limit; an output of zeros is exact."""
    found = computed(kernels, record, call, inputs)
    for name, values in golden(record, call, inputs).items():
        error = largest_error(found[name], values) if values.any() else float(found[name].any())
        assert error < limit, (name, error)


def assert_any_threads_give_the_same(
    make_kernels: Callable[[int], Kernels],
    record: OpRecord,
    call: CallMeta,
    inputs: Arrays,
    threads: tuple[int, ...] = (2, 3),
) -> None:
    """The bits of one thread are those of more, and right."""
    one = computed(make_kernels(1), record, call, inputs)
    for count in threads:
        assert_same_bits(computed(make_kernels(count), record, call, inputs), one)
    assert_right(record, call, inputs, one)


def bits_at_bounds(
    record: OpRecord,
    bounds: Sequence[Mapping[str, Any]],
    make: Callable[[CallMeta, Mapping[str, Any]], Inputs],
    count: int = 2,
) -> Callable[..., None]:
    """A test that any number of threads gives the same right bits, with sizes at the bounds of a kernel.

    Args:
        record: The operator.
        bounds: Keywords of its `build`.
        make: Makes the operands of a call from it and its sizes.
        count: How many types each size has in full depth; in `make test` it has one, the next size the next.
    """

    @turns(count)
    def test(make_kernels: Callable[[int], Kernels], turn: int) -> None:
        for number, sizes in enumerate(bounds, turn):
            call = record.build(dtype=DTYPES[number % 3], **sizes)
            with told((DTYPES[number % 3], sizes)):
                assert_any_threads_give_the_same(make_kernels, record, call, make(call, sizes))

    return test


def assert_not_finite_alike(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Infinities and NaNs are where the reference, rounded to the output's type, has them."""
    for name, values in expected.items():
        with np.errstate(all="ignore"):
            cast = values.astype(np.float32).astype(found[name].dtype).astype(np.float32)
        got = found[name].astype(np.float32)
        odd = ~np.isfinite(cast)
        assert np.array_equal(got[odd], cast[odd], equal_nan=True), name
        assert np.isfinite(got[~odd]).all(), name


def contents(outputs: Mapping[str, Array]) -> dict[str, bytes]:
    """What the outputs hold, to see whether it is written to."""
    return {name: array.tobytes() for name, array in outputs.items()}
