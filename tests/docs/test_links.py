"""Links between the files of the repository lead somewhere; `make docs` checks those of the site as built."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.docs.pages import ROOT, anchors, links, unclosed_lines

FILES = [path for path in sorted(ROOT.rglob("*.md")) if not {"node_modules", "build"} & set(path.parts)]
FILES = [path for path in FILES if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(path: Path) -> None:
    broken = []
    for link in links(path):
        target, _, anchor = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (path.parent / target).resolve() if target else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_blocks_of_code_end(path: Path) -> None:
    assert unclosed_lines(path) == []


def test_pages_of_the_site_link_to_no_file_outside_of_it() -> None:
    docs = ROOT / "docs"
    for path in docs.rglob("*.md"):
        for link in links(path):
            if "://" not in link and not link.startswith("#"):
                assert (path.parent / link.partition("#")[0]).resolve().is_relative_to(docs), (
                    f"{path}: {link}"
                )


def test_paths_that_code_names_exist() -> None:
    """Comments, alerts, settings: what names a page by its path."""
    command = [
        "git",
        "grep",
        "-ohE",
        r"docs/[a-z/-]+\.md(#[a-z0-9-]+)?",
        "--",
        ":!CHANGELOG.md",
        ":!tests/docs",
    ]
    named = set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())
    assert len(named) > 5
    for name in named:
        page, _, anchor = name.partition("#")
        assert (ROOT / page).is_file(), name
        assert not anchor or anchor in anchors(ROOT / page), name
