"""What the tests of every kernel need: run it, and hold it against the float64 reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from npugrad.tolerance import compare

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.spec import CallMeta, OpSpec
    from npugrad_server.backends.cpu.kernels import Kernels

    Array = npt.NDArray[Any]
    Arrays = Mapping[str, Array | None]


def outputs_for(spec: OpSpec, call: CallMeta, pattern: int = 0xA5) -> dict[str, Array]:
    """Wanted outputs, filled with a pattern that no kernel may leave or read."""
    return {
        name: np.frombuffer(bytearray([pattern]) * meta.nbytes, meta.dtype.numpy).reshape(meta.shape)
        for name, meta in spec.infer(call).items()
        if meta is not None
    }


def computed(kernels: Kernels, spec: OpSpec, call: CallMeta, inputs: Arrays) -> dict[str, Array]:
    """Results of the kernel."""
    outputs = outputs_for(spec, call)
    kernels.run(spec, inputs, call.attrs, outputs)
    return outputs


def golden(spec: OpSpec, call: CallMeta, inputs: Arrays) -> dict[str, Array]:
    """Results of the reference, in float64."""
    outputs = {
        name: np.empty(meta.shape, np.float64) for name, meta in spec.infer(call).items() if meta is not None
    }
    spec.reference(inputs, call.attrs, outputs)
    return outputs


def assert_right(spec: OpSpec, call: CallMeta, inputs: Arrays, found: Mapping[str, Array]) -> None:
    """Each output is within the tolerance of the design."""
    expected = golden(spec, call, inputs)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        result = compare(values, found[name], spec.extra_tolerance(inputs, call.attrs, name))
        assert result.ok, f"{name}: {result}"


def assert_same_bits(found: Mapping[str, Array], other: Mapping[str, Array]) -> None:
    """Both have the same bytes."""
    assert found.keys() == other.keys()
    for name, values in found.items():
        assert values.tobytes() == other[name].tobytes(), name


def largest_error(found: Array, expected: Array) -> float:
    """max|e| / max|g|, as accuracy tables show it."""
    return float(np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max())
