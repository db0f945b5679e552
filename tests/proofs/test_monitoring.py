"""`make prove-monitoring` as it is: it waits more than it works."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.deploy.prometheus_tools import program
from tests.proofs.monitoring import watched


@pytest.mark.deep
@pytest.mark.slow
def test_alerts_reach_a_webhook_and_the_dashboard_shows_series(tmp_path: Path) -> None:
    program("prometheus-alertmanager")
    found = watched(tmp_path)
    assert len(found.fired) >= 5
    assert found.is_kept, found
