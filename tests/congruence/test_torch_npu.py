"""Phase 1 gets the same arguments from the service as from torch_npu's own compiled bindings.

Same operands, same simulated CANN, two processes. It is the vendor's compiled code that checks how the
service hands arguments down; torch_npu binds no aclnnMultiScaleDeformableAttentionGrad, so that its arguments
are compared with the printed signature, and with what the call says of its operands. Results are SIMULATED.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.cann_sim.build import Installation
from tests.cann_sim.fixtures import inherited, template
from tests.cann_sim.report import HOST_OBJECTS, Report, leaks
from tests.congruence.arguments import DOCUMENTED, ND, differences, elements, names, values
from tests.congruence.combinations import Combination, combinations
from tests.congruence.sides import BINDINGS
from tests.operators import GRID_SAMPLER_3D, GROUP_NORM, MSDA
from tests.pages import load
from tests.summary import Tally, tally_of
from tests.worker_forks import ForkedWorker

from npugrad.meta import TensorMeta
from npugrad.ops import get_operator

pytestmark = [pytest.mark.npu_sim, pytest.mark.slow, pytest.mark.usefixtures("torch_npu")]

LEAST = 100
"""Combinations of each operator that have to be compared."""
UNBOUND = "tensor does not have a device"
"""What torch_npu says when gamma is null and a gradient is wanted whose options it takes from gamma."""
OUTPUTS = {"gradValue": "value", "gradLocation": "location", "gradAttnWeight": "attnWeight"}
"""Outputs of MSDA, and the operand that each is the gradient of."""
EXCUSES: dict[str, set[str]] = {
    **dict.fromkeys(BINDINGS, {*DOCUMENTED} - {"idle strides"}),
    GRID_SAMPLER_3D.name: {"format", "storage"},
    GROUP_NORM.name: {*DOCUMENTED},
}
"""Documented differences that the combinations of an operator show."""
TIMEOUT_S = 540
PLAN = "record=1; threads=strict; hbm_mb=4096; cann=9.2.0-beta.2; sums=ordered"


@dataclass(frozen=True)
class Answer:
    """What one side made of one combination."""

    case: Combination
    plans: Sequence[Mapping[str, Any]]
    error: str
    digests: Mapping[str, str]


@pytest.fixture
def tally(pytestconfig: pytest.Config) -> Tally:
    """Counts for the summary of the run."""
    return tally_of(pytestconfig, "congruence (SIMULATED)")


def run(
    installation: Installation, folder: Path, operator: str, sides: Sequence[str]
) -> list[Sequence[Answer]]:
    """The answers of sides to all combinations, each side in a process, both at once."""
    answers = []
    with ExitStack() as stack:
        running = {side: _start(stack, installation, folder / side, side, operator) for side in sides}
        for side, process in running.items():
            status = process.wait(TIMEOUT_S)
            report = Report(folder / side / "report")
            errors = (folder / side / "errors").read_text()
            assert (status, report.violations()) == (0, []), errors[-4000:]
            left = leaks(report.counters())
            assert not any(name in left for name in HOST_OBJECTS), left
            answers.append(_answers(folder / side / "output", report, operator))
    return answers


def _start(
    stack: ExitStack, installation: Installation, folder: Path, side: str, operator: str
) -> ForkedWorker:
    (folder / "report").mkdir(parents=True)
    environment = {
        **inherited(),
        **installation.environment({}),
        "CANN_SIM_PLAN": PLAN,
        "CANN_SIM_REPORT_DIR": str(folder / "report"),
        "TASK_QUEUE_ENABLE": "0",  # both phases on the calling thread, as the service has them
    }
    output = stack.enter_context((folder / "output").open("wb"))
    errors = stack.enter_context((folder / "errors").open("wb"))
    process = template(installation, True).fork(
        ["tests.congruence.sides", side, operator], (), output.fileno(), errors.fileno(), environment
    )
    stack.callback(process.wait, 10)
    stack.callback(process.kill)
    return process


def _answers(output: Path, report: Report, operator: str) -> Sequence[Answer]:
    op = get_operator(operator).aclnn_name
    plans = [plan for plan in report.records("plan") if plan["op"] == op]
    refused = [plan for plan in plans if plan["status"]]
    assert not refused, refused[0]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    cases = list(combinations(operator))
    assert [line["name"] for line in lines] == [case.name for case in cases]
    assert not [name for name, times in Counter(case.name for case in cases).items() if times > 1]
    return [
        Answer(case, plans[slice(*line["plans"])], line["error"], line["digests"])
        for case, line in zip(cases, lines, strict=True)
    ]


def mask_of(case: Combination) -> tuple[bool, ...]:
    """The output mask; one true bit where the operator has none."""
    mask = case.call.mask() if "output_mask" in case.call.attrs else (True,)
    assert mask is not None
    return mask


@pytest.mark.parametrize("operator", BINDINGS)
def test_arguments_and_results_are_those_of_the_binding(
    cann_sim: Installation, tmp_path: Path, tally: Tally, operator: str
) -> None:
    """Results bit for bit, because one simulated kernel computes both: the data arrives where it belongs."""
    takes = BINDINGS[operator].takes
    both = list(zip(*run(cann_sim, tmp_path, operator, ("service", "torch_npu")), strict=True))
    bound = [(ours, theirs) for ours, theirs in both if takes(ours.case.call)]
    unbound = [(ours, theirs) for ours, theirs in both if not takes(ours.case.call)]
    check_results(bound)
    check_unbound(operator, unbound)
    planned = [(ours, theirs) for ours, theirs in bound if ours.digests]
    mistakes, excuses = [], Counter[str]()
    for ours, theirs in planned:
        assert (len(ours.plans), len(theirs.plans)) == (1, 1), (ours.case.name, ours, theirs)
        for one in differences(ours.plans[0], theirs.plans[0]):
            excuses[one.excuse] += 1
            mistakes += [f"{ours.case.name}: {one}"] * (not one.excuse)
    arguments = sum(len(ours.plans[0]["arguments"]) for ours, _ in planned)
    tally(
        f"{operator}, against torch_npu",
        f"{len(planned)} combinations, {arguments} arguments, {len(mistakes)} differ; documented: "
        + ", ".join(f"{name} {excuses[name]}" for name in DOCUMENTED),
    )
    assert mistakes == []
    assert {*excuses} == EXCUSES[operator]
    assert len(planned) >= LEAST


def test_every_documented_difference_is_still_seen() -> None:
    assert set[str]().union(*EXCUSES.values()) == {*DOCUMENTED}
    assert EXCUSES.keys() == BINDINGS.keys()


def check_results(bound: Sequence[tuple[Answer, Answer]]) -> None:
    count = 0
    for ours, theirs in bound:
        assert ours.error == "", ours.case.name
        # With an empty operand nothing is written: torch_npu returns what lay there, the service zeros.
        if all(meta is None or meta.size for meta in ours.case.call.inputs.values()):
            assert (theirs.error, ours.digests) == ("", theirs.digests), ours.case.name
            count += bool(ours.digests)
        if not ours.digests:
            # The binding runs phase 1 for nothing: it asks for no workspace and computes nothing.
            assert not any(mask_of(ours.case)), ours.case.name
            assert (len(ours.plans), [plan["workspace"] for plan in theirs.plans]) == (0, [0])
    assert count >= LEAST


def check_unbound(operator: str, unbound: Sequence[tuple[Answer, Answer]]) -> None:
    """Null gamma with its gradient wanted: legal by the document, and not reachable through torch_npu."""
    assert len(unbound) == (18 if operator == GROUP_NORM.name else 0)
    for ours, theirs in unbound:
        assert (ours.error, theirs.plans, theirs.error) == ("", [], UNBOUND)
        (plan,) = ours.plans
        arguments = values(plan)
        assert arguments["gamma"] is None
        outputs = [arguments[name] for name in ("gradInput", "gradGammaOut", "gradBetaOut")]
        assert [output is not None for output in outputs] == list(mask_of(ours.case))
        assert all(output["shape"] == [6] for output in outputs[1:] if output is not None)


def described(answer: Answer) -> dict[str, TensorMeta]:
    """What the call says of each tensor, by its C name."""
    inputs = {param.c_name: answer.case.call.tensor(param.name) for param in MSDA.inputs}
    likes = {name: inputs[like] for name, like in OUTPUTS.items()}
    return inputs | {name: TensorMeta(like.dtype, like.shape) for name, like in likes.items()}


def expected_shape(name: str, meta: TensorMeta) -> list[int]:
    """Shape on the device: (bs, nq, nh * ch) is all that the operator takes of the incoming gradient."""
    shape = list(meta.shape)
    return [*shape[:2], shape[2] * shape[3]] if name == "gradOutput" and len(shape) == 4 else shape


def check_tensor(name: str, tensor: Mapping[str, Any], meta: TensorMeta) -> None:
    """The record of one tensor says of it what the call says."""
    assert (tensor["dtype"], tensor["shape"]) == (meta.dtype.acl, expected_shape(name, meta)), name
    assert (tensor["format"], tensor["offset"]) == (ND, 0), name
    assert tensor["address"] % 32 == 0, name
    asked = elements(meta.shape, meta.element_strides)
    assert elements(tensor["shape"], tensor["strides"]) == asked, name
    assert math.prod(tensor["storage"]) == (max(asked) + 1 if asked else 0), name


def test_deformable_attention_follows_the_signature(
    cann_sim: Installation, tmp_path: Path, tally: Tally
) -> None:
    (found,) = run(cann_sim, tmp_path, MSDA.name, ("service",))
    count = 0
    for answer in found:
        assert (answer.error, len(answer.plans)) == ("", 1), answer.case.name
        (plan,) = answer.plans
        assert (plan["status"], plan["deterministic"]) == (0, int(answer.case.deterministic))
        assert names(plan) == [param.c_name for param in load("9.1.0")[MSDA.aclnn_name].params]
        metas = described(answer)
        for name, tensor in values(plan).items():
            check_tensor(name, tensor, metas[name])
            count += 1
    tally(f"{MSDA.name}, against its signature", f"{len(found)} combinations, {count} arguments, 0 differ")
    assert len(found) == len(list(combinations(MSDA.name))) >= LEAST
