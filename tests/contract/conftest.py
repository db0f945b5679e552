"""Every operator's record as a fixture, and what was counted of them."""

from __future__ import annotations

import pytest
from tests.summary import Tally, tally_of

from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS


@pytest.fixture(scope="session", params=list(OPERATORS.values()), ids=list(OPERATORS))
def record(request: pytest.FixtureRequest) -> OpRecord:
    """Give each record in turn."""
    record: OpRecord = request.param
    return record


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    """Counts for the summary of the run."""
    return tally_of(pytestconfig, "contract")
