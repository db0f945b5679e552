"""Grid sampling of images: types, modes, paddings, corners, masks, sizes, strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product

from tests.congruence.combinations import FLOATS, Combination, bits, restride
from tests.operators import GRID_SAMPLER

from npugrad.meta import CallMeta

SIZES: Mapping[str, Mapping[str, int]] = {
    "one of each": {"n": 1, "c": 1, "h": 1, "w": 1, "oh": 1, "ow": 1},
    "odd": {"n": 3, "c": 5, "h": 7, "w": 3, "oh": 2, "ow": 9},
    "beyond the AI Core": {"n": 1, "c": 2049, "h": 1, "w": 2, "oh": 1, "ow": 1},
    "no image": {"n": 0},
    "no channel": {"c": 0},
    "no row": {"oh": 0},
    "no column": {"ow": 0},
}
"""Those of volumes are the same, with the depth of the default."""
_LAYOUTS: Mapping[str, Callable[[CallMeta], CallMeta]] = {
    "channels last": lambda call: restride(call, input=((60, 1, 15, 3), 0), grad_output=((18, 1, 6, 3), 0)),
    "grid with x and y apart": lambda call: restride(call, grid=((12, 2, 1, 6), 0)),
    "expanded gradient": lambda call: restride(call, grad_output=((0, 0, 0, 0), 0)),
    "expanded channels": lambda call: restride(call, grad_output=((6, 0, 2, 1), 0)),
    "one grid for all": lambda call: restride(call, grid=((0, 4, 2, 1), 0)),
    "window of a larger image": lambda call: restride(call, input=((90, 30, 6, 1), 7)),
    "every second column": lambda call: restride(call, input=((120, 40, 10, 2), 1)),
    "every third column": lambda call: restride(call, input=((180, 60, 15, 3), 0)),
    "rows and columns swapped": lambda call: restride(
        call, input=((60, 20, 1, 4), 0), grad_output=((18, 6, 1, 3), 2)
    ),
}


def combinations() -> Iterator[Combination]:
    """Types, modes, paddings, corners, masks, sizes, strides."""
    masks = list(product((True, False), repeat=2))
    modes = list(product((0, 1), (0, 1, 2), (False, True)))
    for dtype, (mode, padding, align), mask in product(FLOATS, modes, masks):
        call = GRID_SAMPLER.build(
            dtype=dtype,
            interpolation_mode=mode,
            padding_mode=padding,
            align_corners=align,
            output_mask=mask,
        )
        yield Combination(f"{dtype}, modes {mode} {padding} {align}, {bits(mask)}", call)
    for dtype, (size, options), mode in product(FLOATS, SIZES.items(), (0, 1)):
        call = GRID_SAMPLER.build(dtype=dtype, interpolation_mode=mode, padding_mode=mode, **options)
        yield Combination(f"{dtype}, {size}, mode {mode}", call)
    for dtype, (name, layout), mask in product(FLOATS, _LAYOUTS.items(), masks[:3]):
        call = layout(GRID_SAMPLER.build(dtype=dtype, output_mask=mask))
        yield Combination(f"{dtype}, {name}, {bits(mask)}", call)
        yield Combination(f"{dtype}, deterministic, {name}, {bits(mask)}", call, True)
