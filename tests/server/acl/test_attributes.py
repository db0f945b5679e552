"""Attributes of every kind through the launcher, on the simulated CANN."""

from __future__ import annotations

import ctypes
import time
from ctypes import POINTER, c_uint64, c_void_p
from typing import Any

import numpy as np
import pytest
from tests.cann_sim.operators import Arguments, compute, make_arrays
from tests.cann_sim.report import HOST_OBJECTS
from tests.cann_sim.runtime import Runtime
from tests.derived import told
from tests.server.acl.conftest import Rig
from tests.synthetic.record import SYNTHETIC, seen

from npugrad.attributes import KINDS
from npugrad.layout import view
from npugrad.meta import CallMeta
from npugrad.products import Product
from npugrad.validation import validate_call
from npugrad_server.acl.runtime import AclError
from npugrad_server.acl.symbols import TENSORS, operator_symbols

pytestmark = pytest.mark.npu_sim

CALL = SYNTHETIC.build()
ARRAYS = ("IntArray", "FloatArray", "BoolArray", "Scalar")


def run(rig: Rig, call: CallMeta) -> dict[str, Any]:
    tensors = rig.tensors(SYNTHETIC, call)
    with rig.launcher.plan(SYNTHETIC, call.attrs, tensors) as plan:
        plan.launch(rig.upload(bytes(max(plan.workspace_bytes, 1))), rig.stream)
    assert rig.host_objects() == [0, 0, 0]
    rig.runtime.wait(rig.stream, time.monotonic() + 30)
    return {
        name: view(meta, rig.sim.download(tensors[name].address, meta.nbytes))  # type: ignore[union-attr]
        for name, meta in SYNTHETIC.infer(call).items()
        if meta is not None
    }


def test_the_operator_sees_every_byte_of_every_attribute(rig: Rig) -> None:
    outputs = set[str]()
    for sample in SYNTHETIC.samples(Product.ATLAS_A2):
        call = sample.call
        found = run(rig, call)
        outputs |= found.keys()
        with told(sample.name):
            if "seen" in found:
                assert found["seen"].astype(np.uint8).tobytes() == seen(call.attrs)
            if "scaled" in found:
                inputs = SYNTHETIC.make_inputs(call, np.random.default_rng(1))
                expected = np.zeros(found["scaled"].shape)
                SYNTHETIC.reference(inputs, call.attrs, {"scaled": expected})
                np.testing.assert_allclose(found["scaled"], expected, rtol=2e-3)
    assert outputs == {"seen", "scaled"}


def test_the_simulator_agrees_when_called_directly(runtime: Runtime) -> None:
    for sample in SYNTHETIC.samples(Product.ATLAS_A2):
        found = compute(runtime, SYNTHETIC, sample.call, make_arrays(SYNTHETIC, sample.call))
        if "seen" in found:
            assert found["seen"].astype(np.uint8).tobytes() == seen(sample.call.attrs), sample.name


def test_the_simulator_refuses_what_the_record_refuses(runtime: Runtime) -> None:
    block = runtime.malloc(4096)
    for constraint in SYNTHETIC.constraints:
        found = set()
        for sample in SYNTHETIC.samples(Product.ATLAS_A2):
            broken = constraint.violate(sample.call)
            if broken is not None:
                assert validate_call(SYNTHETIC, broken).status == constraint.code
                found.add(Arguments(runtime, SYNTHETIC, broken, block, sample.call).status())
        assert found == {constraint.vendor_code}, constraint.id
    runtime.call("aclrtFree", block)


FAULTS = [
    ("aclCreateIntArray:1:null", "sizes"),
    ("aclCreateIntArray:2:null", "sizes_optional"),
    ("aclCreateFloatArray:2:null", "weights_optional"),
    ("aclCreateBoolArray:2:null", "mask_optional"),
    ("aclCreateScalar:1:null", "alpha"),
    ("aclCreateScalar:2:null", "alpha_optional"),
    ("aclnnSyntheticGetWorkspaceSize:1:561101", ""),
    ("aclnnSynthetic:1:561000", ""),
]


@pytest.mark.parametrize(("plan", "subject"), FAULTS)
def test_nothing_is_left_whatever_fails(rig: Rig, plan: str, subject: str) -> None:
    tensors = rig.tensors(SYNTHETIC, CALL)
    rig.sim.set_plan(plan)
    with (
        pytest.raises(AclError) as caught,
        rig.launcher.plan(SYNTHETIC, CALL.attrs, tensors) as planned,
    ):
        planned.launch(rig.upload(bytes(planned.workspace_bytes)), rig.stream)
    assert (caught.value.function, caught.value.subject) == (plan.partition(":")[0], subject)
    assert rig.host_objects() == [0, 0, 0]
    run(rig, CALL)


def test_each_is_made_as_often_as_it_is_destroyed(rig: Rig) -> None:
    names = [f"calls.acl{act}{name}" for name in ARRAYS for act in ("Create", "Destroy")]
    before = [rig.sim.counter(name) for name in names]
    with rig.launcher.plan(SYNTHETIC, CALL.attrs, rig.tensors(SYNTHETIC, CALL)):
        assert rig.host_objects()[1] == 8
    assert [rig.sim.counter(name) - was for name, was in zip(names, before, strict=True)] == [2] * len(names)


def test_the_counters_of_the_host_are_those_of_the_handles() -> None:
    kinds = {kind.c_type.removesuffix("*") for kind in KINDS.values() if kind.c_type.startswith("acl")}
    made = {s.name.removeprefix("aclCreate") for s in TENSORS if s.name.startswith("aclCreate")}
    assert {f"acl{name}" for name in made} == {*kinds, "aclTensor"}
    assert len(HOST_OBJECTS) == len(made) + 1


def test_phase_1_has_the_types_of_its_signature() -> None:
    """`TENSOR int64_t int int8_t uint64_t double float bool POINTERS char* char* TENSORS`: synthetic.cpp."""
    plan, _ = operator_symbols(SYNTHETIC)
    integers = [ctypes.c_int64, ctypes.c_int, ctypes.c_int8, c_uint64]
    plain = [*integers, ctypes.c_double, ctypes.c_float, ctypes.c_bool]
    own = [c_void_p, *plain, *[c_void_p] * 8, ctypes.c_char_p, ctypes.c_char_p, c_void_p, c_void_p]
    assert list(plan.arguments) == [*own, POINTER(c_uint64), POINTER(c_void_p)]
