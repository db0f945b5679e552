"""The recipe for another operator in CONTRIBUTING.md: what was forgotten fails here and is named.

What follows from the record is checked by test_generated.py, and which rows of its documents it covers by
tests/contract/test_documents.py.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path

import pytest

from npugrad import OPERATORS, OpRecord
from npugrad._tools import gen_contract
from npugrad.v1 import backward_pb2, operators_pb2
from npugrad_client.demo import _cases

ROOT = Path(__file__).resolve().parents[2]


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


def test_the_demo_shows_a_real_shape_of_every_operator(record: OpRecord) -> None:
    assert record in {case.record for case in _cases.realistic_cases()}, "a model of the record"


def test_the_changelog_tells_of_every_operator(record: OpRecord) -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"\b{record.name}\b", text), "CHANGELOG.md"


def test_nothing_is_left_to_do() -> None:
    """What `make new-operator` could not know."""
    folders = ("protos/npugrad/ops", "protos/npugrad/references", "tests/contract")
    files = [ROOT / "CHANGELOG.md", *(path for folder in folders for path in (ROOT / folder).rglob("*.*"))]
    left = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        if path.suffix in (".md", ".py", ".txt")
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if re.search(r"\bTODO\b", line)
    ]
    assert not left, "\n".join(["left to do:", *left])
