"""A small `make prove-canaries`."""

from __future__ import annotations

import pytest
from tests.proofs.canaries import HOWS, prove, wrong_devices

from npugrad import OPERATORS

pytestmark = pytest.mark.slow


def test_canaries_find_devices_that_compute_wrongly_and_no_others() -> None:
    found = prove(4, 100)
    assert found.is_good, found.line()
    assert (found.devices, found.served) == (4, 2)
    assert found.right >= 100


def test_every_operator_is_computed_wrongly_in_every_way() -> None:
    names = wrong_devices(len(OPERATORS) * len(HOWS), 0)
    for operator in OPERATORS:
        for how in HOWS:
            assert sum(f"wrong={operator}&how={how}&" in name for name in names) == 1
