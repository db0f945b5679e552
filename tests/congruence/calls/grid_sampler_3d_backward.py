"""Grid sampling of volumes: types with DOUBLE, modes, paddings, masks, sizes, strides."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tests.congruence.calls.grid_sampler_2d_backward import SIZES
from tests.congruence.combinations import FLOATS, Combination, bits, restride
from tests.operators import GRID_SAMPLER_3D


def combinations() -> Iterator[Combination]:
    """Types with DOUBLE, modes, paddings, masks, sizes, strides."""
    dtypes = (*FLOATS, "float64")
    for dtype, mode, padding, mask in product(dtypes, (0, 1), (0, 1, 2), product((True, False), repeat=2)):
        call = GRID_SAMPLER_3D.build(
            dtype=dtype,
            interpolation_mode=mode,
            padding_mode=padding,
            align_corners=mask[0],
            output_mask=mask,
        )
        yield Combination(f"{dtype}, modes {mode} {padding}, {bits(mask)}", call)
    for dtype, (size, options), mode in product(dtypes, SIZES.items(), (0, 1)):
        call = GRID_SAMPLER_3D.build(dtype=dtype, interpolation_mode=mode, padding_mode=mode, **options)
        yield Combination(f"{dtype}, {size}, mode {mode}", call)
    for dtype in dtypes:
        call = GRID_SAMPLER_3D.build(dtype=dtype)
        last = restride(call, input=((180, 1, 60, 15, 3), 0), grad_output=((36, 1, 18, 6, 3), 0))
        yield Combination(f"{dtype}, channels last", last)
        yield Combination(f"{dtype}, expanded", restride(call, grad_output=((0, 0, 0, 0, 0), 0)))
        if dtype != "float64":  # leaves the AI Core, where nothing is deterministic
            yield Combination(f"{dtype}, deterministic, channels last", last, True)
