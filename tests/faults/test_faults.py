"""The faults can still be planted; what notices them is for `python -m tests.faults`."""

from __future__ import annotations

from collections import Counter

from tests.faults.__main__ import ROOT, faults


def test_each_fault_has_one_place() -> None:
    assert Counter(fault.area for fault in faults()) == {
        "contract": 20,
        "server": 12,
        "client": 10,
        "kernels": 10,
        "deployment": 8,
    }
    assert len({fault.name for fault in faults()}) == 60
    for fault in faults():
        assert (ROOT / fault.file).read_text("utf-8").count(fault.old) == 1, fault.name
        assert fault.new != fault.old, fault.name
