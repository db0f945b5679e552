"""What generators do with what they made: write it, or with `--check` compare it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[3]


def settle(wanted: Mapping[Path, str]) -> int:
    """Writes files by path, or names those that differ with `--check`; returns the exit status."""
    present = {path: path.read_text("utf-8") if path.exists() else None for path in wanted}
    differing = [path for path, text in wanted.items() if present[path] != text]
    for path in differing:
        if "--check" in sys.argv[1:]:
            print(f"{path.relative_to(ROOT)} differs from the records; run `make gen`", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
    return 1 if differing and "--check" in sys.argv[1:] else 0
