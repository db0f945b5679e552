"""The sampling points of a call of deformable attention, as pixel edges see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.coordinates import ATTENTION_RULES, CoordinateRule, attention_pixels
from npugrad.references._blocks import spans
from npugrad.references.multi_scale_deformable_attention_grad import reference
from npugrad.sampled import SampledCall

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from npugrad.operator import Arrays

    Array = npt.NDArray[Any]
    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]

_BLOCK_BYTES = 64 * 2**20


class Sampled(SampledCall):
    """The points of a call: (bs, nq, nh, nl, np), each read at (x, y) in its level."""

    edge = 0.0
    axes = 2
    rows = {"grad_location": 2, "grad_attn_weight": 1}  # noqa: RUF012  # as the base class has it
    sums, points = "grad_value", "location"

    def __init__(self, inputs: Arrays, attrs: Mapping[str, Any]) -> None:
        """Takes a call; see the record."""
        self._inputs = {name: np.asarray(array) for name, array in inputs.items()}
        self._location, self._weight = self._inputs["location"], self._inputs["attn_weight"]
        self._shape = self._weight.shape
        self.count = self._weight.size
        self._levels = np.array(self._inputs["spatial_shape"], np.int64)[:, ::-1]  # x first
        self.rules = ATTENTION_RULES[:1] if self._location.dtype == np.float64 else ATTENTION_RULES

    def compute(self, rule: CoordinateRule, outputs: Mapping[str, Array]) -> None:
        reference(self._inputs, {}, outputs, rule=rule)

    def sizes(self, points: Ints) -> Floats:
        return self._size(points).astype(np.float64)

    def places(self, points: Ints) -> Floats:
        return self._pixels(points, CoordinateRule.FLOAT64)

    def located(self, points: Ints, rule: CoordinateRule) -> Floats:
        return self._pixels(points, rule)[..., np.newaxis]

    def placed(self, points: Ints, rule: CoordinateRule) -> Floats:
        pixels = self._pixels(points, rule)
        above = np.where(pixels == -1, -1.0, 1.0)  # at -1 a sample is out of reach
        return self.off_edges(pixels, self.sizes(points), above)

    def read(self, points: Ints, places: Floats, names: tuple[str, ...]) -> dict[str, Floats]:
        found = {name: np.zeros((*places.shape[:2], self.rows[name])) for name in names}
        for chosen, inputs in self._alone(points, places):
            _, _, head, level, _ = self._at(points[chosen])
            where = (0, np.arange(len(chosen)), head, level)
            rows = {name: np.zeros(inputs[_LIKE[name]].shape) for name in names}
            reference(inputs, {}, rows)
            for name, values in rows.items():
                found[name][chosen] = values[where].reshape(len(chosen), places.shape[1], -1)
        return found

    def add_up(self, rule: CoordinateRule, points: Ints, places: Floats, sums: Floats) -> None:
        batches = self._at(points)[0]
        for batch in np.unique(batches).tolist():
            one = slice(batch, batch + 1)
            others = {name: array[one] for name, array in self._inputs.items() if name not in _LEVELS}
            others["location"] = others["location"].copy()
            others["location"][0][self._at(points[batches == batch])[1:]] = np.nan
            reference({**self._inputs, **others}, {}, {"grad_value": sums[one]}, rule=rule)
        for chosen, inputs in self._alone(points, places[:, np.newaxis]):
            batch = int(batches[chosen[0]])
            moved = np.zeros((1, *sums.shape[1:]))
            reference(inputs, {}, {"grad_value": moved})
            sums[batch : batch + 1] += moved

    def _pixels(self, points: Ints, rule: CoordinateRule) -> Floats:
        return attention_pixels(self._location[self._at(points)], self._size(points), rule)

    def _at(self, points: Ints) -> tuple[Ints, ...]:
        return np.unravel_index(points, self._shape)

    def _size(self, points: Ints) -> Ints:
        found: Ints = self._levels[self._at(points)[3]]
        return found

    def _alone(self, points: Ints, places: Floats) -> Iterator[tuple[Ints, dict[str, Array]]]:
        """Yields calls with points of one batch only, each point a query with its places as sampling points.

        Heads and levels are unchanged; those that are not the point's own have no location.
        """
        batches = self._at(points)[0]
        _, _, heads, levels, _ = self._shape
        row_bytes = heads * (levels * places.shape[1] * 32 + 8 * self._inputs["value"].shape[3])
        for batch in np.unique(batches).tolist():
            mine = np.flatnonzero(batches == batch)
            for span in spans(len(mine), row_bytes, _BLOCK_BYTES):
                yield mine[span], self._queries(batch, points[mine[span]], places[mine[span]])

    def _queries(self, batch: int, points: Ints, places: Floats) -> dict[str, Array]:
        where = self._at(points)
        _, query, head, level, _ = where
        shape = (1, len(points), *self._shape[2:4], places.shape[1])
        own = (0, np.arange(len(points)), head, level)
        location, weight = np.full((*shape, 2), np.nan), np.zeros(shape)
        location[own] = (places + 0.5) / self._size(points)[:, np.newaxis]
        weight[own] = self._weight[where][:, np.newaxis]
        return {
            **self._inputs,
            "value": self._inputs["value"][batch : batch + 1],
            "location": location,
            "attn_weight": weight,
            "grad_output": self._inputs["grad_output"][batch, query][np.newaxis],
        }


_LEVELS = ("spatial_shape", "level_start_index")
_LIKE = {"grad_location": "location", "grad_attn_weight": "attn_weight"}
