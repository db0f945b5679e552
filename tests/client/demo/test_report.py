"""The demo calls a wrong result wrong, and says so."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from tests.edge_calls import IMAGES, grid_call
from tests.fix_server import ServerProcess

from npugrad.coordinates import CoordinateRule
from npugrad.workloads import Filled
from npugrad_client import Client, GridSampler2DBackwardResult
from npugrad_client.demo._cases import Case, official_cases
from npugrad_client.demo._report import run_case, tables

OFFICIAL = {case.record.name: case for case in official_cases()}
GRID, NORM = OFFICIAL["grid_sampler_2d_backward"], OFFICIAL["group_norm_backward"]


def _spoilt(case: Case) -> Case:
    """The same call, with one expected official value moved."""

    def make() -> Filled:
        inputs = case.make()
        name, values = next(iter(inputs.expected.items()))
        moved = values.copy()
        moved.flat[0] += 1.0
        return replace(inputs, expected={**inputs.expected, name: moved})

    return replace(case, make=make)


@pytest.mark.parametrize("case", [GRID, NORM], ids=["grid_sampler", "group_norm"])
def test_official_example_comes_out_right(server: ServerProcess, case: Case) -> None:
    with Client(server.address) as client:
        row = run_case(client, case)
    assert row.is_right
    assert row.official is True
    assert row.used <= 1
    assert row.info.device == "cpu:0"


def test_wrong_official_value_makes_the_row_wrong(server: ServerProcess) -> None:
    with Client(server.address) as client:
        row = run_case(client, _spoilt(GRID))
    assert row.official is False
    assert not row.is_right
    page = StringIO()
    for table in tables([row]):
        Console(width=200, file=page).print(table)
    text = page.getvalue()
    assert "WRONG" in text
    assert "OFFICIAL VALUES DIFFER" in text


def test_a_result_on_pixel_edges_is_right_and_says_by_which_rule(server: ServerProcess) -> None:
    call = grid_call(IMAGES, "identity", 3, padding_mode=0)
    results = call.by_rule(CoordinateRule.FLOAT64)

    class OnAnotherDevice(Client):
        def grid_sampler_2d_backward(self, **operands: Any) -> GridSampler2DBackwardResult:
            answer = super().grid_sampler_2d_backward(**operands)
            return replace(answer, input_grad=results["input_grad"], grid_grad=results["grid_grad"])

    with OnAnotherDevice(server.address) as client:
        row = run_case(client, replace(GRID, make=lambda: Filled(call.inputs, call.meta.attrs)))
    assert row.is_right
    page = StringIO()
    for table in tables([row]):
        Console(width=300, file=page).print(table)
    assert "right, by coordinate rule float64" in page.getvalue()


def test_wrong_result_makes_the_row_wrong(server: ServerProcess) -> None:
    """A reference that sees other data than the service is what a wrong device looks like."""

    class Altered(Client):
        def grid_sampler_2d_backward(self, **call: Any) -> GridSampler2DBackwardResult:
            answer = super().grid_sampler_2d_backward(**call)
            answer.input_grad.flat[3] += 1e-2
            return answer

    with Altered(server.address) as client:
        row = run_case(client, replace(GRID, make=lambda: replace(GRID.make(), expected={})))
    assert row.official is None
    assert row.used > 1
    assert not row.is_right
