"""Step 4: the device refuses what the documents forbid, with the codes that the records expect.

Only first phases run here. Calls that the vendor accepts although the documents forbid them are never
launched, since they might read out of bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npugrad_server.acceptance.illegal import as_handed_down, illegal_calls
from npugrad_server.acceptance.step import Step
from npugrad_server.acceptance.trial import TrialFailed
from npugrad_server.worker.protocol import CallFailed, WorkspaceFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from npugrad.meta import CallMeta
    from npugrad.operator import Constraint, OpRecord
    from npugrad_server.acceptance.illegal import IllegalCall
    from npugrad_server.acceptance.report import Cell
    from npugrad_server.acceptance.rig import Rig
    from npugrad_server.acceptance.step import StepLog
    from npugrad_server.backends.npu.trials.exchange import RawCall

_MOST_DEATHS = 10
"""Processes that first phases may crash before the step gives up."""
_MOST_WORDS = 160
_MOST_SHOWN = 5


@dataclass
class _Question:
    """One constraint of one operator, every call that breaks it, and the answer to each.

    Attributes:
        record: The operator.
        constraint: The constraint.
        calls: One for each sample that can break it.
        by_worker: For each call, the worker's code, else its message; None if it cannot make the call.
        answers: For each call, what the first phase returned.
    """

    record: OpRecord
    constraint: Constraint
    calls: tuple[IllegalCall, ...]
    by_worker: list[int | str | None] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def expected(self) -> list[int]:
        """The vendor's code according to the record, for each call."""
        return [self.constraint.vendor_status(call.call) for call in self.calls]


def run(rig: Rig, out: StepLog) -> None:
    """Asks a worker first, then the first phases directly: only one process at a time opens the device."""
    product = rig.settings.product
    questions = [
        _Question(record, constraint, tuple(illegal_calls(record, product, constraint)))
        for record in rig.operators
        for constraint in record.constraints
        if constraint.applies(product)
    ]
    samples = [(record, sample) for record in rig.operators for sample in rig.samples(record)]
    for done, question in enumerate(questions):
        out.progress(done, len(questions), f"a worker: {question.record.name}: {question.constraint.id}")
        question.by_worker = [
            _worker_code(rig, question.record, call.call) if call.by_worker else None
            for call in question.calls
        ]
    legal = [as_handed_down(record, sample.call, sample.call) for record, sample in samples]
    illegal = [call.case for question in questions for call in question.calls]
    out.progress(
        0, 1, f"first phases: {len(legal)} legal calls, {len(illegal)} that break one constraint each"
    )
    answers = iter(_codes(rig, legal + illegal))
    # Legal calls first: codes of illegal ones mean something only if these are accepted.
    for record, sample in samples:
        answer = next(answers)
        out.check(f"{record.name}: legal: {sample.name}", answer["status"] == 0, "accepts", _said(answer))
    for question in questions:
        question.answers = [next(answers) for _ in question.calls]
    _compare(out, questions, simulated=rig.settings.simulated)
    for name in dict.fromkeys(question.record.name for question in questions):
        _compare_worker(out, name, [question for question in questions if question.record.name == name])


def _worker_code(rig: Rig, record: OpRecord, call: CallMeta) -> int | str:
    answer = rig.plan(record, call)
    if isinstance(answer, WorkspaceFound):
        return 0
    if isinstance(answer, CallFailed) and "code" in answer.metadata:
        return int(answer.metadata["code"])
    return answer.message


def _codes(rig: Rig, cases: Sequence[RawCall]) -> list[dict[str, Any]]:
    """Returns the first phase's answer to each case; a case that crashes the process has no code."""
    answers: list[dict[str, Any]] = []
    deaths = 0
    with rig.trial("phases") as trial:
        while len(answers) < len(cases):
            left = [case.to_json() for case in cases[len(answers) :]]
            try:
                trial.run({"device": rig.settings.index, "launch": False, "cases": left})
                answers += trial.lines
            except TrialFailed as error:
                deaths += 1
                if deaths > _MOST_DEATHS:
                    raise
                answers += trial.lines
                answers.append({"status": None, "words": f"the process ended: {error}"})
    return answers


def _is_unasked(answer: Mapping[str, Any]) -> bool:
    """Whether CANN made no tensor of such a shape, so that the operator was never asked."""
    return answer["status"] is None and "aclCreateTensor failed" in answer["words"]


def _compare(out: StepLog, questions: Iterable[_Question], *, simulated: bool) -> None:
    """Compares codes; a simulated CANN may know no more of an operator than its page's tables."""
    rows: list[tuple[Cell, ...]] = []
    unbroken: list[str] = []
    for question in questions:
        record, constraint = question.record, question.constraint
        name = f"{record.name}: {constraint.id}"
        if not question.calls:
            unbroken.append(name)
            continue
        answered = zip(question.answers, question.expected, strict=True)
        other = [answer for answer, code in answered if answer["status"] != code]
        unproved = (0, constraint.code) if simulated else ()
        differing = [
            answer for answer in other if answer["status"] not in unproved and not _is_unasked(answer)
        ]
        expected, codes = _names(question.expected), _names(a["status"] for a in question.answers)
        found = f"{codes} ({differing[0]['words'][:_MOST_WORDS]})" if differing else codes
        out.check(name, not differing, expected, found)
        rows.append(
            (
                record.name,
                constraint.id,
                constraint.code,
                expected,
                codes,
                len(question.calls),
                "DIFFER" if differing else "unproved" if other else "agree",
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
        out.note(f"Cannot be violated on this device: {', '.join(unbroken)}.")


def _compare_worker(out: StepLog, name: str, questions: Iterable[_Question]) -> None:
    """Checks that a worker, below the validator, reports exactly the code that the first phase returned."""
    asked, wrong = 0, list[str]()
    for question in questions:
        for call, code, answer in zip(question.calls, question.by_worker, question.answers, strict=True):
            if code is None or answer["status"] is None:
                continue
            asked += 1
            if code != answer["status"]:
                wrong.append(f"{question.constraint.id} ({call.sample}): {code}, not {answer['status']}")
    if len(wrong) > _MOST_SHOWN:
        out.table(f"Codes that {name} reports otherwise", ("call, and codes",), [(each,) for each in wrong])
    out.check(
        f"{name}: a worker reports the device's codes",
        asked > 0 and not wrong,
        f"the same code for each of {asked} calls that a worker can express",
        "; ".join(wrong[:_MOST_SHOWN]) or f"the same for {asked}",
        f"and {len(wrong) - _MOST_SHOWN} more, see the report" if len(wrong) > _MOST_SHOWN else "",
    )


def _names(codes: Iterable[int | None]) -> str:
    """Lists each code once."""
    return ", ".join(map(_code_name, sorted(set(codes), key=lambda code: (code is None, code))))


def _code_name(code: int | None) -> str:
    return "no code" if code is None else str(code) if code else "accepts"


def _said(answer: dict[str, Any]) -> str:
    return answer["words"][:_MOST_WORDS] or _code_name(answer["status"])


STEP = Step(
    4,
    "refusals",
    "Refusals",
    "Breaks every documented constraint, bypassing the validator, and compares the device's codes.",
    run,
)
