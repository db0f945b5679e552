"""An extension of griffe, which reads docstrings for the API: it expects `Examples:`, we write `Example:`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from griffe import Extension

if TYPE_CHECKING:
    from griffe import Object


class DocstringExamples(Extension):  # type: ignore[misc]  # not installed beside mypy
    """Shows examples as code, not as prose with brackets that look like links."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Renames the section in the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
