"""Every operator's record as a fixture, and what was counted of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.summary import tally_of

from npugrad.ops import OPERATORS

if TYPE_CHECKING:
    from tests.summary import Tally

    from npugrad.operator import OpRecord


@pytest.fixture(scope="session", params=list(OPERATORS.values()), ids=list(OPERATORS))
def record(request: pytest.FixtureRequest) -> OpRecord:
    """Give each record in turn."""
    record: OpRecord = request.param
    return record


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    """Counts for the summary of the run."""
    return tally_of(pytestconfig, "contract")
