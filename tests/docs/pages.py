"""The pages of the documentation and the code on them."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
)
CODE_COLUMNS = 86
"""What is seen of a line of code without scrolling."""
_NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->\n")
_NAMES = ("npugrad", "npugrad-server")
_MARKDOWN = MarkdownIt("gfm-like", {"linkify": False})
_WITHOUT_INLINE = MarkdownIt("gfm-like", {"linkify": False}).disable("inline")
"""Half as much work, where only blocks are looked for."""


class Block(NamedTuple):
    """A block of code.

    Attributes:
        language: What stands behind the fence.
        text: What is between the fences.
        not_run: Why it cannot run here, as a comment before the fence says; empty if it can.
    """

    language: str
    text: str
    not_run: str


def text_of(page: str) -> str:
    """The Markdown of a page, a path in the repository."""
    return (ROOT / page).read_text("utf-8")


@cache
def _tokens(path: Path) -> list[Token]:
    return _MARKDOWN.parse(path.read_text("utf-8"))


@cache
def blocks(page: str) -> list[Block]:
    """The blocks of code of a page in their order."""
    found, before = [], ""
    for token in _WITHOUT_INLINE.parse(text_of(page)):
        if token.type == "fence":
            reason = _NOT_RUN.fullmatch(before)
            found.append(Block(token.info, token.content, reason[1] if reason else ""))
        before = token.content
    return found


def python_of(page: str) -> str:
    """The Python of a page that can run here, one block after the other."""
    return "\n".join(block.text for block in blocks(page) if block.language == "python" and not block.not_run)


def commands_of(page: str) -> list[str]:
    """Each command of ours on a page, in one line, without the comment after it."""
    lines = [
        line.rpartition(" | ")[2].split("  #")[0].split(" # ")[0].strip()
        for block in blocks(page)
        if block.language in ("", "sh") or block.text.startswith("Examples:")
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    return [line for line in lines if line.partition(" ")[0] in _NAMES]


def unclosed_lines(path: Path) -> list[int]:
    """The numbers of lines that open a block of code which nothing closes, so that it swallows the page."""
    lines = path.read_text("utf-8").splitlines()
    fences = [token for token in _tokens(path) if token.type == "fence"]
    return [
        token.map[0] + 1
        for token in fences
        if token.map and not lines[token.map[1] - 1].strip().startswith(token.markup)
    ]


@cache
def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings."""
    titles = [after.content for token, after in pairwise(_tokens(path)) if token.type == "heading_open"]
    return {_slug(title) for title in titles}


def _slug(title: str) -> str:
    """As both GitHub and Python-Markdown have it; they differ in titles that no page of ours has."""
    plain = re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)


def links(path: Path) -> list[str]:
    """Where the links and pictures of a page lead."""
    found = []
    for token in _tokens(path):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target is not None:
                found.append(str(target))
    return found
