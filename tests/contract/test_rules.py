"""The shared checks, one by one: what holds, what does not, and that both sides are told."""

from __future__ import annotations

from typing import Any

from npugrad import CallMeta, DType, Format, Product, TensorMeta
from npugrad import rules as r

X = TensorMeta("float32", (2, 3, 4))
CALL = CallMeta(
    inputs={"x": X, "like_x": X, "half": TensorMeta("float16", (3,)), "absent": None},
    attrs={"mode": 1, "n": 6},
    outputs={"declared": TensorMeta("float64", (2, 3), format="NCHW"), "null": None},
)
FLOATS = dict.fromkeys(Product, (DType.FLOAT32, DType.BFLOAT16))

# A check, what it finds (None: it holds), what it expects.
CASES: list[tuple[Any, str | None, str]] = [
    (r.dtype_supported("x", FLOATS), None, ""),
    (
        r.dtype_supported("half", FLOATS),
        "dtype float16",
        "float32 or bfloat16 on Atlas A2 training series / Atlas 800I A2 inference products",
    ),
    (r.same_dtype("like_x", "x"), None, ""),
    (r.same_dtype("absent", "x"), None, ""),
    (r.same_dtype("null", "x"), None, ""),
    (r.same_dtype("inferred", "x"), None, ""),
    (r.same_dtype("half", "x"), "dtype float16", "float32, the dtype of x"),
    (r.same_dtype("declared", "x"), "dtype float64", "float32, the dtype of x"),
    (r.dtype_is("absent", (DType.BOOL,)), None, ""),
    (r.dtype_is("x", (DType.BOOL, DType.UINT8)), "dtype float32", "bool or uint8"),
    (r.format_is("x", (Format.ND,)), None, ""),
    (r.format_is("declared", (Format.ND,)), "format NCHW", "ND"),
    (r.rank_within("x", 0, 3), None, ""),
    (r.rank_within("x", 4, 4), "rank 3, shape [2, 3, 4]", "rank 4"),
    (r.rank_within("x", 0, 2), "rank 3, shape [2, 3, 4]", "rank 0 to 2"),
    (r.element_count("x", lambda call: 4 * call.integer("n"), "4n"), None, ""),
    (r.element_count("absent", lambda call: 9, "9"), None, ""),
    (
        r.element_count("half", lambda call: call.integer("n"), "n"),
        "3 elements, shape [3]",
        "n = 6 elements",
    ),
    (r.shape_is("like_x", lambda call: call.tensor("x").shape, "the shape of x"), None, ""),
    (
        r.shape_is("declared", lambda call: call.tensor("x").shape, "the shape of x"),
        "shape [2, 3]",
        "[2, 3, 4], the shape of x",
    ),
    (r.axis_is("x", 1, lambda call: 3, "three"), None, ""),
    (r.axis_is("x", 1, lambda call: 5, "as y"), "3 on axis 1 of shape [2, 3, 4]", "5, as y"),
    (r.axis_within("x", 2, 4, 8, 4), None, ""),
    (r.axis_within("x", 2, 5, 8), "4 on axis 2", "5 to 8"),
    (r.axis_within("x", 1, 0, 8, 2), "3 on axis 1", "0 to 8, a multiple of 2"),
    (r.axis_multiple_of("x", 2, 2), None, ""),
    (r.axis_multiple_of("x", 1, 2), "3 on axis 1", "a multiple of 2"),
    (r.integer_in("mode", {"nearest": 1}), None, ""),
    (r.integer_in("n", {"bilinear": 0, "nearest": 1}), "6", "0 (bilinear) or 1 (nearest)"),
]


def test_a_check_tells_what_it_found_and_expected() -> None:
    for number, (check, found, expected) in enumerate(CASES):
        finding = check(CALL)
        told = (finding.found, finding.expected) if finding else (None, "")
        assert told == (found, expected), number


def test_lists_read_like_sentences() -> None:
    assert [r.listed(items) for items in ("a", "ab", ["a", "b", 3])] == ["a", "a or b", "a, b or 3"]
