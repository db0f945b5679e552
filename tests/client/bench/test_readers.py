"""What people write: durations, shares, rates, sizes by name, and YAML that means harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from npugrad import OPERATORS, OpRecord
from npugrad_client.bench.scenario import ScenarioError
from npugrad_client.bench.scenario_file import load_scenario
from npugrad_client.bench.sizes import _READERS, _forms, example, parse_sizes
from npugrad_client.bench.strict_yaml import MAX_NODES, read_yaml
from npugrad_client.bench.units import (
    format_seconds,
    format_share,
    parse_duration,
    parse_rate,
    parse_share,
)

NAN, INF = float("nan"), float("inf")


def test_durations_shares_and_rates() -> None:
    durations = {"50ms": 0.05, "30s": 30, "2m": 120, "1h": 3600, "250 us": 0.00025, "1.5 s": 1.5, "0s": 0}
    assert {text: parse_duration(text) for text in durations} == pytest.approx(durations)
    shares = {"0.1%": 0.001, "0.02": 0.02, "100%": 1}
    assert {text: parse_share(text) for text in shares} == pytest.approx(shares)
    rates = {"95/s": 95, "0.5": 0.5}
    assert {text: parse_rate(text) for text in rates} == rates


@pytest.mark.parametrize(
    ("read", "texts", "message"),
    [
        (
            parse_duration,
            ["", "5 days", "-1s", "ms", "1s 2ms", True, None, [1], NAN, -1, "1e3", "inf"],
            "expected a duration such as 50ms, 30s or 2m",
        ),
        (
            parse_share,
            ["", "101%", "1.5", "-1%", "x", "5 of 100"],
            r"expected a share such as 0\.1% or 0\.001",
        ),
        (parse_rate, ["0", "0/s", "-3", "fast", "5/m"], "expected a rate above 0 such as 95/s"),
    ],
)
def test_what_is_none(read: Callable[[object], float], texts: list[object], message: str) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=message):
            read(text)


@pytest.mark.parametrize(
    ("value", "number"), [("50", "50"), (50, "50"), (" 0.5 ", "0.5"), (0.5, "0.5"), ("0", "0"), (0, "0")]
)
def test_a_number_without_a_unit_is_refused(value: object, number: str) -> None:
    with pytest.raises(ValueError, match="found") as caught:
        parse_duration(value)
    expected = f"expected a duration with its unit, such as {number}ms or {number}s"
    assert str(caught.value) == f"found {value!r}; {expected}"


def test_durations_and_shares_for_people() -> None:
    shown = {0.0: "0.00 us", 0.000012: "12.0 us", 0.0123: "12.3 ms", 0.5: "500 ms", 1.5: "1.50 s"}
    shown |= {75: "75.0 s", INF: "inf"}
    assert {seconds: format_seconds(seconds) for seconds in shown} == shown
    assert format_share(0.001234) == "0.123 %"


# ------------------------------------------------------------------------------------------------ sizes

NORM, FLOYD = OPERATORS["group_norm_backward"], OPERATORS["fused_floyd_attention_grad"]
GRID, LAYERS = OPERATORS["grid_sampler_2d_backward"], OPERATORS["layer_norm_backward"]
DEFORMABLE = OPERATORS["multi_scale_deformable_attention_grad"]


def test_each_workload_and_each_keyword_can_be_written_as_text() -> None:
    for record in OPERATORS.values():
        for name, workload in record.workloads.named.items():
            assert parse_sizes(record, example(record, name)) == workload.sizes
        assert set(_forms(record).values()) <= set(_READERS)
    # A value may have commas, and spaces around it.
    text = "bs=1, nq=2, nh=2, ch=8, levels=6x7,3x4, points=4, index_dtype=int64"
    read = {"bs": 1, "nq": 2, "nh": 2, "ch": 8, "levels": ((6, 7), (3, 4)), "points": 4}
    assert parse_sizes(DEFORMABLE, text) == {**read, "index_dtype": "int64"}


@pytest.mark.parametrize(
    ("record", "text", "message"),
    [
        (NORM, "n=8,c=320,d=1", "d: found 'd=1'; expected one of n, c, hxw, group, "),
        (NORM, "n=8,c=320", "hxw, group missing; give n, c, hxw, group, as in n=2,"),
        (NORM, "n=8,n=8", "n is given twice"),
        (NORM, "small,n=8", "found 'small'; expected NAME=VALUE, as in n=2,"),
        (NORM, "n=8,group=ten", "group: found 'ten'; expected a whole number, 0 or more"),
        (NORM, "n=-8", "n: found '-8'; expected a whole number, 0 or more"),
        (LAYERS, "leading=2x,normalized=4", "leading: found '2x'; expected a shape such as 8x1024"),
        (DEFORMABLE, "levels=8x8x3,4x4", "levels: found '8x8x3,4x4'; expected pairs of height and width"),
        (DEFORMABLE, "index_dtype=int7", "index_dtype: found 'int7'; expected an element type such as int32"),
        (GRID, "output_mask=true,perhaps", "output_mask: found 'true,perhaps'; expected flags such as true,"),
        (GRID, "align_corners=1", "align_corners: found '1'; expected true or false"),
        *(
            (FLOYD, f"scale_value={value}", f"scale_value: found '{value}'; expected a finite number")
            for value in ("big", "nan", "inf", "-inf", "1e999")
        ),
    ],
)
def test_sizes_that_are_none(record: OpRecord, text: str, message: str) -> None:
    with pytest.raises(ScenarioError) as raised:
        parse_sizes(record, text)
    assert str(raised.value).startswith(f"{record.name}: {message}")


def test_a_message_shows_the_beginning_of_a_long_value() -> None:
    for text in ("n=" + "9" * 5000, "n" * 5000 + "=1", "n" * 5000):
        with pytest.raises(ScenarioError) as raised:
            parse_sizes(NORM, text)
        assert len(str(raised.value)) < 400


# ------------------------------------------------------------------------------------------------- YAML

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_what_is_said_is_read() -> None:
    text = "a: &common {x: 1}\nb: {<<: *common, y: 2}\nc: [*common, *common]\n"
    assert read_yaml(text) == {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [{"x": 1}, {"x": 1}]}
    assert read_yaml("") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: the key 'a' appears twice"),
        ("w:\n  - {x: 1, x: 2}\n", "line 2: the key 'x' appears twice"),
        ("a: &a [*a]\n", "line 1: a value contains itself"),
        (BOMB, f"more than {MAX_NODES} values"),
        ("[" * 600, "values are nested too deeply"),
        ("? [1, 2]\n: 3\n", "line 1: a key must be text"),
        ("a: 2001-13-45\n", "not a value: month must be"),
        ("a: !!python/object/apply:os.getcwd []\n", "not YAML: could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", "not YAML: expected a single document"),
        ("a: *nothing\n", "not YAML: found undefined alias"),
        ("a:\t1\n\tb", "not YAML: while scanning"),
        ("a: \x00", "not YAML: unacceptable character"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_not_is_told(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is looked at below
        read_yaml(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("where", ["workloads: {}", "name: {}", "load: {}", "workloads: [{{operator: {}}}]"])
def test_a_message_shows_the_beginning_of_what_is_long(where: str, tmp_path: Path) -> None:
    """Many long values, all in the wrong place."""
    path = tmp_path / "long.yaml"
    path.write_text(where.format("[" + ", ".join(["'" + "y" * 500 + "'"] * 100) + "]") + "\n", "utf-8")
    with pytest.raises(ScenarioError) as caught:
        load_scenario(str(path))
    assert len(str(caught.value)) < 1500 + len(str(path))
