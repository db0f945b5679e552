"""`verify` over a real connection, where sampling points lie on the edges of pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.harness import eventually
from tests.edge_calls import ATTENTION, IMAGES, SAMPLERS, EdgeCall, attention_call, grid_call
from tests.fix_server import ServerProcess, run_server

from npugrad.coordinates import CoordinateRule
from npugrad.operator import OpRecord
from npugrad.v1 import server_pb2
from npugrad_client import Client
from npugrad_client.errors import DeviceError

BY_LABEL = """
import numpy as np

from npugrad.coordinates import CoordinateRule
from npugrad_server.backends.base import Timings
from npugrad_server.backends.cpu import CpuBackend

run = CpuBackend.run


def by_label(self, record, call):
    label = call.options.label
    if label == "shifted":
        name = "grid" if "grid" in call.inputs else "location"
        moved = {**call.inputs, name: call.inputs[name] - np.float32(1e-4)}
        record.reference(moved, call.meta.attrs, call.outputs)
    elif label:
        record.references_by_rule[CoordinateRule(label)](call.inputs, call.meta.attrs, call.outputs)
    else:
        return run(self, record, call)
    return Timings()


CpuBackend.run = by_label
"""
"""A worker that computes by the rule that the label of the call names, or moves all points left."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("edges")
    (folder / "sitecustomize.py").write_text(BY_LABEL)
    with run_server(folder / "server.log", env={"PYTHONPATH": str(folder)}) as started:
        yield started


@pytest.fixture
def client(running: ServerProcess) -> Iterator[Client]:
    """A client of the server, once its device is ready: wrong results put it in quarantine for a while."""
    eventually(
        lambda: running.info().devices[0].state == server_pb2.DEVICE_STATE_READY,
        "the device is ready",
        running,
    )
    with Client(running.address) as made:
        yield made


def verified(client: Client, call: EdgeCall, label: str) -> str:
    method: Any = getattr(client, call.record.name)
    told: str = method(**call.inputs, **call.meta.attrs, verify=True, label=label).info.verification
    return told


def identity(record: OpRecord) -> EdgeCall:
    """How a spatial transformer starts, and a Deformable-DETR encoder, smaller."""
    if record is ATTENTION:
        return attention_call("identity", scale=0.5)
    return grid_call(record, "identity", 3, scale=0.6)


@pytest.mark.parametrize("record", SAMPLERS, ids=lambda record: record.name)
def test_points_on_edges_are_accepted_by_whatever_rule_and_refused_on_the_wrong_side(
    client: Client, record: OpRecord
) -> None:
    call = identity(record)
    assert verified(client, call, "") == ""
    for rule in call.rules:
        told = verified(client, call, rule.value)
        assert told == "" or told.startswith("by coordinate rule "), told
    assert verified(client, call, CoordinateRule.FLOAT64.value) == "by coordinate rule float64"
    with pytest.raises(DeviceError, match="no coordinate rule explains it") as caught:
        verified(client, call, "shifted")
    assert caught.value.reason == "VERIFICATION_FAILED"


def test_the_rule_of_the_vendor_is_told(client: Client) -> None:
    call = grid_call(IMAGES, "identity", 3, padding_mode=0)  # of a size at which it matters
    told = verified(client, call, "vendor-a2")
    assert told == "by coordinate rule torch-unfused = vendor-a2 = vendor-950"
