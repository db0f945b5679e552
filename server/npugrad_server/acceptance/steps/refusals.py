"""Step 4: the device refuses what the documents forbid, with the codes that the records know.

Only first phases run here. What the vendor accepts although the documents forbid it might read outside of
memory, so it is never launched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npugrad_server.acceptance.illegal import as_handed_down, expected_code, illegal_calls
from npugrad_server.acceptance.step import Step
from npugrad_server.acceptance.trial import TrialFailed
from npugrad_server.worker.protocol import CallFailed, CallPlanned

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from npugrad.spec import CallMeta, Constraint, OpSpec
    from npugrad_server.acceptance.bench import Bench
    from npugrad_server.acceptance.illegal import IllegalCall
    from npugrad_server.acceptance.report import Cell
    from npugrad_server.acceptance.step import StepLog
    from npugrad_server.backends.npu.trials.exchange import Case

_MOST_DEATHS = 10
"""Processes that first phases may take down before the step gives up."""
_MOST_WORDS = 160


@dataclass
class _Question:
    """One constraint of one operator, and what was answered to every call that breaks it."""

    spec: OpSpec
    constraint: Constraint
    calls: tuple[IllegalCall, ...]
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def codes(self) -> list[int | None]:
        return sorted({answer["status"] for answer in self.answers}, key=lambda code: (code is None, code))


def run(bench: Bench, out: StepLog) -> None:
    """Legal calls first: codes of others mean something only where these are accepted."""
    product = bench.settings.product
    questions = [
        _Question(spec, constraint, tuple(illegal_calls(spec, product, constraint)))
        for spec in bench.operators
        for constraint in spec.constraints
        if constraint.applies(product)
    ]
    _legal(bench, out)
    out.progress(1, 3, f"{sum(len(q.calls) for q in questions)} calls that break one constraint each")
    answers = iter(_codes(bench, [call.case for question in questions for call in question.calls]))
    for question in questions:
        question.answers = [next(answers) for _ in question.calls]
    _compare(out, questions)
    out.progress(2, 3, "the same through a worker, where it can express them")
    for spec in bench.operators:
        _ask_worker(bench, out, spec, [question for question in questions if question.spec is spec])


def _legal(bench: Bench, out: StepLog) -> None:
    """Every sample is accepted: all masks, null and declared outputs, empty and strided operands too."""
    samples = [(spec, sample) for spec in bench.operators for sample in bench.samples(spec)]
    out.progress(0, 3, f"{len(samples)} legal calls")
    cases = [as_handed_down(spec, sample.call, sample.call) for spec, sample in samples]
    for (spec, sample), answer in zip(samples, _codes(bench, cases), strict=True):
        out.check(f"{spec.name}: legal: {sample.name}", answer["status"] == 0, 0, _said(answer))


def _codes(bench: Bench, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """What the first phase returns for each case; a case that takes the process down has no code."""
    answers: list[dict[str, Any]] = []
    deaths = 0
    with bench.trial("phases") as trial:
        while len(answers) < len(cases):
            left = [case.to_json() for case in cases[len(answers) :]]
            try:
                trial.run({"device": bench.settings.index, "launch": False, "cases": left})
                answers += trial.lines
            except TrialFailed as error:
                deaths += 1
                if deaths > _MOST_DEATHS:
                    raise
                answers += trial.lines
                answers.append({"status": None, "words": f"the process ended: {error}"})
    return answers


def _compare(out: StepLog, questions: Iterable[_Question]) -> None:
    rows: list[tuple[Cell, ...]] = []
    unbroken: list[str] = []
    for question in questions:
        spec, constraint = question.spec, question.constraint
        name = f"{spec.name}: {constraint.id}"
        if not question.calls:
            unbroken.append(name)
            continue
        expected, why = expected_code(spec, constraint)
        agrees = question.codes == [expected]
        differs = next((a for a in question.answers if a["status"] != expected), question.answers[0])
        found = ", ".join(map(_code_name, question.codes))
        if not agrees:
            found += f" ({differs['words'][:_MOST_WORDS]})"
        out.check(name, agrees, _code_name(expected), found, why)
        rows.append(
            (
                spec.name,
                constraint.id,
                constraint.code,
                _code_name(expected),
                ", ".join(map(_code_name, question.codes)),
                len(question.calls),
                "agree" if agrees else "DIFFER",
            )
        )
    columns = (
        "operator",
        "constraint",
        "document",
        "record says of the vendor",
        "device",
        "calls",
        "verdict",
    )
    out.table("Codes of broken constraints", columns, rows)
    if unbroken:
        out.note(f"Not to be broken on this device: {', '.join(unbroken)}.")


def _ask_worker(bench: Bench, out: StepLog, spec: OpSpec, questions: Iterable[_Question]) -> None:
    """A worker, below the validator, reports the very code that the first phase returned."""
    asked, wrong = 0, list[str]()
    for question in questions:
        for call, answer in zip(question.calls, question.answers, strict=True):
            if not call.by_worker or answer["status"] is None:
                continue
            asked += 1
            found = _worker_code(bench, spec, call.call)
            if found != answer["status"]:
                wrong.append(f"{question.constraint.id} ({call.sample}): {found}, not {answer['status']}")
    out.check(
        f"{spec.name}: a worker reports the device's codes",
        not wrong,
        f"the same code for each of {asked} calls",
        "; ".join(wrong[:5]) or f"the same for {asked}",
        "" if len(wrong) <= 5 else f"and {len(wrong) - 5} more",
    )


def _worker_code(bench: Bench, spec: OpSpec, call: CallMeta) -> int | str:
    answer = bench.plan(spec, call)
    if isinstance(answer, CallPlanned):
        return 0
    if isinstance(answer, CallFailed) and "code" in answer.metadata:
        return int(answer.metadata["code"])
    return answer.message


def _code_name(code: int | None) -> str:
    return "no code" if code is None else str(code) if code else "accepts"


def _said(answer: dict[str, Any]) -> str:
    return answer["words"][:_MOST_WORDS] or str(answer["status"])


STEP = Step(
    4,
    "refusals",
    "Refusals",
    "Every documented constraint of every operator, broken below the validator: the codes of the device.",
    run,
)
