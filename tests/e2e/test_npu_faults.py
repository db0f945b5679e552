"""Sick NPUs seen from callers: the fault matrix, with counts. All is SIMULATED."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from tests.e2e.npu_cases import CASES, QUICK
from tests.e2e.npu_matrix import Site, judge
from tests.fix_npu import run_npu_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.cann_sim.build import Installation
    from tests.e2e.conftest import Report as Tally
    from tests.e2e.npu_cases import FaultCase

pytestmark = [pytest.mark.npu_sim, pytest.mark.slow]


@pytest.fixture(scope="module")
def site_for(
    install_cann_sim: Callable[..., Installation], torch_npu: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[FaultCase, ExitStack], Site]]:
    """Give a function that finds or starts the server of a case; the one that cases share is ended last."""
    shared: list[Site] = []

    def start(case: FaultCase, stack: ExitStack) -> Site:
        simulator = install_cann_sim("split", case.cann) if case.cann else install_cann_sim()
        running = run_npu_server(
            simulator,
            tmp_path_factory.mktemp(case.name),
            *(*QUICK, "--max-respawns", str(case.max_respawns)),
            devices=case.devices,
            plan=f"ndev={case.count}",
            lost_workers=True,
        )
        return Site(stack.enter_context(running), case, stack)

    with ExitStack() as last:

        def find(case: FaultCase, stack: ExitStack) -> Site:
            if case.own:
                return start(case, stack)
            if not shared:
                shared.append(start(case, last))
            return shared[0]

        yield find


@pytest.mark.parametrize("case", CASES, ids=str)
def test_callers_and_devices_come_through(
    case: FaultCase, site_for: Callable[[FaultCase, ExitStack], Site], tally: Tally
) -> None:
    with ExitStack() as stack:
        site = site_for(case, stack)
        found = site.run(case)
        judge(found)
        log = site.npu.process.log_text()
        assert [words for words in case.log if words not in log] == []
        assert site.npu.report.violations() == []
    tally(f"npu fault case={case.name}", found.line())
