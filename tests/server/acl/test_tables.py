"""What each code of the vendor leads to; C types of both phases, against the signatures of the documents."""

from __future__ import annotations

import ctypes
import itertools
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)

from hypothesis import given
from hypothesis import strategies as st
from tests.pages import load

from npugrad.ops import OPERATORS
from npugrad_server.acl.faults import FAULTS, Action, fault_of
from npugrad_server.acl.symbols import DEVICE, RUNTIME, TENSORS, operator_symbols

# Written out from the vendor's lists, one number at a time, so that a slip in a range of the table shows.
EXPECTED = {
    Action.REFUSE: [161001, 161002],
    Action.OPERATOR_MISSING: [561003, 561107, 561108, 561112],
    Action.INTERNAL: [0, 361001, 561000, 561001, 561002, 561101, 561103, 561106, 561119, 561999],
    Action.OUT_OF_MEMORY: [200000, 207001, 207018],
    Action.OUT_OF_RESOURCES: [207005, 207007, 207008],
    Action.RESUBMIT: [107019],
    Action.OWN_FAULT: [100000, 100001, 107000, 107001, 107002, 107003, 107008, 107017],
    Action.TIMED_OUT: [507046, 507047],
    Action.END_WORKER: [
        *(107020, 107022, 107023, 507000, 507001),
        *(507010, 507011, 507012, 507013, 507014, 507015, 507016, 507017, 507018),
        *(507034, 507035, 507036, 507042, 507043, 507044, 507045, 507048, 507049, 507050),
    ],
    Action.QUARANTINE: [507053, 507054, 507055, 507056, 507057],
    Action.BACK_OFF: [507899, 507900, 507901, 507902],
    Action.UNAVAILABLE: [507008, 507033, 207004],
}


def test_a_code_leads_to_its_action() -> None:
    for action, codes in EXPECTED.items():
        for code in codes:
            assert fault_of(code).action is action, code
            assert fault_of(code).meaning, code


def test_every_action_is_reached_and_no_code_has_two_rows_but_for_the_class_of_561() -> None:
    assert set(EXPECTED) == set(Action)
    # Between two ends of ranges nothing changes.
    ends = {end for row in FAULTS for codes in row.codes for end in codes}
    for code in sorted({end + step for end in ends for step in (-1, 0, 1)}):
        rows = [row for row in FAULTS if row.matches(code)]
        assert len(rows) <= 1 or (code // 1000 == 561 and len(rows) == 2), code


def test_a_number_that_is_not_in_the_table_follows_its_class() -> None:
    classes = {107999: Action.OWN_FAULT, 207999: Action.OUT_OF_RESOURCES, 361999: Action.INTERNAL}
    others = (507999, 999999, -1, 7)
    for code, action in {**classes, **dict.fromkeys(others, Action.END_WORKER)}.items():
        assert fault_of(code).action is action, code


def test_a_code_of_the_operator_library_may_hide_one_of_the_device() -> None:
    actions = {507015: Action.END_WORKER, 507054: Action.QUARANTINE, 207001: Action.OUT_OF_MEMORY}
    # What the runtime noted of other classes does not speak of the device.
    actions |= dict.fromkeys((107002, 161002), Action.INTERNAL)
    for code, (last, action) in itertools.product((361001, 561000, 561103, 0), actions.items()):
        assert fault_of(code, last).action is action, (code, last)


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1))
def test_any_two_numbers_have_an_action_and_a_refusal_is_never_more_than_that(code: int, last: int) -> None:
    fault = fault_of(code, last)
    assert not (fault.action.ends_worker and fault.action.retries)
    if code in EXPECTED[Action.REFUSE] + EXPECTED[Action.OPERATOR_MISSING]:
        assert fault == fault_of(code)


# ---------------------------------------------------------------------------------------- C types


TYPES = {
    **{"int64_t": c_int64, "uint64_t": c_uint64, "int": c_int, "int8_t": c_int8},
    **{"float": c_float, "double": c_double, "bool": c_bool, "char*": c_char_p},
}
"""What prototypes have beside pointers."""


def test_both_phases_have_the_types_of_the_headers() -> None:
    for record in OPERATORS.values():
        plan, launch = operator_symbols(record)
        expected = [TYPES.get(c_type, c_void_p) for c_type in load("9.1.0")[record.aclnn_name].c_types]
        assert plan.name == f"{record.aclnn_name}GetWorkspaceSize"
        assert list(plan.arguments) == [*expected, POINTER(c_uint64), POINTER(c_void_p)], record.name
        assert launch.name == record.aclnn_name
        assert launch.arguments == (c_void_p, c_uint64, c_void_p, c_void_p)
        assert (plan.result, launch.result) == (c_int32, c_int32)
        assert plan.since == launch.since == record.min_cann


def test_every_function_has_types_that_keep_pointers_whole() -> None:
    for symbol in RUNTIME + DEVICE + TENSORS:
        assert all(isinstance(kind, type) for kind in (*symbol.arguments, symbol.result)), symbol.name
    assert ctypes.sizeof(c_bool) == 1
