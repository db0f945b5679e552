"""Calls whose results one can work out by hand: they tell x from y, which random data cannot explain.

One level of 2 rows and 4 columns, one query, one head, one sampling point. A point at column x and row y
reads the four pixels around it with weights that depend on x and y differently, so an implementation that
takes them the other way round puts the gradient at another key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad import get_operator
from npugrad_server.acceptance.job import Job
from npugrad_server.worker.protocol import CallDone

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from npugrad.products import Product
    from npugrad_server.acceptance.bench import Bench
    from npugrad_server.acceptance.step import StepLog

OPERATOR = "multi_scale_deformable_attention_grad"
_ROWS, _COLUMNS, _CHANNELS = 2, 4, 8


@dataclass(frozen=True)
class Probe:
    """One sampling point and what has to come out.

    Attributes:
        name: What it tells.
        x: Column of the point, in pixels from the centre of the first one.
        y: Row.
        weights: Key -> its share of the gradient of the output; all others get nothing.
    """

    name: str
    x: float
    y: float
    weights: Mapping[int, float]


PROBES = (
    Probe("on column 2 of row 0", 2, 0, {2: 1.0}),
    Probe("on column 0 of row 1", 0, 1, {4: 1.0}),
    Probe("a quarter off in x only", 1.25, 0, {1: 0.75, 2: 0.25}),
    Probe("a quarter off in y only", 2, 0.25, {2: 0.75, 6: 0.25}),
    Probe("beyond the right edge by half a pixel", 3.5, 1, {7: 0.5}),
)
"""The pixel of column x and row y is key 4 y + x. No point has the same share of both sizes."""
_SLOPES = ((1.0, 0.0, "by columns only"), (0.0, 1.0, "by rows only"))
"""Rise of the values for a step in x, in y: grad_location must see each in its own place."""


def _job(product: Product, x: float, y: float, values: npt.NDArray[np.float32]) -> Job:
    record = get_operator(OPERATOR)
    call = record.build(
        product=product, bs=1, nq=1, nh=1, ch=_CHANNELS, levels=((_ROWS, _COLUMNS),), points=1
    )
    location = np.array([(x + 0.5) / _COLUMNS, (y + 0.5) / _ROWS], np.float32)
    made: dict[str, npt.NDArray[Any]] = {
        "value": values,
        "spatial_shape": np.array([_ROWS, _COLUMNS], np.int32),
        "level_start_index": np.zeros(1, np.int32),
        "location": location,
        "attn_weight": np.ones(1, np.float32),
        "grad_output": np.ones(_CHANNELS, np.float32),
    }
    return Job(record, call, {name: array.reshape(call.tensor(name).shape) for name, array in made.items()})


def check_probes(bench: Bench, out: StepLog) -> None:
    """Runs every probe that the device's product can."""
    if OPERATOR not in {record.name for record in bench.operators}:
        return
    for name, job, output, expected in (*_corners(bench.settings.product), *_slopes(bench.settings.product)):
        ran = bench.run_job(job)
        if not isinstance(ran.answer, CallDone):
            out.check(name, False, "a result", ran.answer.message)
            continue
        found = ran.outputs[output].reshape(expected.shape)
        # All numbers are sums of a few powers of two: float32 has them exactly.
        out.check(name, bool(np.array_equal(found, expected)), _shown(expected), _shown(found))


def _corners(product: Product) -> Iterator[tuple[str, Job, str, npt.NDArray[np.float32]]]:
    values = np.zeros((_ROWS * _COLUMNS, _CHANNELS), np.float32)
    for probe in PROBES:
        expected = np.zeros((_ROWS * _COLUMNS, _CHANNELS), np.float32)
        for key, weight in probe.weights.items():
            expected[key] = weight
        yield (
            f"{OPERATOR}: point {probe.name}",
            _job(product, probe.x, probe.y, values),
            "grad_value",
            expected,
        )


def _slopes(product: Product) -> Iterator[tuple[str, Job, str, npt.NDArray[np.float32]]]:
    row, column = np.divmod(np.arange(_ROWS * _COLUMNS, dtype=np.float32), _COLUMNS)
    for by_x, by_y, name in _SLOPES:
        values = np.repeat((by_x * column + by_y * row)[:, None], _CHANNELS, axis=1).astype(np.float32)
        # Location runs from 0 to 1 across the level, so its gradient is that by pixels times the size.
        expected = np.array([by_x * _COLUMNS, by_y * _ROWS], np.float32) * _CHANNELS
        job = _job(product, 1.25, 0.25, values)
        yield f"{OPERATOR}: values that rise {name}", job, "grad_location", expected


def _shown(array: npt.NDArray[Any]) -> str:
    """The first channel only: these are our own numbers, not a caller's."""
    shown = array if array.ndim == 1 else array[:, 0]
    return " ".join(f"{number:g}" for number in shown.tolist())
