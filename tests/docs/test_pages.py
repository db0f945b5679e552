"""Links between the files of the repository lead somewhere, and the reference has an entry for everything.

`make docs` checks the links of the site as built.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.docs.pages import CODE_COLUMNS, PAGES, ROOT, anchors, blocks, links, text_of, unclosed_lines

import npugrad_client
import npugrad_client.torch
from npugrad import OPERATORS
from npugrad._tools import api_pages
from npugrad._tools.gen_docs import PARTS


def files() -> list[Path]:
    """Every page of the checkout, also those that are not committed yet."""
    return [ROOT / name for name in git("ls-files", "--cached", "--others", "--exclude-standard", "*.md")]


def git(*arguments: str) -> list[str]:
    """The words that git prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_links_lead_to_files_and_headings() -> None:
    broken, pages = [], files()
    for path in pages:
        for link in links(path):
            target, _, anchor = link.partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            file = (path.parent / target).resolve() if target else path
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{path}: {link}")
    assert len(pages) > 20
    assert broken == []


def test_blocks_of_code_end() -> None:
    assert {path: lines for path in files() if (lines := unclosed_lines(path))} == {}


def test_lines_of_code_fit_the_column_of_a_page() -> None:
    """In a window of 1280 pixels; what is longer is cut off. Output (`text`) is smaller, and wraps."""
    code = [(page, block.text) for page in PAGES for block in blocks(page) if block.language != "text"]
    lines = [(page, line) for page, text in code for line in text.splitlines()]
    assert [(page, line) for page, line in lines if len(line) > CODE_COLUMNS] == []


def test_nothing_tells_to_install_from_an_index() -> None:
    """Nothing is released: anyone may register our names there. "A release" in CONTRIBUTING.md ends this."""
    told = re.compile(r"pip3? install (-\S+ )*['\"]?npugrad")
    assert [name for name in git("ls-files", "*.md", "*.py", "*.ipynb") if told.search(text_of(name))] == []


def test_pages_of_the_site_link_to_no_file_outside_of_it() -> None:
    docs = ROOT / "docs"
    for path in docs.rglob("*.md"):
        for link in links(path):
            if "://" not in link and not link.startswith("#"):
                target = (path.parent / link.partition("#")[0]).resolve()
                assert target.is_relative_to(docs), f"{path}: {link}"


def test_paths_that_code_names_exist() -> None:
    """Comments, alerts, settings: what names a page by its path."""
    pattern, where = r"docs/[a-z/-]+\.md(#[a-z0-9-]+)?", [":!CHANGELOG.md", ":!tests/docs"]
    named = set(git("grep", "-ohE", pattern, "--", *where))
    assert len(named) > 5
    for name in named:
        page, _, anchor = name.partition("#")
        assert (ROOT / page).is_file(), name
        assert not anchor or anchor in anchors(ROOT / page), name


# -------------------------------------------------------------------------------------------- reference


def test_every_generated_part_stands_on_one_page() -> None:
    """`make check-gen` and `test_generated.py` compare their contents with what there is today."""
    marks = [mark for page in PAGES for mark in re.findall(r"<!-- generated: (\w+) -->", text_of(page))]
    assert sorted(marks) == sorted(PARTS)


def test_every_operator_has_a_page_with_its_rules() -> None:
    for record in OPERATORS.values():
        page = text_of(f"docs/reference/operators/{record.name}.md")
        assert set(re.findall(r"^\| `([\w.]+)` \| \d{6} \|", page, re.MULTILINE)) == {
            rule.id for rule in record.constraints
        }


def test_every_public_name_has_an_entry() -> None:
    pages = api_pages.pages()
    entries = set(re.findall(r"^::: ([\w.]+)$", "\n".join(pages.values()), re.MULTILINE))
    listed = (ROOT / "zensical.toml").read_text("utf-8")
    assert all(f'"reference/api/{path.partition("/")[0]}/*"' in listed for path in pages)
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


def test_every_bound_of_security_names_a_test_or_command_that_exists() -> None:
    page = (ROOT / "docs" / "security.md").read_text("utf-8")
    table = page.split("## What bounds what")[1].split("\n\n")[1]
    defined = git("grep", "-hoE", r"def test_\w+", "--", "tests")
    for row in table.splitlines()[2:]:
        shown = row.split("|")[-2].strip()
        assert shown.strip("`") in defined or shown.startswith(("`make prove-", "none: ")), row
