"""The recipe for another operator in CONTRIBUTING.md: a step that was forgotten fails here and is named.

Which fields the messages of an operator have is checked by tests/contract/test_codec.py, and which rows of
its documents the record covers by tests/contract/test_documents.py.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest

import npugrad_client
from npugrad import OPERATORS, OpRecord
from npugrad._tools import gen_contract
from npugrad.v1 import backward_pb2, operators_pb2
from npugrad_client.demo import _cases

ROOT = Path(__file__).resolve().parents[2]

STEPS = {
    "step_2": r"(protos/npugrad|tests/contract)/references/\w+\.py",
    "step_3": r"(protos/npugrad|tests/contract)/ops/\w+(?<!_workloads)\.py|tests/contract/document_rows\.txt",
    "step_6": r"protos/npugrad/ops/\w+_workloads\.py",
    "step_7": r"CHANGELOG\.md",
}
"""Files in which a step may leave something to do."""


@pytest.fixture(params=list(OPERATORS.values()), ids=list(OPERATORS))
def record(request: pytest.FixtureRequest) -> OpRecord:
    """Return each record in turn."""
    record: OpRecord = request.param
    return record


def test_headers_of_execute_carry_every_operator_by_the_number_of_its_record() -> None:
    for header, suffix in (("ExecuteHeader", "Request"), ("ExecuteResponseHeader", "Response")):
        (call,) = backward_pb2.DESCRIPTOR.message_types_by_name[header].oneofs
        types = operators_pb2.DESCRIPTOR.message_types_by_name
        found = {field.name: (field.number, field.message_type) for field in call.fields}
        wanted = {name: (record.wire, types[record.rpc + suffix]) for name, record in OPERATORS.items()}
        assert found == wanted, "run `make gen`"
    assert [record.wire for record in OPERATORS.values()][:6] == [1, 2, 3, 4, 5, 6]


def test_two_records_of_one_wire_number_are_refused(
    record: OpRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = (each for name, each in OPERATORS.items() if name != record.name)
    twin = replace(next(others), wire=record.wire)
    module = importlib.import_module(f"npugrad.ops.{twin.name}")
    monkeypatch.setattr(module, twin.name.upper(), twin)
    expected = rf"found wire={record.wire}, which is .*; expected \d+, the next free number"
    with pytest.raises(SystemExit, match=expected):
        gen_contract.load()


@pytest.mark.parametrize("folder", ["references", "ops"])
def test_steps_2_and_3_every_module_belongs_to_a_listed_record(folder: str) -> None:
    modules = {path.stem for path in (ROOT / "protos/npugrad" / folder).glob("*.py") if path.stem[0] != "_"}
    assert modules == set(OPERATORS), f"{folder}/: one module for each record in OPERATORS of ops/__init__.py"


def test_step_2_the_record_computes_with_its_own_reference(record: OpRecord) -> None:
    module = importlib.import_module(f"npugrad.references.{record.name}")
    assert inspect.unwrap(record.reference) is module.reference


def test_step_5_the_client_exports_the_result_of_every_operator(record: OpRecord) -> None:
    result = getattr(npugrad_client.Client, record.name).__annotations__["return"]
    assert result in npugrad_client.__all__, "client/npugrad_client/__init__.py"
    assert {param.name for param in record.outputs} < getattr(npugrad_client, result).__annotations__.keys()


def test_step_6_the_demo_shows_the_documents_example_and_a_real_shape(record: OpRecord) -> None:
    for cases in (_cases.official_cases(), _cases.realistic_cases()):
        assert record in {case.record for case in cases}, f"ops/_{record.name}_workloads.py"


def test_step_7_the_changelog_tells_of_every_operator(record: OpRecord) -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"\b{record.name}\b", text), "CHANGELOG.md"


@pytest.mark.parametrize("step", STEPS)
def test_nothing_is_left_to_do(step: str) -> None:
    """What `make new-operator` could not know."""
    files = [ROOT / "CHANGELOG.md", *(ROOT / "protos").rglob("*.*"), *(ROOT / "tests/contract").rglob("*.*")]
    of_step = {path: str(path.relative_to(ROOT)) for path in files}
    of_step = {path: name for path, name in of_step.items() if re.fullmatch(STEPS[step], name)}
    assert of_step
    left = [
        f"{name}:{number}: {line.strip()}"
        for path, name in sorted(of_step.items())
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if re.search(r"\bTODO\b", line)
    ]
    assert not left, "\n".join(["left to do:", *left])
