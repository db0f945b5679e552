"""CANN releases and their order, because documents and sources apply to some of them only."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_STAGES = ("t", "alpha", "beta", "rc")
"""Stages before a release, the earliest first."""
_FINAL = (len(_STAGES), 0)
_NUMBER = r"\d{1,9}"
_FORM = re.compile(
    rf"(?P<major>{_NUMBER})\.(?P<minor>{_NUMBER})(?:\.(?P<patch>{_NUMBER}))?"
    rf"(?P<stages>(?:[.-](?:{'|'.join(_STAGES)})\.?(?:{_NUMBER})?)*)"
    rf"(?P<build>(?:\.{_NUMBER})*)",
    re.IGNORECASE | re.ASCII,
)
_STAGE = re.compile(rf"({'|'.join(_STAGES)})\.?({_NUMBER})?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, order=True)
class CannRelease:
    """A CANN release; releases compare in the order in which they came out.

    Example:
        >>> CannRelease.parse("8.3.RC1") < CannRelease.parse("8.5.0.alpha002") < CannRelease.parse("8.5.0")
        True

    Attributes:
        major: First number.
        minor: Second number.
        patch: Third number, 0 where the vendor leaves it out, as in ``"8.3.RC1"``.
        stages: Each stage and its number, outermost first, followed by one that sorts after all others.
        build: Numbers after all that, such as the 2 and 220 of ``"8.5.0.2.220"``.
        text: As the vendor wrote it.
    """

    major: int
    minor: int
    patch: int
    stages: tuple[tuple[int, int], ...] = (_FINAL,)
    build: tuple[int, ...] = ()
    text: str = field(default="", compare=False)

    @classmethod
    def parse(cls, text: str) -> CannRelease:
        """Reads a release such as ``"8.5.0"``, ``"8.3.RC1"``, ``"9.2.0-beta.1"`` or ``"9.1.0.alpha001"``.

        Raises:
            ValueError: It is not a release.
        """
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"found {text!r}; expected a release of CANN such as 8.5.0 or 9.2.0-beta.1")
        stages = (
            (_STAGES.index(stage.lower()), int(number or 0))
            for stage, number in _STAGE.findall(match["stages"])
        )
        return cls(
            int(match["major"]),
            int(match["minor"]),
            int(match["patch"] or 0),
            (*stages, _FINAL),
            tuple(int(number) for number in match["build"].split(".") if number),
            text.strip(),
        )

    def __str__(self) -> str:
        """As the vendor wrote it."""
        return self.text
