from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tests.operators import MSDA

from npugrad import OPERATORS, Format, Product, TensorMeta, get_operator
from npugrad.call import CallOptions
from npugrad.errors import DeviceError, DeviceOutOfMemory, NpugradError, OperatorError, UnsafeLevels
from npugrad.layout import view
from npugrad.operator import OpRecord, TensorParam
from npugrad_server.backends.base import (
    Backend,
    CallAbandoned,
    CallPostponed,
    DeviceCall,
    DeviceLost,
    Timings,
    unheard,
)
from npugrad_server.devices import DeviceName
from npugrad_server.pool.arena import InputArena, OutputArena
from npugrad_server.pool.regions import Region
from npugrad_server.worker.call import WorkerCall
from npugrad_server.worker.execute import Arenas, execute
from npugrad_server.worker.plans import WorkerPlan
from npugrad_server.worker.protocol import (
    AbandonCall,
    CallAnswer,
    CallDeferred,
    CallDone,
    CallFailed,
    Message,
    NeedWorkspace,
    OpenDevice,
    RunCall,
    WorkspaceGranted,
    WorkspaceRefused,
)
from npugrad_server.worker.run_again import RunAgain

SIZE = 1 << 16


class Recorder(Backend):
    """A backend that looks at the call and does what the test wants."""

    records: Mapping[str, OpRecord] = OPERATORS
    name, description = "recorder", ""

    def __init__(self, error: Exception | None = None, *, strided: bool = False) -> None:
        self.error = error
        self.strided = strided
        self.calls: list[DeviceCall] = []

    def open(
        self,
        device: DeviceName,
        product: Product,
        streams: int,
        on_stage: Callable[[str], None] = unheard,
    ) -> None: ...

    def run(self, record: OpRecord, call: DeviceCall) -> Timings:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        record.reference(call.inputs, call.meta.attrs, call.outputs)
        return Timings(copy_in_s=1.0, run_s=2.0, copy_out_s=3.0, workspace_bytes=4)

    def close(self) -> None: ...


def order(**changes: Any) -> RunCall:
    record = get_operator("group_norm_backward")
    meta = record.build(with_gamma=False, output_mask=(True, False, True))
    outputs = record.infer(meta)
    offsets = [{name: 1024 * i for i, name in enumerate(names)} for names in (meta.inputs, outputs)]
    return replace(RunCall(1, record.name, meta, outputs, CallOptions(), offsets[0], offsets[1]), **changes)


def with_strides(run: RunCall, name: str, strides: tuple[int, ...]) -> RunCall:
    meta = run.meta.tensor(name)
    changed = TensorMeta(meta.dtype, meta.shape, strides=strides)
    return replace(run, meta=run.meta.with_inputs(**{name: changed}))


def nobody_is_asked(message: Message) -> None:
    raise AssertionError(f"the pool was asked {message!r}")


@dataclass
class Bench:
    """Arenas of a worker, and the operands as the pool writes them."""

    arenas: Arenas
    inputs: InputArena

    def execute(self, backend: Recorder, run: RunCall | WorkerCall, stream: int = 0) -> CallAnswer:
        call = WorkerCall(run, nobody_is_asked) if isinstance(run, RunCall) else run
        return execute(backend, self.arenas, call, stream)

    def done(self, backend: Recorder, run: RunCall | WorkerCall, stream: int = 0) -> CallDone:
        answer = self.execute(backend, run, stream)
        assert isinstance(answer, CallDone), answer
        return answer

    def failed(self, backend: Recorder, run: RunCall | WorkerCall) -> CallFailed:
        answer = self.execute(backend, run)
        assert isinstance(answer, CallFailed), answer
        return answer

    def put(self, offset: int, array: np.ndarray) -> None:
        content = array.tobytes("A")
        self.inputs.view(Region(0, SIZE), offset, len(content))[:] = content


@pytest.fixture
def bench() -> Iterator[Bench]:
    with closing(InputArena(SIZE)) as inputs, closing(OutputArena(SIZE)) as outputs:
        opening = OpenDevice("", "", 1, inputs.worker_fd, SIZE, outputs.fd, SIZE, 4096)
        yield Bench(Arenas(opening), inputs)


def again(plan: WorkerPlan, **changes: Any) -> WorkerCall:
    """A call by number."""
    facts = {"input_offset": 0, "output_offset": 0, **changes}
    return WorkerCall(RunAgain(2, 9, **facts), nobody_is_asked, plan=plan)


def either(is_known: bool, **changes: Any) -> WorkerCall:
    """A call brought whole, or one by number of a plan that was."""
    if not is_known:
        return WorkerCall(order(**changes), nobody_is_asked)
    later = {name: changes.pop(name) for name in ("deadline_s",) if name in changes}
    return again(WorkerPlan(order(**changes)), **later)


def input_of(backend: Recorder) -> np.ndarray:
    operand = backend.calls[-1].inputs["input"]
    assert operand is not None
    return operand


# ---------------------------------------------------------------------------------- what a backend is given


def test_a_backend_gets_contiguous_operands_it_cannot_write_and_the_wanted_outputs(bench: Bench) -> None:
    backend, run = Recorder(), order()
    meta = run.meta.tensor("input")
    values = np.arange(meta.size, dtype=np.float32)
    bench.put(run.input_offsets["input"], values)
    done = bench.done(backend, with_strides(run, "input", (1, 2, 12)), stream=3)
    assert (done.copy_in_s > 1.0, done.run_s, done.copy_out_s, done.workspace_bytes) == (True, 2.0, 3.0, 4)
    assert done.backend == "recorder"
    (call,) = backend.calls
    assert call.stream == 3
    assert call.inputs["gamma"] is None
    assert sorted(call.outputs) == ["grad_beta", "grad_input"]
    assert all(array.flags.c_contiguous and array.flags.writeable for array in call.outputs.values())
    operand = input_of(backend)
    assert operand.flags.c_contiguous
    np.testing.assert_array_equal(operand, values.reshape(4, 6, 2).transpose(2, 1, 0))
    assert call.meta.tensor("input").is_contiguous
    shared = call.inputs["grad_out"]
    assert shared is not None
    with pytest.raises(ValueError, match="read-only"):
        shared[0, 0, 0] = 1
    assert call.deadline_s is None
    assert time.monotonic() + 500 < call.give_up_s <= time.monotonic() + 600


def test_a_backend_that_takes_strides_gets_them_and_when_to_give_up(bench: Bench) -> None:
    backend, deadline_s = Recorder(strided=True), time.monotonic() + 50
    bench.done(backend, replace(with_strides(order(), "input", (1, 2, 12)), deadline_s=deadline_s))
    (call,) = backend.calls
    assert input_of(backend).strides == (4, 8, 48)
    assert call.meta.tensor("input").strides == (1, 2, 12)
    assert call.deadline_s == deadline_s
    # Before the pool ends the worker, ten seconds after the deadline.
    assert deadline_s + 5 < call.give_up_s < deadline_s + 10


@pytest.mark.parametrize("strided", [False, True])
def test_axes_that_a_format_moves_are_in_the_formulas_order_for_the_backend_alone(
    bench: Bench, strided: bool
) -> None:
    def axes(meta: TensorMeta) -> tuple[int, ...]:
        return (0, 2, 1) if meta.format is Format.NHWC else (0, 1, 2)

    plain = order(output_offsets={"grad_input": 1024, "grad_beta": 0, "grad_gamma": 0})
    record = get_operator(plain.operator)
    moved = ("input", "grad_input")
    params = [
        replace(p, axes=axes) if isinstance(p, TensorParam) and p.name in moved else p for p in record.params
    ]
    backend = Recorder(strided=strided)
    backend.records = {record.name: replace(record, params=tuple(params))}
    shape = plain.meta.tensor("input").shape
    last = TensorMeta("float32", (shape[0], shape[2], shape[1]), Format.NHWC)
    run = replace(
        plain, meta=plain.meta.with_inputs(input=last), outputs={**plain.outputs, "grad_input": last}
    )
    values = np.random.default_rng(0).standard_normal(last.size, np.float32).reshape(last.shape)
    for name in ("grad_out", "mean", "rstd", "input"):
        content = values if name == "input" else np.ones(plain.meta.tensor(name).size, np.float32)
        bench.put(run.input_offsets[name], content)
    bench.done(backend, run)
    (call,) = backend.calls
    operand, result = input_of(backend), call.outputs["grad_input"]
    np.testing.assert_array_equal(operand, values.transpose(0, 2, 1))
    assert (call.meta.tensor("input").shape, operand.flags.c_contiguous) == (shape, not strided)
    assert result.flags.c_contiguous
    np.testing.assert_array_equal(view(last, bench.arenas.outputs, 1024), result.transpose(0, 2, 1))
    assert result.any()


@pytest.mark.parametrize("strided", [False, True])
def test_an_operand_without_a_place_in_the_arena_is_contiguous_zeros(bench: Bench, strided: bool) -> None:
    backend, run = Recorder(strided=strided), order()
    offsets = {name: offset for name, offset in run.input_offsets.items() if name != "input"}
    bench.done(backend, replace(run, input_offsets=offsets))
    operand = input_of(backend)
    assert operand.shape == run.meta.tensor("input").shape
    assert (operand.flags.c_contiguous, operand.flags.writeable) == (True, False)
    assert not operand.any()
    # Zeros beyond all addresses are a lack of memory.
    assert [len(bench.arenas.zeros(nbytes)) for nbytes in (100, 10)] == [100, 10]
    for beyond in (2**60, 2**63):
        with pytest.raises(MemoryError):
            bench.arenas.zeros(beyond)


@pytest.mark.parametrize("strided", [False, True])
def test_a_call_by_number_finds_its_tensors_where_it_says_and_keeps_the_rest(
    bench: Bench, strided: bool
) -> None:
    backend = Recorder(strided=strided)
    first = with_strides(order(options=CallOptions(verify=True)), "input", (1, 2, 12))
    first = replace(first, input_offsets={name: at + 512 for name, at in first.input_offsets.items()})
    plan = WorkerPlan(first)
    values = get_operator(first.operator).make_inputs(first.meta, np.random.default_rng(0))
    answers, results = [], []
    for talk, base in (
        (WorkerCall(first, nobody_is_asked, plan=plan), 512),
        (again(plan, input_offset=8192, output_offset=16384, label="x", priority=-3), 8192),
        (again(plan, input_offset=4096, output_offset=20480, deadline_s=time.monotonic() + 50), 4096),
    ):
        for name, array in values.items():
            if array is not None:
                at = base + first.input_offsets[name] - 512
                bench.put(at, np.asfortranarray(array) if name == "input" else array)
        answers.append(bench.done(backend, talk, 1))
        results.append({name: array.copy() for name, array in backend.calls[-1].outputs.items()})
        bench.put(0, np.zeros(SIZE, np.uint8))  # no later call may look there
    assert [answer.call for answer in answers] == [1, 2, 2]
    whole, other, third = backend.calls
    assert other.meta is third.meta is whole.meta
    assert other.memo is third.memo is whole.memo
    assert [call.options for call in backend.calls] == [
        CallOptions(verify=True),
        CallOptions(verify=True, label="x", priority=-3),
        CallOptions(verify=True),
    ]
    assert (other.deadline_s, third.deadline_s is None) == (None, False)
    for name, array in results[0].items():
        assert array.any()
        for base, found in ((0, results[0]), (16384, results[1]), (20480, results[2])):
            assert found[name].tobytes() == array.tobytes()
            written = bench.arenas.outputs[base + first.output_offsets[name] :][: array.nbytes]
            assert bytes(written) == array.tobytes()


@pytest.mark.parametrize("strided", [False, True])
def test_what_the_record_checks_is_copied_first_and_no_backend_gets_what_it_refuses(
    bench: Bench, strided: bool
) -> None:
    meta = MSDA.build(nq=9)
    turned = TensorMeta("int32", (2, 2), strides=(1, 2))
    offsets = [{name: 4096 * i for i, name in enumerate(names)} for names in (meta.inputs, MSDA.infer(meta))]
    meta, outputs = meta.with_inputs(spatial_shape=turned), MSDA.infer(meta)
    run = RunCall(1, MSDA.name, meta, outputs, CallOptions(), offsets[0], offsets[1])
    for name, array in MSDA.make_inputs(meta, np.random.default_rng(0)).items():
        assert array is not None
        bench.put(offsets[0][name], np.asfortranarray(array) if name == "spatial_shape" else array)
    backend, plan = Recorder(strided=strided), WorkerPlan(run)
    bench.done(backend, WorkerCall(run, nobody_is_asked, plan=plan))
    (call,) = backend.calls
    before = {name: np.array(call.inputs[name]) for name in MSDA.checked_operands}
    assert all(call.meta.tensor(name).is_contiguous for name in before)
    bench.put(offsets[0]["level_start_index"], np.array([0, 13], np.int32))
    for name, array in before.items():
        found = call.inputs[name]
        assert found is not None
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, array)
    failed = bench.failed(backend, again(plan))
    assert (failed.reason, failed.metadata["operand"]) == ("UNSAFE_LEVELS", "spatial_shape")
    assert failed.message == (
        f"{MSDA.name}: spatial_shape, level_start_index: level 1: found an end beyond the keys; expected "
        "start + height*width of at most num_keys = 16"
    )
    assert len(backend.calls) == 1


# --------------------------------------------------------------------------------------- other answers


def test_a_lost_device_is_no_answer(bench: Bench) -> None:
    with pytest.raises(DeviceLost, match="words"):
        bench.execute(Recorder(DeviceLost("words", 507015)), order())


def _numpys_own_memory_error() -> MemoryError:
    try:
        np.empty(2**60, np.uint8)
    except MemoryError as error:
        return error
    raise AssertionError("this machine has an exbibyte")


@pytest.mark.parametrize(
    ("error", "reason", "message", "metadata"),
    [
        (MemoryError("12345"), "DEVICE_OUT_OF_MEMORY", "no memory for the call now", {}),
        (_numpys_own_memory_error(), "DEVICE_OUT_OF_MEMORY", "no memory for the call now", {}),
        (ZeroDivisionError("12345"), "INTERNAL", "failed with ZeroDivisionError", {}),
        (
            UnsafeLevels("words", operand="spatial_shape"),
            "UNSAFE_LEVELS",
            "words",
            {"source": "device", "operand": "spatial_shape"},
        ),
        (
            DeviceError("words", code=561003, source="device"),
            "ACLNN_ERR_INNER_FIND_KERNEL_ERROR",
            "words",
            {"source": "device", "code": "561003"},
        ),
        (
            OperatorError("words", reason="DETERMINISM_UNSUPPORTED", constraint="x.y"),
            "DETERMINISM_UNSUPPORTED",
            "words",
            {"source": "device", "constraint": "x.y"},
        ),
        (NpugradError("words"), "INTERNAL", "words", {"source": "device"}),
    ],
)
def test_whatever_goes_wrong_is_an_answer_without_tensor_contents(
    bench: Bench, error: Exception, reason: str, message: str, metadata: dict[str, str]
) -> None:
    failed = bench.failed(Recorder(error), order())
    assert (failed.reason, failed.metadata) == (reason, metadata)
    assert message in failed.message
    assert "12345" not in failed.message
    assert ("ZeroDivisionError" in failed.trace) == isinstance(error, ZeroDivisionError)


def test_a_call_of_which_nothing_is_wanted_is_done_whatever_its_operands(bench: Bench) -> None:
    backend, run = Recorder(), order()
    operands = run.meta.with_inputs(input=None, mean=TensorMeta("hifloat8", (2, 3)))
    unwanted = replace(run, meta=operands, outputs=dict.fromkeys(run.outputs))
    assert bench.execute(backend, unwanted) == CallDone(1, 0.0, 0.0, 0.0, 0, "recorder")
    assert backend.calls == []


def test_a_call_that_a_backend_gives_back_is_answered_with_what_it_needs(bench: Bench) -> None:
    assert bench.execute(Recorder(CallPostponed(12345)), order()) == CallDeferred(1, 12345)
    assert bench.failed(Recorder(CallAbandoned()), order()).reason == "CANCELLED"


@pytest.mark.parametrize("is_known", [False, True])
def test_a_call_that_no_backend_should_have_is_answered_before(bench: Bench, is_known: bool) -> None:
    """It came too late, nobody waits for it, it has no operator, or its tensors lie beyond the arena."""
    backend = Recorder()
    late = bench.failed(backend, either(is_known, deadline_s=time.monotonic()))
    assert (late.reason, late.trace) == ("DEADLINE_EXCEEDED", "")
    assert late.message == "group_norm_backward: the deadline passed before the launch"
    either(is_known, deadline_s=time.monotonic() + 60).check_wanted()
    left = either(is_known)
    left.hear(AbandonCall(2))
    abandoned = bench.failed(backend, left)
    assert (abandoned.call, abandoned.reason, abandoned.trace) == (1 + is_known, "CANCELLED", "")
    for _ in range(2):
        assert bench.failed(backend, either(is_known, operator="softmax")).reason == "UNKNOWN_OPERATOR"
    beyond = [WorkerCall(order(output_offsets=dict.fromkeys(order().outputs, SIZE - 8)), nobody_is_asked)]
    if is_known:
        changes = {"input_offset": SIZE}, {"output_offset": SIZE - 64}
        beyond = [again(WorkerPlan(order()), **each) for each in changes]
    for call in beyond:
        failed = bench.failed(backend, call)
        assert (failed.reason, failed.call) == ("INTERNAL", 1 + is_known)
        assert failed.message == "group_norm_backward: the backend failed with ValueError"
        assert "bytes for float32" in failed.trace
    if is_known:
        with pytest.raises(TypeError, match="found a call by number without a plan"):
            WorkerCall(RunAgain(1, 2, 3, 4), nobody_is_asked)
    assert backend.calls == []
    bench.done(backend, either(is_known))


# --------------------------------------------------------------------------------------------- workspace


def test_what_was_granted_is_asked_for_once_and_an_answer_that_does_not_come_postpones_the_call() -> None:
    asked: list[Message] = []
    call = WorkerCall(order(workspace_bytes=50), asked.append, timeout_s=30)
    call.hear(WorkspaceGranted(1))
    for nbytes in (100, 100, 60):  # as a second try after the device had no memory
        call.reserve_workspace(nbytes)
    assert asked == [NeedWorkspace(1, 100)]
    call.hear(WorkspaceRefused(1, True, 5000))
    with pytest.raises(DeviceOutOfMemory) as caught:
        call.reserve_workspace(6000)
    assert asked[1:] == [NeedWorkspace(1, 6000)]
    assert str(caught.value) == (
        "group_norm_backward: found 6000 bytes of workspace needed by the device's operator; expected at "
        "most 5000 in addition to its tensors"
    )
    assert (caught.value.reason, caught.value.source) == ("DEVICE_OUT_OF_MEMORY", "device")
    late, start = WorkerCall(order(workspace_bytes=0), asked.append, timeout_s=0.05), time.monotonic()
    with pytest.raises(CallPostponed) as postponed:
        late.reserve_workspace(100)
    assert postponed.value.workspace_bytes == 100
    assert time.monotonic() - start >= 0.05
    WorkerCall(order(workspace_bytes=None), nobody_is_asked).reserve_workspace(100)
