"""Phase 1 gets the same arguments from the service as from torch_npu's own compiled bindings.

Same operands, same simulated CANN, two processes. It is the vendor's compiled code that checks how the
service hands arguments down. Results are SIMULATED.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from tests.congruence.arguments import DOCUMENTED, Difference, differences
from tests.congruence.conftest import Answer, RunSides
from tests.congruence.sides import BINDINGS
from tests.operators import GROUP_NORM
from tests.summary import Tally

pytestmark = [pytest.mark.npu_sim, pytest.mark.slow]

LEAST = 100
"""Combinations of each operator that have to be compared."""
UNBOUND = "tensor does not have a device"
"""What torch_npu says when gamma is null and a gradient is wanted whose options it takes from gamma."""


def answers(run_sides: RunSides, operator: str) -> Iterator[tuple[Answer, Answer]]:
    """The service's answer and torch_npu's, combination by combination."""
    sides = run_sides(operator, "service", "torch_npu")
    return zip(sides["service"], sides["torch_npu"], strict=True)


def mask_of(answer: Answer) -> tuple[bool, ...]:
    """The output mask; one true bit where the operator has none."""
    call = answer.case.call
    mask = call.mask() if "output_mask" in call.attrs else (True,)
    assert mask is not None
    return mask


def compared(run_sides: RunSides, operator: str) -> Iterator[tuple[Answer, list[Difference]]]:
    """Every combination that both sides plan, with all that differs."""
    for ours, theirs in answers(run_sides, operator):
        if ours.digests and BINDINGS[operator].takes(ours.case.call):
            assert (len(ours.plans), len(theirs.plans)) == (1, 1), (ours.case.name, ours, theirs)
            yield ours, list(differences(ours.plans[0], theirs.plans[0]))


@pytest.mark.parametrize("operator", BINDINGS)
def test_the_arguments_are_those_of_the_binding(run_sides: RunSides, tally: Tally, operator: str) -> None:
    found = list(compared(run_sides, operator))
    mistakes = [f"{ours.case.name}: {one}" for ours, all_ in found for one in all_ if not one.excuse]
    excuses = Counter(one.excuse for _, all_ in found for one in all_ if one.excuse)
    arguments = sum(len(ours.plans[0]["arguments"]) for ours, _ in found)
    tally(
        f"{operator}, against torch_npu",
        f"{len(found)} combinations, {arguments} arguments, {len(mistakes)} differ; documented differences: "
        + ", ".join(f"{name} {excuses[name]}" for name in DOCUMENTED),
    )
    assert mistakes == []
    assert len(found) >= LEAST


@pytest.mark.parametrize("operator", BINDINGS)
def test_the_results_are_those_of_the_binding(run_sides: RunSides, operator: str) -> None:
    """Bit for bit, because one simulated kernel computes both; so the data arrives where it belongs, too."""
    count = 0
    for ours, theirs in answers(run_sides, operator):
        assert ours.error == "", ours.case.name
        # With an empty operand nothing is written: torch_npu returns what lay there, the service zeros.
        empty = any(meta is not None and not meta.size for meta in ours.case.call.inputs.values())
        if not empty and BINDINGS[operator].takes(ours.case.call):
            assert (theirs.error, ours.digests) == ("", theirs.digests), ours.case.name
            count += bool(ours.digests)
    assert count >= LEAST


@pytest.mark.parametrize("operator", BINDINGS)
def test_with_nothing_wanted_the_service_plans_nothing(run_sides: RunSides, operator: str) -> None:
    """The binding runs phase 1 for nothing: it asks for no workspace and computes nothing."""
    for ours, theirs in answers(run_sides, operator):
        if not ours.digests:
            assert not any(mask_of(ours)), ours.case.name
            assert (len(ours.plans), [plan["workspace"] for plan in theirs.plans]) == (0, [0])


@pytest.mark.parametrize("operator", [name for name in BINDINGS if name != GROUP_NORM.name])
def test_no_combination_is_left_out(run_sides: RunSides, operator: str) -> None:
    takes = BINDINGS[operator].takes
    assert not [ours.case.name for ours, _ in answers(run_sides, operator) if not takes(ours.case.call)]


def test_without_gamma_the_service_does_what_the_binding_cannot(run_sides: RunSides) -> None:
    """Null gamma with its gradient wanted: legal by the document, and not reachable through torch_npu."""
    takes = BINDINGS[GROUP_NORM.name].takes
    unbound = [both for both in answers(run_sides, GROUP_NORM.name) if not takes(both[0].case.call)]
    assert len(unbound) == 18
    for ours, theirs in unbound:
        assert (theirs.plans, theirs.error) == ([], UNBOUND)
        (plan,) = ours.plans
        arguments = {argument["name"]: argument["value"] for argument in plan["arguments"]}
        assert arguments["gamma"] is None
        outputs = [arguments[name] for name in ("gradInput", "gradGammaOut", "gradBetaOut")]
        assert [output is not None for output in outputs] == list(mask_of(ours))
        assert all(output["shape"] == [6] for output in outputs[1:] if output is not None)


def test_every_documented_difference_is_still_seen(run_sides: RunSides) -> None:
    seen = {one.excuse for op in BINDINGS for _, all_ in compared(run_sides, op) for one in all_}
    assert seen == set(DOCUMENTED)
