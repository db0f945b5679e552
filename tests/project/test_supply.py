"""What a release is refused for, from the real files and from tools that answer as pip-audit does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.project.distributions import ROOT
from tests.project.supply import PINS, audit, gaps

TEXTS = tuple((ROOT / name).read_text("utf-8") for name in ("Dockerfile", "SECURITY.md"))
GIVEN = (
    TEXTS[0].replace("-bookworm\n", f"-bookworm@sha256:{'0' * 64}\n", 1),
    TEXTS[1] + "security@example.org\n",
)


def test_each_gap_is_told_until_it_is_filled() -> None:
    assert gaps(*GIVEN) == []
    (base,) = gaps(TEXTS[0], GIVEN[1])
    assert base.startswith("Dockerfile: BASE: found python:")
    (address,) = gaps(GIVEN[0], TEXTS[1])
    assert address.startswith("SECURITY.md: found no address for reports")


FLAW = {"id": "PYSEC-1", "fix_versions": ["2.0"]}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([{"name": "a", "version": "1", "vulns": []}], []),
        ([{"name": "a", "version": "1", "vulns": [FLAW]}], ["audit: a 1: PYSEC-1; fixed in 2.0"]),
        (
            [{"name": "a", "skip_reason": "not found"}],
            ["audit: the advisory database told nothing of 1 of 1"],
        ),
        (None, ["audit: no advisory database was reached, so nothing is known: no way"]),
    ],
    ids=["nothing known", "a flaw", "no answer", "no network"],
)
def test_only_an_answer_without_flaws_passes(
    said: list[dict[str, Any]] | None, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = "" if said is None else json.dumps({"dependencies": said})
    fake = tmp_path / "pip-audit"
    fake.write_text(f"#!/bin/sh\necho no way >&2\necho '{answer}'\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("SUPPLY", str(tmp_path))
    found = audit(PINS)
    assert len(found) == len(told)
    assert all(text.startswith(start) for text, start in zip(found, told, strict=True))
