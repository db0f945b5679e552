"""Scenario files that mean harm, or something else than they seem to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from npugrad_client.bench.scenario import ScenarioError
from npugrad_client.bench.scenario_file import load_scenario
from npugrad_client.bench.strict_yaml import MAX_NODES, read_yaml

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
        ("[" * 5000, "values are nested too deeply"),
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
    """As many values as a file may have, all in the wrong place."""
    path = tmp_path / "long.yaml"
    path.write_text(where.format("[" + ", ".join(["'" + "y" * 1000 + "'"] * 2000) + "]") + "\n", "utf-8")
    with pytest.raises(ScenarioError) as caught:
        load_scenario(str(path))
    assert len(str(caught.value)) < 1500 + len(str(path))
