"""What is in a bundle of the acceptance."""

from __future__ import annotations

import tarfile
from pathlib import Path


def contents(path: Path) -> dict[str, bytes]:
    """Files of a bundle by their name in it."""
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None:
                found[member.name.partition("/")[2]] = file.read()
    return found
