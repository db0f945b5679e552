"""What all proofs share: options of their commands, a folder for their files, and tables."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

MIB = 2**20


def run(prove: Callable[[Any, Path], bool], text: str | None, **options: tuple[Any, str]) -> NoReturn:
    """Runs a proof as a command, with a folder for its files; its exit code is 0 if all was as it must be.

    Options are given by name, with the default and what they are. One whose default are several has some of
    them for its value, all by default.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter, prog=sys.argv[0]
    )
    for name, (default, said) in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, Collection):
            parser.add_argument(
                flag, nargs="+", action="extend", choices=[*default], help=f"{said}; all by default"
            )
        else:
            parser.add_argument(flag, type=type(default), default=default, help=f"{said}; default {default}")
    given = parser.parse_args()
    for name, (default, _) in options.items():
        if getattr(given, name) is None:
            setattr(given, name, [*default])
    with tempfile.TemporaryDirectory(prefix="npugrad-proof-") as folder:
        is_kept = prove(given, Path(folder).resolve())
    sys.exit(0 if is_kept else 1)


def told(counts: Counter[str], most: int | None = None) -> str:
    """What was counted, the most frequent first."""
    return ", ".join(f"{count} {what}" for what, count in counts.most_common(most)) or "none"


def verdict(line: object, is_kept: bool) -> bool:
    """Prints a line with whether what it tells is as it must be, and returns that."""
    print(f"{line}: {'kept' if is_kept else 'BROKEN'}", flush=True)
    return is_kept


class Table:
    """A table that is printed while its rows are measured."""

    def __init__(self, **widths: int) -> None:
        """Prints the names of the columns, which have at least these widths."""
        self._widths = [max(width, len(name)) for name, width in widths.items()]
        self.row(*(name.replace("_", " ") for name in widths))

    def row(self, *cells: object) -> None:
        texts = (f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)
        columns = (text.ljust(width) for text, width in zip(texts, self._widths, strict=True))
        print("  ".join(columns).rstrip(), flush=True)
