"""The kinds of rules, one by one: what holds, what does not, what is told, and how it can be broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from npugrad import CallMeta, DType, Format, Product, TensorMeta
from npugrad import rules as r
from npugrad.changes import numbered
from npugrad.operator import Constraint
from npugrad.page import Page, Rule
from npugrad.workloads import model

Kind = Callable[[Page, str], Rule]
FLOATS = dict.fromkeys(Product, (DType.FLOAT32, DType.BFLOAT16))
X = TensorMeta("float32", (2, 3, 4))
CALL = CallMeta(
    inputs={"x": X, "like_x": X, "flat": TensorMeta("float32", (24,)), "absent": None},
    attrs={"mode": 1, "n": 6, "groups": 3, "sizes": (1, 2), "how": "none"},
)


@pytest.fixture
def page() -> Page:
    """A page with parameters and no rules."""
    made = Page("aclnnMade", "ops-made", dict.fromkeys(Product, "aclnnMade"))
    made.input("x", FLOATS, "", axes="rows columns 4")
    made.input("like_x", FLOATS, "", axes="rows columns 4")
    made.input("flat", FLOATS, "", axes="elements")
    made.input("absent", FLOATS, "", optional=True)
    made.sizes("rows columns", of="x")
    made.attr("mode", "int64", "", choices={"bilinear": 0, "nearest": 1})
    made.attr("n", "int64", "")
    made.attr("groups", "int64", "")
    made.attr("sizes", "int64_array", "")
    made.attr("how", "string", "", ("none", "tanh"))
    made.output("y", "x", "")
    for name in ("x", "like_x", "flat"):
        made.rule(r.rank_in(0, 8), name)
    return made


def added(page: Page, kind: Kind, name: str) -> Constraint:
    page.rule(kind, name, id="made")
    return page.record("made", **_OTHERS).constraints[-1]


_OTHERS: dict[str, Any] = dict.fromkeys(
    (
        *("summary", "reads", "reference", "samples", "workloads", "make_inputs"),
        *("wire", "extra_tolerance", "determinism_check", "min_cann"),
    )
)
CHANGED = CALL.with_inputs(x=TensorMeta("float16", (2, 5, 4), "NCHW"))
# A kind, its operand, a call that breaks it, what is found and expected in it.
CASES: list[tuple[Kind, str, CallMeta, str, str]] = [
    (r.not_null, "x", CALL.with_inputs(x=None), "null", "a tensor"),
    (r.not_null, "sizes", CALL.with_attrs(sizes=None), "null", "a value"),
    (r.not_null, "y", CALL.with_outputs(y=None), "null", "a tensor"),
    (r.dtype_in(), "x", CHANGED, "dtype float16", "float32 or bfloat16"),
    (r.dtype_in(DType.FLOAT32), "x", CHANGED, "dtype float16", "float32"),
    (r.same_dtype("like_x"), "x", CHANGED, "dtype float16", "float32, the dtype of like_x"),
    (r.format_in(Format.ND), "x", CHANGED, "format NCHW", "ND"),
    (r.format_not(Format.NCHW), "x", CHANGED, "format NCHW", "another format, such as ND"),
    (r.has_axes, "flat", CALL.with_inputs(flat=X), "rank 3, shape [2, 3, 4]", "rank 1"),
    (r.same_shape("like_x"), "x", CHANGED, "shape [2, 5, 4]", "[2, 3, 4], the shape of like_x"),
    (r.of_sizes, "like_x", CHANGED, "shape [2, 3, 4]", "[2, 5, 4], (rows, columns, 4) of x"),
    (r.same_size("columns"), "like_x", CHANGED, "3 on axis 1 of shape [2, 3, 4]", "5, as on axis 1 of x"),
    (r.size_in("columns", 1, 4), "x", CHANGED, "5 on axis 1 of shape [2, 5, 4]", "1 to 4"),
    (r.size_in("columns", step=3), "x", CHANGED, "5 on axis 1 of shape [2, 5, 4]", "a multiple of 3"),
    (r.size_in("columns", among=(3, 4)), "x", CHANGED, "5 on axis 1 of shape [2, 5, 4]", "3 or 4"),
    (
        r.last_axis(4, "quads", "the size"),
        "x",
        CALL.with_inputs(x=TensorMeta("float32", (2, 3, 5))),
        "5 on axis 2 of shape [2, 3, 5]",
        "4, the size",
    ),
    (r.entries(2), "sizes", CALL.with_attrs(sizes=(1,)), "1 entries", "2 entries"),
    (r.entries(1, 2), "sizes", CALL.with_attrs(sizes=()), "0 entries", "1 to 2 entries"),
    (r.one_of_choices(), "mode", CALL.with_attrs(mode=6), "6", "0 (bilinear) or 1 (nearest)"),
    (r.one_of_choices(), "how", CALL.with_attrs(how="erf"), "'erf'", "'none' or 'tanh'"),
    (r.dim_of("x"), "mode", CALL.with_attrs(mode=3), "3", "-3 to 2, an axis of x"),
    (
        r.promoted_dtype("x", "like_x"),
        "flat",
        CALL.with_inputs(x=TensorMeta("bfloat16", (2, 3, 4)), flat=TensorMeta("bfloat16", (24,))),
        "dtype bfloat16",
        "float32, as promoted",
    ),
    (r.at_least(1, "positive"), "n", CALL.with_attrs(n=0), "0", "above 0"),
]
# The call breaks these from the start, or only the record knows what does.
ONLY_CHECKED = [
    (r.rank_in(1, 2), "like_x", CALL, "rank 3, shape [2, 3, 4]", "rank 1 to 2"),
    (r.broadcastable("x"), "flat", CALL, "shape [24]", "one to broadcast with [2, 3, 4]"),
    (r.count("n*groups"), "flat", CALL, "24 elements, shape [24]", "n*groups = 18 elements"),
    (r.at_most(5, "limit"), "n", CALL, "6", "at most 5"),
    (r.at_most(1, "per", per="groups"), "n", CALL, "n / groups = 2", "at most 1"),
    (r.divisible_by("groups"), "n", CALL.with_attrs(n=7), "n 7, groups 3", "n divisible by groups"),
]


@pytest.mark.parametrize("case", CASES + ONLY_CHECKED, ids=lambda case: case[1])
def test_a_rule_tells_what_it_found_and_expected(
    page: Page, case: tuple[Kind, str, CallMeta, str, str]
) -> None:
    kind, name, call, found, expected = case
    finding = added(page, kind, name).check(call)
    assert finding is not None
    assert (finding.found, finding.expected) == (found, expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1])
def test_a_kind_breaks_its_rule_alone(page: Page, case: tuple[Kind, str, CallMeta, str, str]) -> None:
    constraint = added(page, case[0], case[1])
    assert constraint.check(CALL) is None
    broken = constraint.violate(CALL)
    assert broken is not None
    assert constraint.check(broken) is not None


@pytest.mark.parametrize("kind", [r.same_dtype("x"), r.rank_in(1, 1), r.count("n"), r.same_shape("x")])
def test_what_is_null_breaks_no_rule_but_that_against_it(page: Page, kind: Kind) -> None:
    assert added(page, kind, "absent").check(CALL) is None


def test_a_rule_that_no_change_breaks_shows_nothing(page: Page) -> None:
    page.rule(r.special("never", "is", lambda call: None, numbered("n", range(9))), "n", id="made")
    assert page.record("made", **_OTHERS).constraints[-1].violate(CALL) is None


def test_derived_sizes_are_those_that_rules_allow(page: Page) -> None:
    page.rule(r.size_in("rows", 5, 40), "x")
    page.rule(r.size_in("rows", step=4), "x", id="x.multiple")
    page.smallest = {"n": 1, "groups": 1, "sizes": ()}
    calls = page.calls
    assert calls.sizes == {"rows": 8, "columns": 3, "elements": 4, **page.smallest}
    workloads = calls.workloads([model("long", "of sequences", rows=40, columns=2**14)])
    assert workloads.named["large"].sizes["rows"] == 32
    assert workloads.named["long"].simulated == {"rows": 40, "columns": 2**10}
    with pytest.raises(TypeError, match=r"found the keywords \['row'\]; expected some of with_absent, mode"):
        calls.build(row=3)


def test_lists_read_like_sentences() -> None:
    assert [r.listed(items) for items in ("a", "ab", ["a", "b", 3])] == ["a", "a or b", "a, b or 3"]
