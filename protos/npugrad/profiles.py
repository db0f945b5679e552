"""Profiles: what an operator takes by the pages of one release of CANN.

A record is written down from one page. What the pages of other releases say differently stands beside it, as
rows with ``since=`` or ``until=``; `OpRecord.at` reads them for a release.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from npugrad.errors import WrongValue
from npugrad.releases import CannRelease

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npugrad.dtypes import DType
    from npugrad.operator import OpRecord
    from npugrad.products import Product

W = TypeVar("W", bound="Callable[..., None]")
R = TypeVar("R", bound="Released")

PROFILES = ("8.5.0", "9.0.0", "9.1.0", "9.2.0-beta.1", "9.2.0-beta.2")
"""Releases with public pages, in order."""


def profile_of(release: CannRelease) -> tuple[str, str]:
    """The profile for a release: the newest that is not newer; and a warning if its pages are not public."""
    pages = [CannRelease.parse(text) for text in PROFILES]
    chosen = max((each for each in pages if each <= release), default=pages[0])
    if pages[0] <= release <= pages[-1]:
        return str(chosen), ""
    return str(chosen), (
        f"CANN {release}: the pages of {PROFILES[0]} to {PROFILES[-1]} are known; calls are checked by "
        f"those of {chosen}"
    )


def asked_release(text: str | None) -> CannRelease | None:
    """The release that a caller asks for by its name, None for none; warns if its pages are not public.

    Raises:
        WrongValue: It is not a release.
    """
    try:
        release = None if text is None else CannRelease.parse(text)
    except ValueError as error:
        raise WrongValue(f"cann: {error}") from None
    if release is not None and (warning := profile_of(release)[1]):
        warnings.warn(warning, stacklevel=3)
    return release


def records_at(records: Mapping[str, OpRecord], release: CannRelease | None) -> Mapping[str, OpRecord]:
    """Every record by the pages of a release; None for the pages that it is written from."""
    return records if release is None else {name: record.at(release) for name, record in records.items()}


def row(write: W) -> W:
    """A row of the page: with `since` or `until`, only of pages from one release on, or before another."""

    @wraps(write)
    def written(page: Released, *args: Any, since: str = "", until: str = "", **extra: Any) -> None:
        page.written.append(lambda other: written(other, *args, since=since, until=until, **extra))
        if page.is_of(since, until):
            write(page, *args, **extra)

    return cast("W", written)


@dataclass(kw_only=True)
class Released:
    """A page, which has other rows in other releases.

    Attributes:
        release: Release of CANN whose page it is; empty if that is older than all with public pages.
        notes: What the page says otherwise without a consequence here, by attribute of its facts.
        written: All rows, which each write themselves on a page.
    """

    release: str = ""
    notes: dict[str, str] = field(default_factory=dict, init=False)
    written: list[Callable[[Any], None]] = field(default_factory=list, init=False, repr=False)

    def is_of(self, since: str, until: str) -> bool:
        """Whether it is the page of a release from `since` on and before `until`; each may be empty."""
        own = CannRelease.parse(self.release) if self.release else None
        is_late = not since or (own is not None and own >= CannRelease.parse(since))
        return is_late and (not until or own is None or own < CannRelease.parse(until))

    def at(self: R, release: str) -> R:
        """The page of another release: the rows that are written for it."""
        page = replace(self, release=release)
        for write in self.written:
            write(page)
        return page

    @row
    def on(self: Any, *products: Product, **_: str) -> None:
        """The products that have the operator, if not all of its own page."""
        vars(self)["products"] = {product: self.products[product] for product in products}

    @row
    def types(self: Any, names: str, dtypes: Mapping[Product, tuple[DType, ...]], **_: str) -> None:
        """Types of some tensors, if not those of its own page."""
        self.params |= {name: replace(self.params[name], dtypes=dtypes) for name in names.split()}

    @row
    def note(self, subject: str, text: str, **_: str) -> None:
        """What a page says otherwise, without a consequence here; `subject` is an attribute of its facts."""
        self.notes[subject] = text
