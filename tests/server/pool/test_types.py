"""A planned call and its plan."""

from __future__ import annotations

from typing import Any

from npugrad.call import CallOptions
from npugrad_server.pool import CallPlan, PlannedCall
from npugrad_server.pool.admission import demand_of

OPTIONS = CallOptions(deterministic=True, priority=7, label="x", verify=True)


def test_a_call_that_shares_none_has_a_plan_of_its_own_without_label_and_priority(job: Any) -> None:
    made = job().planned.plan
    first, second = (PlannedCall.alone(made.record, made.call, made.outputs, OPTIONS) for _ in range(2))
    assert first.plan is not second.plan
    assert not first.plan.is_kept
    assert first.options == OPTIONS
    assert first.plan.options == CallOptions(deterministic=True, verify=True)
    assert (first.plan.record, first.plan.call, first.plan.outputs) == (made.record, made.call, made.outputs)


def test_calls_of_a_plan_share_what_was_counted_for_it(job: Any) -> None:
    one = job(verify=True).planned
    plan = CallPlan(one.plan.record, one.plan.call, one.plan.outputs, one.plan.options, is_kept=True)
    first, second = PlannedCall(plan, OPTIONS, "r1", 1.0), PlannedCall(plan, OPTIONS, "r2", None)
    assert demand_of(first) is demand_of(second)
    assert demand_of(first) == demand_of(one)
    assert demand_of(first, own_memory=True) != demand_of(first)
