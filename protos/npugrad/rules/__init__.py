"""The kinds of rules that pages use: each says what it checks, in which words, and how it can be broken."""

from __future__ import annotations

from npugrad.rules._attributes import at_least, at_most, dim_of, divisible_by, entries, one_of_choices
from npugrad.rules._derived import (
    first_axis_of,
    format_by_rank,
    in_range,
    nd_or_public,
    same_format,
    shape_among,
)
from npugrad.rules._operands import (
    dtype_in,
    format_in,
    format_not,
    not_null,
    only_on,
    product,
    promoted,
    promoted_dtype,
    same_dtype,
    special,
)
from npugrad.rules._shapes import (
    broadcast,
    broadcastable,
    count,
    has_axes,
    last_axis,
    of_sizes,
    rank_in,
    same_shape,
    same_size,
    shape_is,
    size_in,
)
from npugrad.rules._words import FLOATS, SAID, any_empty, listed, present, shape_text

__all__ = [
    "FLOATS", "SAID", "any_empty", "at_least", "at_most", "broadcast", "broadcastable", "count", "dim_of",
    "divisible_by", "dtype_in", "entries", "first_axis_of", "format_by_rank", "format_in", "format_not",
    "has_axes", "in_range", "last_axis", "listed", "nd_or_public", "not_null", "of_sizes", "one_of_choices",
    "only_on", "present", "product", "promoted", "promoted_dtype", "rank_in", "same_dtype", "same_format",
    "same_shape", "same_size", "shape_among", "shape_is", "shape_text", "size_in", "special",
]  # fmt: skip
