"""`make prove-scale-out` as it is: it waits more than it works."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.proofs.scale_out import run


@pytest.mark.slow
@pytest.mark.deep
def test_a_new_server_behind_a_name_gets_its_share(tmp_path: Path) -> None:
    found = run(tmp_path)
    print(found.line())
    assert found.ok, found.line()
