"""Representations of objects: a `repr` of three lines at most, and tables for notebooks."""

from __future__ import annotations

from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from google.protobuf.message import Message

WIDTH = 100
"""Maximum columns of a line."""
_INDENT = "    "
_LINES = 3
_VALUE_CHARACTERS = (80, 40, 20, 10)
"""Characters of a value that are tried, one after the other."""


class Html(str):
    """Text that is HTML already; other text is escaped."""

    __slots__ = ()


def in_lines(name: str, parts: Iterable[str]) -> str:
    """``name(part, part, ...)``, in lines of at most `WIDTH` columns unless a part itself is longer."""
    lines, line = [], f"{name}("
    texts = [*parts]
    for number, text in enumerate(texts):
        piece = text + (", " if number < len(texts) - 1 else ")")
        if len(line) + len(piece.rstrip()) > WIDTH and line.strip():
            lines.append(line.rstrip())
            line = _INDENT
        line += piece
    return "\n".join([*lines, line if texts else f"{line})"])


def short_repr(self: Any) -> str:
    """As `__repr__` of a dataclass: all fields, in three lines, with long values truncated as that takes."""
    shown = {each.name: repr(getattr(self, each.name)) for each in fields(self)}
    text = ""
    for most in _VALUE_CHARACTERS:
        parts = [f"{name}={shortened(value, most)}" for name, value in shown.items()]
        text = in_lines(type(self).__name__, parts)
        if text.count("\n") < _LINES:
            break
    return text


class Shown:
    """Base of dataclasses that `short_repr` shows."""

    __repr__ = short_repr


def shortened(text: str, most: int) -> str:
    """The text, truncated with dots if it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def printable(text: str) -> str:
    """The text with escapes for control characters, which a terminal would obey; lines stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def make_printable(message: Message) -> None:
    """Replaces all text of a message from another host by `printable` text."""
    for name, value in message.ListFields():
        if isinstance(value, str):
            setattr(message, name.name, printable(value))
        elif name.type == name.TYPE_MESSAGE and not name.is_repeated:
            make_printable(value)
        elif hasattr(value, "items"):
            texts = {printable(key): printable(text) for key, text in value.items()}
            value.clear()
            value.update(texts)
        elif name.type == name.TYPE_MESSAGE:
            for each in value:
                make_printable(each)
        elif name.type == name.TYPE_STRING:
            value[:] = map(printable, value)


def counted(count: int, noun: str) -> str:
    """Such as ``1 call`` or ``2 calls``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def some(items: Sequence[str], most: int, where: str) -> str:
    """The items separated by commas, or the first of them and where to find the others."""
    shown = ", ".join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more in {where}"


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in HTML.

    Args:
        caption: What it shows.
        header: Names of the columns.
        rows: Cells of each row; text is escaped unless it is `Html`.
    """
    lines = [f"<table><caption>{_cell(caption)}</caption>", f"<thead>{_row('th', header)}</thead>", "<tbody>"]
    return "\n".join([*lines, *(_row("td", row) for row in rows), "</tbody></table>"])


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{_cell(cell)}</{tag}>" for cell in cells) + "</tr>"


def _cell(text: str) -> str:
    return text if isinstance(text, Html) else escape(text)
