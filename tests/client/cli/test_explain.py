"""`npugrad explain`: every code, reason, operator and constraint can be looked up, and a slip is guided."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from npugrad import OPERATORS, OpRecord
from npugrad.error_table import BY_CODE, ERRORS
from npugrad_client._cli.explain import UnknownSubject, explain, explanation, nearest

CONSTRAINTS = [c for record in OPERATORS.values() for c in record.constraints]
RECORDS = pytest.mark.parametrize("record", OPERATORS.values(), ids=list(OPERATORS))


def said(subject: str, constraint: str | None = None, width: int = 4000) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, markup=False, emoji=False)
    explain(console, subject, constraint)
    return file.getvalue()


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


# -------------------------------------------------------------------------------------- codes and reasons


def test_every_row_of_the_error_table_is_told_and_is_json_with_its_constraints() -> None:
    for row in ERRORS:
        for subject in {row.reason, row.reason.lower(), str(row.code or row.reason)}:
            text = said(subject)
            for piece in (row.reason, row.sentence, row.grpc_status):
                assert piece in text, subject
            assert ("retrying may help" in text) is row.retryable, subject
            assert (str(row.code) in text) is (row.code is not None), subject
        found = json.loads(json.dumps(explanation(row.reason)))["error"]
        told = (found["code"], found["grpc_status"], found["retryable"])
        assert told == (row.code, row.grpc_status, row.retryable)
        assert len(found["constraints"]) == sum(c.code == row.code for c in CONSTRAINTS), row


def test_a_code_lists_exactly_the_constraints_that_give_it() -> None:
    for code in {c.code for c in CONSTRAINTS}:
        text = said(str(code))
        for record in OPERATORS.values():
            rules = [c for c in record.constraints if c.code == code]
            count = "1 constraint\n" if len(rules) == 1 else f"{len(rules)} constraints\n"
            assert (f"{record.name}: {count}" in text) is bool(rules), code
            for rule in rules:
                assert words(rule.text) in words(text), rule
        listed = sum(line.startswith("  ") for line in text.splitlines())
        assert listed == sum(c.code == code for c in CONSTRAINTS), code


def test_a_code_that_no_rule_gives_says_so() -> None:
    assert "No documented constraint has this code; a device may return it." in said("361001")


def test_a_difference_is_marked_and_the_mark_is_told() -> None:
    text = said("161002")
    assert "c.limit *" in text
    assert "c.per_group *" not in text
    assert "* Document and vendor source differ" in text
    assert "*" not in said("QUEUE_FULL")


# ---------------------------------------------------------------------------------------------- operators


@RECORDS
def test_an_operator_tells_all_that_its_record_has(record: OpRecord) -> None:
    """By each of its names, and in JSON as well."""
    assert said(record.name) == said(record.aclnn_name) == said(record.aclnn_name.lower())
    text = words(said(record.name))
    for piece in (
        record.aclnn_name,
        record.summary,
        record.min_cann,
        *(p.full_name for p in record.products),
        *(p.doc for p in record.params),
        *(p.c_name for p in record.params),
        *(c.text for c in record.constraints),
        *(f"{c.id} *" if c.pick else c.id for c in record.constraints),
        *(str(n.source) for n in record.not_expressible),
        *(n.reason for n in record.not_expressible),
    ):
        assert words(piece) in text, piece
    found = json.loads(json.dumps(explanation(record.aclnn_name)))["operator"]
    assert [p["name"] for p in found["parameters"]] == [p.name for p in record.params]
    expected = [(c.id, c.code) for c in record.constraints]
    assert [(c["id"], c["code"]) for c in found["constraints"]] == expected
    assert all(words(rule["text"]) in text for rule in found["constraints"])
    rule = found["constraints"][-1]
    assert explanation(record.name, rule["id"]) == {"constraints": [rule]}


@RECORDS
def test_an_operator_reads_well_in_80_columns(record: OpRecord) -> None:
    """No name is cut, and no line is longer than the terminal."""
    text = said(record.name, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for constraint in record.constraints:
        assert f"  {constraint.id} " in text, "an identifier was folded, so it cannot be copied"


@RECORDS
def test_a_constraint_tells_code_rule_sources_and_both_sides(record: OpRecord) -> None:
    said_of = {"accepts": "accepts such a call", "varies": "answers differently depending on the call"}
    for constraint in record.constraints:
        text = words(said(record.name, constraint.id))
        for piece in (
            f"{record.name} {constraint.id}",
            f"{constraint.code} {BY_CODE[constraint.code].reason}",
            constraint.text,
            *map(str, constraint.sources),
            *constraint.operands,
            *constraint.requires,
        ):
            assert words(piece) in text, constraint
        vendor = constraint.vendor_words
        assert f"own source {said_of.get(vendor, f'returns {vendor}')}" in text, constraint
        assert ("both sides" in text) is bool(constraint.pick), constraint
        assert words(constraint.pick) in text, constraint


def test_a_constraint_alone_shows_every_operator_that_has_it() -> None:
    owners = [s.name for s in OPERATORS.values() if any(c.id == "product.supported" for c in s.constraints)]
    assert len(owners) > 1
    text = said("product.supported")
    assert [line.split()[0] for line in text.splitlines() if line.endswith("product.supported")] == owners


# -------------------------------------------------------------------------------------------------- slips


BOTH = "multi_scale_deformable_attention_grad, aclnnMultiScaleDeformableAttentionGrad"


@pytest.mark.parametrize(
    ("subject", "constraint", "message"),
    [
        ("161020", None, "found '161020'; did you mean 161002"),
        ("group_norm", None, "found 'group_norm'; did you mean group_norm_backward"),
        ("aclnnGroupNorm", None, "did you mean aclnnGroupNormBackward"),
        ("queuefull", None, "did you mean QUEUE_FULL"),
        ("floyd", None, "did you mean .*fused_floyd_attention_grad"),
        ("per_group", None, r"did you mean .*c\.per_group"),
        ("deformable", None, rf"found 'deformable'; did you mean {BOTH}\?$"),
        ("msda", None, rf"found 'msda'; did you mean {BOTH}\?$"),
        ("MSDA", None, rf"found 'MSDA'; did you mean {BOTH}\?$"),
        (
            "GridSampler",
            None,
            r"found 'GridSampler'; did you mean grid_sampler_2d_backward, grid_sampler_3d_backward, "
            r"aclnnGridSampler2DBackward, aclnnGridSampler3DBackward\?$",
        ),
        ("group_nrom", None, r"found 'group_nrom'; did you mean group_norm_backward, aclnnGroupNormBackward"),
        ("grad_sample", None, r"did you mean .*grid_sampler_2d_backward, grid_sampler_3d_backward"),
        ("QUEUE_FUL", None, r"did you mean QUEUE_FULL\?$"),
        ("timeout", None, "found 'timeout'; expected an operator, an"),
        ("rope", None, "found 'rope'; expected an operator, an"),
        ("batch_norm", None, "did you mean batch_norm_backward, aclnnBatchNormBackward"),
        ("banana", None, "found 'banana'; expected an operator, an"),
        ("a", None, "found 'a'; expected an operator, an"),
        ("zzz", None, "found 'zzz'; expected an operator, an aclnn number, a reason or a constraint"),
        ("group_norm_backward", "c.pergroup", r"found 'c\.pergroup'; did you mean c\.per_group"),
        ("group_norm_backward", "zzz", "found 'zzz'; expected a constraint of group_norm_backward"),
        ("161002", "c.per_group", "found '161002'; expected an operator before a constraint"),
        ("msda", "c.per_group", rf"found 'msda'; did you mean {BOTH}\?$"),
    ],
)
def test_a_slip_is_told_what_comes_near(subject: str, constraint: str | None, message: str) -> None:
    with pytest.raises(UnknownSubject, match=message):
        said(subject, constraint)


@pytest.mark.parametrize("constraint", [None, "c.per_group"])
def test_where_nothing_comes_near_both_names_of_every_operator_are_told(constraint: str | None) -> None:
    with pytest.raises(UnknownSubject) as refused:
        said("zzz", constraint)
    for record in OPERATORS.values():
        assert f"{record.name} ({record.aclnn_name})" in str(refused.value)


def test_at_most_five_names_are_proposed() -> None:
    assert nearest("aaa", [f"aaa{i}" for i in range(20)], "x").count(",") == 4


def test_what_is_not_known_is_no_json() -> None:
    with pytest.raises(UnknownSubject, match="did you mean group_norm_backward"):
        explanation("group_norm")
