"""A planned call and its plan; which plans a process was brought, what is dropped, and when it is told."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.server.pool.pools import make_job

from npugrad import get_operator
from npugrad.call import CallOptions
from npugrad_server.pool import CallPlan, PlannedCall
from npugrad_server.pool.admission import demand_of
from npugrad_server.pool.sent_plans import SentPlans
from npugrad_server.worker.protocol import ForgetPlan

OPTIONS = CallOptions(deterministic=True, priority=7, label="x", verify=True)


def plans(count: int) -> list[CallPlan]:
    record = get_operator("group_norm_backward")
    call = record.build()
    return [CallPlan(record, call, record.infer(call), CallOptions(), is_kept=True) for _ in range(count)]


def test_a_call_that_shares_none_has_a_plan_of_its_own_without_label_and_priority() -> None:
    made = make_job().planned.plan
    first, second = (PlannedCall.alone(made.record, made.call, made.outputs, OPTIONS) for _ in range(2))
    assert first.plan is not second.plan
    assert not first.plan.is_kept
    assert first.options == OPTIONS
    assert first.plan.options == CallOptions(deterministic=True, verify=True)
    assert (first.plan.record, first.plan.call, first.plan.outputs) == (made.record, made.call, made.outputs)


def test_calls_of_a_plan_share_what_was_counted_for_it() -> None:
    one = make_job(verify=True).planned
    plan = CallPlan(one.plan.record, one.plan.call, one.plan.outputs, one.plan.options, is_kept=True)
    first, second = PlannedCall(plan, OPTIONS, "r1", 1.0), PlannedCall(plan, OPTIONS, "r2", None)
    assert demand_of(first) is demand_of(second)
    assert demand_of(first) == demand_of(one)
    assert demand_of(first, own_memory=True) != demand_of(first)


def test_a_plan_is_brought_once_and_the_one_that_was_used_longest_ago_goes_first() -> None:
    told: list[ForgetPlan] = []
    sent, (one, two, three) = SentPlans(told.append), plans(3)
    # The last one looks like the first, and is another.
    found = [sent.begin(call, plan) for call, plan in enumerate((one, one, two, replace(one)))]
    assert found == [(0, False), (0, True), (1, False), (2, False)]
    assert told == []
    sent = SentPlans(told.append, most=2)
    for call, plan in enumerate((one, two, one)):
        sent.begin(call, plan)
        sent.end(call)
    assert sent.begin(10, three) == (2, False)
    assert told == [ForgetPlan(1)]
    sent.end(10)
    assert sent.begin(11, two) == (3, False)
    assert told == [ForgetPlan(1), ForgetPlan(0)]


def test_a_plan_is_forgotten_after_the_last_of_its_calls() -> None:
    told: list[ForgetPlan] = []
    sent = SentPlans(told.append, most=1)
    one, two = plans(2)
    for call, plan in enumerate((one, one, two), 1):
        sent.begin(call, plan)
    for call in (1, 1, 77):  # an answer that was told twice, and a call that had no number
        sent.end(call)
    assert told == []
    sent.end(2)
    assert told == [ForgetPlan(0)]
    assert sent.begin(4, one) == (2, False)
    assert told == [ForgetPlan(0)]
    sent.end(3)
    assert told == [ForgetPlan(0), ForgetPlan(1)]


def test_a_number_that_the_process_lacks_is_given_to_no_later_call() -> None:
    told: list[ForgetPlan] = []
    sent, (one,) = SentPlans(told.append), plans(1)
    sent.begin(1, one)
    sent.end(1)
    sent.begin(2, one)
    sent.begin(3, one)
    # The second time it has no number any more.
    assert [sent.missed(call) for call in (2, 2, 1)] == [True, False, False]
    assert sent.begin(4, one) == (1, False)
    assert sent.missed(3)
    assert sent.begin(5, one) == (1, True)
    assert told == []


events = st.lists(
    st.tuples(st.sampled_from(["begin", "begin", "begin", "end", "missed"]), st.integers(0, 5)), max_size=60
)


@given(events, st.integers(1, 3))
def test_a_process_that_does_as_it_is_told_has_every_plan_that_is_named(
    events: list[tuple[str, int]], most: int
) -> None:
    kept: dict[int, CallPlan] = {}
    running: dict[int, int] = {}
    sent_as: dict[int, int] = {}
    brought: set[int] = set()

    def forget(message: ForgetPlan) -> None:
        kept.pop(message.plan, None)  # unless it was lacking
        assert message.plan not in running.values()

    sent = SentPlans(forget, most)
    all_plans = plans(6)
    for call, (event, which) in enumerate(events):
        if event == "begin":
            number, known = sent.begin(call, all_plans[which])
            if known:
                assert kept[number] is all_plans[which]
            else:
                assert number not in brought
                brought.add(number)
                kept[number] = all_plans[which]
            running[call] = sent_as[call] = number
        elif running:
            ended = sorted(running)[which % len(running)]
            del running[ended]
            if event == "end":
                sent.end(ended)
            else:
                assert sent.missed(ended)
                kept.pop(sent_as[ended], None)
        assert len(kept.keys() - running.values()) <= most
    for call in list(running):
        del running[call]
        sent.end(call)
    assert len(kept) <= most
