"""A planned call and its plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from npugrad.call import CallOptions
from npugrad_server.pool import CallPlan, PlannedCall
from npugrad_server.pool.demand import demand_of

OPTIONS = CallOptions(deterministic=True, priority=7, label="x", verify=True)


def test_a_call_that_shares_none_has_a_plan_of_its_own_without_label_and_priority(job: Any) -> None:
    first = replace(job().planned, options=OPTIONS)
    second = replace(first)
    assert first == second
    assert first.plan is not second.plan
    assert not first.plan.is_kept
    assert first.plan.options == CallOptions(deterministic=True, verify=True)
    assert (first.plan.record, first.plan.call, first.plan.outputs) == (
        first.record,
        first.call,
        first.outputs,
    )


def test_calls_of_a_plan_share_it_and_what_was_counted_for_it(job: Any) -> None:
    one = replace(job().planned, options=OPTIONS)
    plan = CallPlan(one.record, one.call, one.outputs, one.plan.options, is_kept=True)
    first, second = PlannedCall.of(plan, OPTIONS, "r1", 1.0), PlannedCall.of(plan, OPTIONS, "r2", None)
    assert first.plan is second.plan is plan
    assert first == replace(one, request_id="r1", deadline_s=1.0)
    assert demand_of(first) is demand_of(second)
    assert demand_of(first) == demand_of(one)
    assert demand_of(first, own_memory=True) != demand_of(first)
