"""What a reader of a package takes for its public names."""

from __future__ import annotations

import inspect
from types import ModuleType


def shown(package: ModuleType) -> set[str]:
    """The names that a reader of the package's namespace takes for public."""
    return {
        name
        for name in dir(package)
        if not name.startswith("_")
        and not inspect.ismodule(getattr(package, name))
        and name not in ("annotations", "TYPE_CHECKING")
    }
