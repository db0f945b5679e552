"""The reference has an entry for everything that there is."""

from __future__ import annotations

import re

from tests.docs.pages import PAGES, ROOT, anchors, text_of

import npugrad_client
import npugrad_client.torch
from npugrad import OPERATORS
from npugrad._tools.gen_docs import PARTS


def test_every_generated_part_stands_on_one_page() -> None:
    """`make check-gen` and `test_generated.py` compare their contents with what there is today."""
    marks = [mark for page in PAGES for mark in re.findall(r"<!-- generated: (\w+) -->", text_of(page))]
    assert sorted(marks) == sorted(PARTS)


def test_every_operator_has_a_section_with_its_rules() -> None:
    page = "docs/reference/operators.md"
    for record in OPERATORS.values():
        assert {record.name, f"rules-of-{record.name}"} <= anchors(ROOT / page)
        section = text_of(page).partition(f"\n## {record.name}\n")[2].partition("\n## ")[0]
        assert set(re.findall(r"^\| `([\w.]+)` \| \d{6} \|", section, re.MULTILINE)) == {
            rule.id for rule in record.constraints
        }


def test_every_public_name_has_an_entry() -> None:
    entries = set(re.findall(r"^::: ([\w.]+)$", text_of("docs/reference/api.md"), re.MULTILINE))
    names = {f"npugrad_client.{name}" for name in npugrad_client.__all__}
    names |= {f"npugrad_client.torch.{name}" for name in npugrad_client.torch.__all__}
    errors = {f"npugrad_client.errors.{name}" for name in npugrad_client.errors.__all__}
    apart = {f"npugrad_client.{name}" for name in npugrad_client.errors.__all__}
    assert names - apart | errors <= entries


def test_each_exit_status_has_a_line_of_its_own() -> None:
    """In a block: a page joins the lines of a paragraph."""
    page = text_of("docs/reference/command-line.md")
    assert "\nExit status 130: " in page
    assert "Exit status" not in re.sub(r"```text\n.*?```", "", page, flags=re.DOTALL)


def test_the_front_page_stays_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 150
