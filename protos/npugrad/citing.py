"""Where a page, or the vendor's source, says something."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad.errors import Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    Numbers = int | tuple[int, ...] | list[int | tuple[int, ...] | None] | None
    """One number, several, or as a list one or several for each operand of a rule."""


class Citing:
    """Makes citations of a page and of its operator's checks.

    Attributes:
        document: Official name of the operator.
        repository: The vendor's public repository with its checks.
        editions: Titles of its pages, by default the document itself; the entries of a later one's constraint
            section are counted from its place in this list, as it has one more before them.
    """

    document: str
    repository: str
    editions: tuple[str, ...]

    @property
    def titles(self) -> tuple[str, ...]:
        """Titles of its pages."""
        return self.editions or (self.document,)

    def sources(self, section: str, place: str) -> Iterator[Source]:
        """A place of each edition of the page."""
        return (Source(title, section, place) for title in self.titles)

    def places(
        self, place: int, row: Numbers, entry: Numbers, check: Numbers, code: int = 0
    ) -> Iterator[Source]:
        """Rows of the error table, entries of the constraint section, and checks, of one operand."""
        for number in _numbers(row, place):
            yield from self.sources(f"return codes, {code}", f"row {number}")
        for number in _numbers(entry, place):
            for later, title in enumerate(self.titles, number):
                if later:  # 0 is the first of a later edition
                    yield Source(title, "constraints", f"entry {later}")
        for number in _numbers(check, place):
            vendor = f"vendor source ({self.repository})"
            yield Source(vendor, f"checks of {self.document}", f"check {number}")


def _numbers(numbers: Numbers, place: int) -> tuple[int, ...]:
    chosen = numbers[place] if isinstance(numbers, list) else numbers
    return () if chosen is None else chosen if isinstance(chosen, tuple) else (chosen,)
