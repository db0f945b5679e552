"""Every row of the pages and of the vendor's check tables is in a record, and nothing else is cited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.pages import load
from tests.summary import Tally

from npugrad.errors import Source
from npugrad.operator import AttrParam, OpRecord
from npugrad.ops import OPERATORS

ROWS_FILE = Path(__file__).parent / "document_rows.txt"
MADE_BY_SERVICE = ("workspaceSize", "executor", "workspace", "stream")
"""Parameters that every page has."""


def rows_of_page(name: str) -> Iterator[Source]:
    """What the facts of a page have rows of; nothing until `make facts` has read it."""
    page = load("9.1.0").get(name)
    if page is None:
        return
    yield Source(name, "supported products", "list")
    for parameter in (*(each.c_name for each in page.params), *MADE_BY_SERVICE):
        yield Source(name, "parameters", parameter)
    for code, rows in page.codes.items():
        yield from (Source(name, f"return codes, {code}", f"row {row}") for row in range(1, rows + 1))
    yield from (Source(name, "constraints", f"entry {entry}") for entry in range(1, page.constraints + 1))


def read_rows() -> dict[str, list[Source]]:
    """Rows by operator, as written down from the documents; by their facts where only checks are."""
    rows: dict[str, list[Source]] = {}
    for line in ROWS_FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            operator = rows.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            document, section, row, meaning = line.split(" | ")
            assert meaning
            operator.append(Source(document, section, row))
    for name, listed in rows.items():
        if all(row.document.startswith("vendor source") for row in listed):
            listed[:0] = rows_of_page(OPERATORS[name].aclnn_name)
    return rows


ROWS = read_rows()


def cited(record: OpRecord) -> set[Source]:
    """What constraints cite, and the product lists that `OpRecord.products` rests on."""
    by_constraints = {source for constraint in record.constraints for source in constraint.sources}
    documents = set(record.products.values()) & set(record.documents)
    return by_constraints | {Source(document, "supported products", "list") for document in documents}


def test_the_list_has_every_operator_and_no_row_twice() -> None:
    assert ROWS.keys() == {*OPERATORS}
    every = [row for rows in ROWS.values() for row in rows]
    assert max(Counter(every).values()) == 1


def test_facts_have_the_rows_that_a_person_wrote_down() -> None:
    name = "layer_norm_backward"
    assert list(rows_of_page(OPERATORS[name].aclnn_name)) == ROWS[name][:33]


def test_every_row_is_cited_or_explained(record: OpRecord, tally: Tally) -> None:
    listed = set(ROWS[record.name])
    explained = {entry.source for entry in record.not_expressible}
    found = cited(record) | explained
    assert sorted(map(str, listed - found)) == [], "rows that no constraint cites"
    assert sorted(map(str, found - listed)) == [], "citations of rows that no document has"
    covered = len(listed & cited(record))
    tally(
        f"{record.name} documents",
        f"{len(listed)} rows of pages and check tables, {covered} covered by constraints, "
        f"{len(explained)} not expressible",
    )


def test_a_row_is_either_covered_or_not_expressible(record: OpRecord) -> None:
    explained = [entry.source for entry in record.not_expressible]
    assert max(Counter(explained).values()) == 1
    assert sorted(map(str, set(explained) & cited(record))) == []
    assert all(len(entry.reason) > 10 for entry in record.not_expressible)


def test_citations_name_the_record_s_own_pages_and_repositories(record: OpRecord) -> None:
    pages = {source.document for source in cited(record) if not source.document.startswith("vendor source")}
    assert pages <= set(record.documents)
    repositories = {s.document for s in cited(record)} - pages
    assert repositories == {f"vendor source ({name})" for name in record.repositories}


def test_a_code_is_cited_for_constraints_with_that_code(record: OpRecord) -> None:
    """A constraint that cites a row of the error table gives that row's code."""
    for constraint in record.constraints:
        for source in constraint.sources:
            if source.section.startswith("return codes, "):
                assert source.section == f"return codes, {constraint.code}", constraint.id


def test_parameters_are_those_of_the_page_in_its_order(record: OpRecord) -> None:
    """Rows of a page are in the order of the C signature."""
    for document in record.documents:
        on_page = [
            row.row for row in ROWS[record.name] if (row.document, row.section) == (document, "parameters")
        ]
        assert [p.c_name for p in record.params] == [name for name in on_page if name not in MADE_BY_SERVICE]


def test_kinds_and_types_are_those_of_the_page_s_table(record: OpRecord) -> None:
    """Types that its vendor's checks refuse all the same may lack where a rule says which."""
    page = load("9.1.0")[record.aclnn_name]
    if [row for row in ROWS[record.name] if "vendor" not in row.document] != [*rows_of_page(page.name)]:
        return  # by another page, or several
    picks = " ".join(c.pick for c in record.constraints if c.id.endswith("dtype")).lower()
    for param, told in zip(record.params, page.params, strict=True):
        assert (param.c_name, told.output) == (told.c_name, getattr(param, "role", "") == "output")
        if isinstance(param, AttrParam):
            assert param.type == told.type, param.name
            continue
        for product in record.products:
            types, listed = {*param.dtypes[product]}, {*told.dtypes[product]}
            assert types <= listed, (param.name, product)
            assert all(each in picks for each in listed - types - {*param.uncarried}), (param.name, product)
