"""Releases of CANN: every way in which the vendor writes one, and their order."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npugrad.releases import CannRelease

IN_ORDER = (
    *("7.0.0.10", "8.0.T63", "8.0.RC2", "8.0.RC2.2", "8.0.RC3.alpha003", "8.0.RC3", "8.0.0"),
    *("8.1.RC1.beta1", "8.1.RC1", "8.2.RC1", "8.3.RC1.alpha001", "8.3.RC1", "8.3.RC2"),
    *("8.5.0.alpha002", "8.5.0-beta.1", "8.5.0", "8.5.0.2.220", "8.5.1"),
    *("9.0.0-beta.1", "9.0.0-beta.2", "9.0.0-rc.1", "9.0.0", "9.0.1", "9.1.0.alpha001", "9.1.0"),
    *("9.2.0-beta.1", "9.2.0-beta.2", "9.2.0-beta.10", "9.2.0", "10.0.0"),
)


def test_releases_come_in_their_order() -> None:
    releases = [CannRelease.parse(text) for text in IN_ORDER]
    assert all(first < second for first, second in pairwise(releases))
    assert sorted(reversed(releases)) == releases


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("9.2.0-beta.1", "9.2.0.beta1"),  # as aclsysGetCANNVersion turns it round
        ("8.3.RC1", "8.3.rc1"),
        ("8.5", "8.5.0"),
        (" 9.1.0\n", "9.1.0"),
    ],
)
def test_a_release_is_the_same_however_it_is_written(text: str, same: str) -> None:
    assert CannRelease.parse(text) == CannRelease.parse(same)


def test_anything_else_is_refused() -> None:
    odd = ("8.5.x", "8.5.T8.0.B060", "9.1.0-", "9.1.0-gamma.1", "v9.1.0", "9..1")
    for text in ("", "8", "cann", "latest", *odd):
        with pytest.raises(ValueError, match="expected a release of CANN such as"):
            CannRelease.parse(text)


numbers = st.integers(0, 999)
stages = st.builds(
    lambda joint, stage, between, number: f"{joint}{stage}{between}{number}",
    st.sampled_from(".-"),
    st.sampled_from(("alpha", "beta", "rc", "RC", "T")),
    st.sampled_from(("", ".")),
    numbers,
)
versions = st.builds(
    lambda parts, ends: ".".join(map(str, parts)) + "".join(ends),
    st.tuples(numbers, numbers, numbers),
    st.lists(stages, max_size=2),
)


@given(versions, versions, stages, numbers)
def test_any_two_releases_have_one_order(text: str, other: str, stage: str, number: int) -> None:
    """A stage comes before what it leads to, a build after what it mends; what was read is what is shown."""
    first, second = CannRelease.parse(text), CannRelease.parse(other)
    assert str(first) == text
    assert (first < second) + (first == second) + (first > second) == 1
    assert (hash(first) == hash(second)) or first != second
    assert CannRelease.parse(text + stage) < first < CannRelease.parse(f"{text}.{number}")


@given(st.tuples(numbers, numbers, numbers), st.integers(0, 2), st.lists(stages, max_size=1))
def test_a_higher_number_is_a_later_release(parts: tuple[int, int, int], place: int, ends: list[str]) -> None:
    higher = tuple(number + (at == place) for at, number in enumerate(parts))
    first, second = (".".join(map(str, found)) for found in (parts, higher))
    assert CannRelease.parse(first + "".join(ends)) < CannRelease.parse(second)


@given(st.text(max_size=20))
def test_no_text_breaks_it(text: str) -> None:
    with suppress(ValueError):
        assert str(CannRelease.parse(text)) == text.strip()
