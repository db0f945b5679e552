"""The comparison finds every mistake and excuses what is documented."""

from __future__ import annotations

from typing import Any

import pytest
from tests.congruence.arguments import ND, differences

NCHW, NCDHW = 0, 30


def tensor(**changes: Any) -> dict[str, Any]:
    """A contiguous tensor as the service hands it down."""
    own = {"dtype": 0, "shape": [2, 3], "strides": [3, 1], "offset": 0, "format": ND, "storage": [2, 3]}
    return {**own, "address": 64, **changes}


def plan(*values: Any, **changes: Any) -> dict[str, Any]:
    """A record of phase 1 with arguments a, b, c and so on."""
    arguments = [{"name": chr(ord("a") + index), "value": value} for index, value in enumerate(values)]
    own = {"op": "aclnnX", "status": 0, "deterministic": 0, "workspace": 32, "arguments": arguments}
    return {**own, **changes}


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (tensor(dtype=1), tensor()),
        (tensor(shape=[3, 2], strides=[2, 1], storage=[3, 2]), tensor()),
        (tensor(strides=[1, 2]), tensor()),
        (tensor(strides=[0, 1]), tensor(storage=[6])),
        (tensor(offset=1), tensor(offset=2)),
        (tensor(format=NCHW), tensor()),
        (tensor(storage=[5]), tensor()),
        (None, tensor()),
        (tensor(), None),
        (0.0, -0.0),
        (0.25, 0.25000000000000006),
        (1, True),
        (1, 1.0),
        (2, 3),
        ([True, False], [False, True]),
        ([True, False], [True, False, False]),
        ([True], None),
    ],
)
def test_a_mistake_is_found(mine: Any, other: Any) -> None:
    assert list(differences(plan(mine), plan(mine))) == []
    found = list(differences(plan(3, mine), plan(3, other)))
    assert found
    assert any(not one.excuse and one.argument.startswith("b") for one in found), found


def test_a_swap_is_found_among_tensors_of_one_shape_and_of_different_ones() -> None:
    wide = tensor(shape=[2, 5], strides=[5, 1], storage=[2, 5])
    assert [one.argument for one in differences(plan(tensor(), wide), plan(wide, tensor()))] == [
        *("a.shape", "a.strides", "a.storage"),
        *("b.shape", "b.strides", "b.storage"),
    ]
    named = plan(1)
    named["arguments"][0]["name"] = "other"
    assert [one.argument for one in differences(named, plan(1))] == ["order"]


@pytest.mark.parametrize("key", ["op", "status", "deterministic", "workspace"])
def test_what_is_not_an_argument_counts_too(key: str) -> None:
    (found,) = differences(plan(1, **{key: 7}), plan(1))
    assert (found.argument, found.excuse) == (key, "")


RANK4 = {"shape": [1, 2, 3, 1], "strides": [6, 3, 1, 1], "storage": [1, 2, 3, 1]}


@pytest.mark.parametrize(
    ("mine", "other", "excuses"),
    [
        (tensor(), tensor(storage=[6]), ["storage"]),
        (tensor(), tensor(storage=[9], offset=3), ["offset", "storage"]),
        (tensor(), tensor(storage=[8], offset=3), ["offset", ""]),  # the view leaves its storage
        (tensor(**RANK4), tensor(**RANK4, format=NCHW), ["format"]),
        (tensor(**RANK4), tensor(**RANK4, format=NCDHW), [""]),
        (tensor(), tensor(strides=[9, 3], storage=[16]), ["packed", "storage"]),
        (tensor(), tensor(strides=[6, 2], storage=[11]), ["", "storage"]),  # not so wide that it is packed
        (tensor(**RANK4), tensor(**{**RANK4, "strides": [99, 3, 1, 7]}), ["idle strides"]),
        (tensor(**RANK4), tensor(**{**RANK4, "strides": [6, 4, 1, 1]}), [""]),
    ],
)
def test_what_is_documented_is_excused_and_nothing_near_it(mine: Any, other: Any, excuses: list[str]) -> None:
    assert [one.excuse for one in differences(plan(mine), plan(other))] == excuses
