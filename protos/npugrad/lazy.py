"""Names of packages that are loaded when they are first asked for: importing a package alone costs little."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def on_demand(
    package: str, homes: Mapping[str, tuple[str, ...]], others: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: Its name.
        homes: Public names of each module; the modules are attributes of the package themselves.
        others: Module of the other names in its ``__all__``.
    """
    names = vars(sys.modules[package])
    places = {name: others for name in names["__all__"] if others and name not in names}
    places |= {name: module for module, listed in homes.items() for name in listed}
    modules = {*homes, others}

    def load(name: str) -> Any:
        home = name if name in modules else places.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(home if "." in home else f"{package}.{home}")
        names[name] = module if name in modules else getattr(module, name)
        return names[name]

    return load, lambda: sorted({*names, *places})
