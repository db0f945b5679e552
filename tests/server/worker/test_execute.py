from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from npugrad import OPERATORS, Format, Product, TensorMeta, get_operator
from npugrad.call import CallOptions
from npugrad.errors import DeviceError, NpugradError, OperatorError, UnsafeLevels
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
from npugrad_server.worker.execute import Arenas
from npugrad_server.worker.execute import execute as execute_talk
from npugrad_server.worker.plans import WorkerPlan
from npugrad_server.worker.protocol import (
    AbandonCall,
    CallAnswer,
    CallDeferred,
    CallDone,
    CallFailed,
    Message,
    OpenDevice,
    RunCall,
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


@pytest.fixture
def arenas() -> Iterator[tuple[Arenas, InputArena]]:
    with closing(InputArena(SIZE)) as inputs, closing(OutputArena(SIZE)) as outputs:
        yield Arenas(OpenDevice("", "", 1, inputs.worker_fd, SIZE, outputs.fd, SIZE, 4096)), inputs


def order(**changes: Any) -> RunCall:
    record = get_operator("group_norm_backward")
    meta = record.build(with_gamma=False, output_mask=(True, False, True))
    outputs = record.infer(meta)
    offsets = [{name: 1024 * i for i, name in enumerate(names)} for names in (meta.inputs, outputs)]
    return replace(RunCall(1, record.name, meta, outputs, CallOptions(), offsets[0], offsets[1]), **changes)


def nobody_is_asked(message: Message) -> None:
    raise AssertionError(f"the pool was asked {message!r}")


def execute(backend: Recorder, arenas: Arenas, run: RunCall, stream: int) -> CallAnswer:
    return execute_talk(backend, arenas, WorkerCall(run, nobody_is_asked), stream)


def test_a_backend_gets_contiguous_operands_it_cannot_write_and_the_wanted_outputs(
    arenas: tuple[Arenas, InputArena],
) -> None:
    backend = Recorder()
    run = order()
    meta = run.meta.tensor("input")
    turned = replace_strides(run, "input", (1, 2, 12))
    values = np.arange(meta.size, dtype=np.float32)
    arenas[1].view(Region(0, SIZE), run.input_offsets["input"], meta.nbytes)[:] = values.tobytes()
    done = execute(backend, arenas[0], turned, stream=3)
    assert isinstance(done, CallDone)
    assert (done.copy_in_s > 1.0, done.run_s, done.copy_out_s, done.workspace_bytes) == (True, 2.0, 3.0, 4)
    assert done.backend == "recorder"
    (call,) = backend.calls
    assert call.stream == 3
    assert call.inputs["gamma"] is None
    assert sorted(call.outputs) == ["grad_beta", "grad_input"]
    assert all(array.flags.c_contiguous and array.flags.writeable for array in call.outputs.values())
    operand = call.inputs["input"]
    assert operand is not None
    assert operand.flags.c_contiguous
    np.testing.assert_array_equal(operand, values.reshape(4, 6, 2).transpose(2, 1, 0))
    assert call.meta.tensor("input").is_contiguous
    shared = call.inputs["grad_out"]
    assert shared is not None
    with pytest.raises(ValueError, match="read-only"):
        shared[0, 0, 0] = 1


def test_a_backend_that_takes_strides_gets_them_and_when_to_give_up(
    arenas: tuple[Arenas, InputArena],
) -> None:
    backend = Recorder(strided=True)
    deadline_s = time.monotonic() + 5
    turned = replace(replace_strides(order(), "input", (1, 2, 12)), deadline_s=deadline_s)
    assert isinstance(execute(backend, arenas[0], turned, 0), CallDone)
    (call,) = backend.calls
    operand = call.inputs["input"]
    assert operand is not None
    assert operand.strides == (4, 8, 48)
    assert call.meta.tensor("input").strides == (1, 2, 12)
    assert call.deadline_s == deadline_s
    # Before the pool ends the worker, ten seconds after the deadline.
    assert deadline_s + 5 < call.give_up_s < deadline_s + 10


@pytest.mark.parametrize("strided", [False, True])
def test_axes_that_a_format_moves_are_in_the_formulas_order_for_the_backend_alone(
    arenas: tuple[Arenas, InputArena], strided: bool
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
    meta = plain.meta.with_inputs(input=last)
    run = replace(plain, meta=meta, outputs={**plain.outputs, "grad_input": last})
    values = np.random.default_rng(0).standard_normal(last.size, np.float32).reshape(last.shape)
    for name in ("grad_out", "mean", "rstd", "input"):
        content = values if name == "input" else np.ones(plain.meta.tensor(name).size, np.float32)
        arenas[1].view(Region(0, SIZE), run.input_offsets[name], content.nbytes)[:] = content.tobytes()
    assert isinstance(execute(backend, arenas[0], run, 0), CallDone)
    (call,) = backend.calls
    operand, result = call.inputs["input"], call.outputs["grad_input"]
    assert operand is not None
    np.testing.assert_array_equal(operand, values.transpose(0, 2, 1))
    assert (call.meta.tensor("input").shape, operand.flags.c_contiguous) == (shape, not strided)
    assert result.flags.c_contiguous
    written = view(last, arenas[0].outputs, 1024)
    np.testing.assert_array_equal(written, result.transpose(0, 2, 1))
    assert result.any()


def test_a_call_without_a_deadline_has_the_limit_of_the_device(arenas: tuple[Arenas, InputArena]) -> None:
    backend = Recorder()
    execute(backend, arenas[0], order(), 0)
    (call,) = backend.calls
    assert call.deadline_s is None
    assert time.monotonic() + 500 < call.give_up_s <= time.monotonic() + 600


def test_a_lost_device_is_no_answer(arenas: tuple[Arenas, InputArena]) -> None:
    with pytest.raises(DeviceLost, match="words"):
        execute(Recorder(DeviceLost("words", 507015)), arenas[0], order(), 0)


def replace_strides(run: RunCall, name: str, strides: tuple[int, ...]) -> RunCall:
    meta = run.meta.tensor(name)
    changed = type(meta)(meta.dtype, meta.shape, strides=strides)
    return replace(run, meta=run.meta.with_inputs(**{name: changed}))


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
    arenas: tuple[Arenas, InputArena],
    error: Exception,
    reason: str,
    message: str,
    metadata: dict[str, str],
) -> None:
    failed = execute(Recorder(error), arenas[0], order(), stream=0)
    assert isinstance(failed, CallFailed)
    assert failed.reason == reason
    assert message in failed.message
    assert "12345" not in failed.message
    assert failed.metadata == metadata
    assert ("ZeroDivisionError" in failed.trace) == isinstance(error, ZeroDivisionError)


def test_a_call_of_which_nothing_is_wanted_is_done_whatever_its_operands(
    arenas: tuple[Arenas, InputArena],
) -> None:
    backend, run = Recorder(), order()
    operands = run.meta.with_inputs(input=None, mean=TensorMeta("hifloat8", (2, 3)))
    done = execute(backend, arenas[0], replace(run, meta=operands, outputs=dict.fromkeys(run.outputs)), 0)
    assert done == CallDone(1, 0.0, 0.0, 0.0, 0, "recorder")
    assert backend.calls == []


def test_an_operator_nobody_knows_is_an_answer(arenas: tuple[Arenas, InputArena]) -> None:
    failed = execute(Recorder(), arenas[0], order(operator="softmax"), stream=0)
    assert isinstance(failed, CallFailed)
    assert failed.reason == "UNKNOWN_OPERATOR"


def test_a_call_that_came_too_late_or_that_nobody_waits_for_reaches_no_backend(
    arenas: tuple[Arenas, InputArena],
) -> None:
    backend = Recorder()
    late = execute(backend, arenas[0], order(deadline_s=time.monotonic()), 0)
    assert isinstance(late, CallFailed)
    assert (late.reason, late.trace) == ("DEADLINE_EXCEEDED", "")
    assert "group_norm_backward: the deadline passed before the launch" in late.message
    talk = WorkerCall(order(), nobody_is_asked)
    talk.hear(AbandonCall(1))
    abandoned = execute_talk(backend, arenas[0], talk, 0)
    assert isinstance(abandoned, CallFailed)
    assert (abandoned.reason, abandoned.trace) == ("CANCELLED", "")
    assert backend.calls == []


def test_a_call_that_a_backend_gives_back_is_answered_with_what_it_needs(
    arenas: tuple[Arenas, InputArena],
) -> None:
    assert execute(Recorder(CallPostponed(12345)), arenas[0], order(), 0) == CallDeferred(1, 12345)
    abandoned = execute(Recorder(CallAbandoned()), arenas[0], order(), 0)
    assert isinstance(abandoned, CallFailed)
    assert abandoned.reason == "CANCELLED"


@pytest.mark.parametrize("strided", [False, True])
def test_an_operand_without_a_place_in_the_arena_is_contiguous_zeros(
    arenas: tuple[Arenas, InputArena], strided: bool
) -> None:
    backend, run = Recorder(strided=strided), order()
    offsets = {name: offset for name, offset in run.input_offsets.items() if name != "input"}
    assert isinstance(execute(backend, arenas[0], replace(run, input_offsets=offsets), 0), CallDone)
    operand = backend.calls[0].inputs["input"]
    assert operand is not None
    assert operand.shape == run.meta.tensor("input").shape
    assert operand.flags.c_contiguous
    assert not operand.flags.writeable
    assert not operand.any()


def test_zeros_beyond_all_addresses_are_a_lack_of_memory(arenas: tuple[Arenas, InputArena]) -> None:
    assert not any(arenas[0].zeros(100))
    assert len(arenas[0].zeros(10)) == 10
    for beyond in (2**60, 2**63):
        with pytest.raises(MemoryError):
            arenas[0].zeros(beyond)


def again(plan: WorkerPlan, **changes: Any) -> WorkerCall:
    return WorkerCall(
        RunAgain(2, 9, **{"input_offset": 0, "output_offset": 0, **changes}), nobody_is_asked, plan=plan
    )


@pytest.mark.parametrize("strided", [False, True])
def test_a_call_by_number_finds_its_tensors_where_it_says_and_keeps_the_rest(
    arenas: tuple[Arenas, InputArena], strided: bool
) -> None:
    backend = Recorder(strided=strided)
    first = replace_strides(order(options=CallOptions(verify=True)), "input", (1, 2, 12))
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
                content = np.asfortranarray(array).tobytes("A") if name == "input" else array.tobytes()
                arenas[1].view(Region(0, SIZE), at, array.nbytes)[:] = content
        answers.append(execute_talk(backend, arenas[0], talk, 1))
        results.append({name: array.copy() for name, array in backend.calls[-1].outputs.items()})
        arenas[1].view(Region(0, SIZE), 0, SIZE)[:] = bytes(SIZE)  # no later call may look there
    assert [type(answer) for answer in answers] == [CallDone] * 3
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
            written = arenas[0].outputs[base + first.output_offsets[name] :][: array.nbytes]
            assert bytes(written) == array.tobytes()


@pytest.mark.parametrize("changes", [{"input_offset": SIZE}, {"output_offset": SIZE - 64}])
def test_a_call_by_number_that_leaves_the_arena_is_an_error(
    arenas: tuple[Arenas, InputArena], changes: dict[str, int]
) -> None:
    backend, plan = Recorder(), WorkerPlan(order())
    failed = execute_talk(backend, arenas[0], again(plan, **changes), 0)
    assert isinstance(failed, CallFailed)
    assert (failed.reason, failed.call) == ("INTERNAL", 2)
    assert "bytes for float32" in failed.trace
    assert backend.calls == []
    assert isinstance(execute_talk(backend, arenas[0], again(plan), 0), CallDone)


def test_a_call_by_number_that_came_too_late_or_that_nobody_waits_for_reaches_no_backend(
    arenas: tuple[Arenas, InputArena],
) -> None:
    backend, plan = Recorder(), WorkerPlan(order())
    late = execute_talk(backend, arenas[0], again(plan, deadline_s=time.monotonic()), 0)
    assert isinstance(late, CallFailed)
    assert late.message == "group_norm_backward: the deadline passed before the launch"
    talk = again(plan)
    talk.hear(AbandonCall(2))
    abandoned = execute_talk(backend, arenas[0], talk, 0)
    assert isinstance(abandoned, CallFailed)
    assert (abandoned.call, abandoned.reason) == (2, "CANCELLED")
    assert backend.calls == []


def test_a_plan_whose_operator_nobody_knows_is_an_answer_each_time(arenas: tuple[Arenas, InputArena]) -> None:
    plan = WorkerPlan(order(operator="softmax"))
    for _ in range(2):
        failed = execute_talk(Recorder(), arenas[0], again(plan), 0)
        assert isinstance(failed, CallFailed)
        assert failed.reason == "UNKNOWN_OPERATOR"


def test_a_call_by_number_needs_a_plan() -> None:
    with pytest.raises(TypeError, match="found a call by number without a plan"):
        WorkerCall(RunAgain(1, 2, 3, 4), nobody_is_asked)
