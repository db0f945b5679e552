"""Runs a call of an operator's record on the simulator, with operands made, copied and freed one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from ctypes import byref, c_bool, c_float, c_int64, c_uint64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.cann_sim.runtime import D2H, H2D, Runtime

from npugrad.attributes import Scalar
from npugrad.coordinates import CoordinateRule
from npugrad.errors import MalformedTensor
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import AttrParam, OpRecord, TensorParam
from npugrad.tolerance import compare

Array = npt.NDArray[Any]
Relayout = Callable[[TensorMeta], TensorMeta]


_ARRAYS = {
    "bool_array": (c_bool, "aclDestroyBoolArray"),
    "int64_array": (c_int64, "aclDestroyIntArray"),
    "float_array": (c_float, "aclDestroyFloatArray"),
}
"""Type of the entries of each kind of array, and what destroys one."""


def as_it_is(meta: TensorMeta) -> TensorMeta:
    """An output in row-major order."""
    return meta


def transposed(meta: TensorMeta) -> TensorMeta:
    """An output with its axes in memory the other way round, an element late and with gaps of one element."""
    strides, step = [], 2
    for size in meta.shape:
        strides.append(step)
        step *= max(size, 1)
    return TensorMeta(meta.dtype, meta.shape, meta.format, tuple(strides), 1)


class Arguments:
    """What phase 1 takes of a call, every tensor at one and the same address.

    That is how software asks for the size of a workspace: phase 1 reads no memory.

    Args:
        runtime: The simulator, with a device set.
        record: The operator.
        call: Metas and attributes.
        block: Any device address that is a multiple of 32.
        legal: A call whose outputs stand for those of an illegal one that has none.
    """

    def __init__(
        self,
        runtime: Runtime,
        record: OpRecord,
        call: CallMeta,
        block: int = 0,
        legal: CallMeta | None = None,
    ) -> None:
        self._runtime = runtime
        self._record = record
        self._call = call
        self._block = block
        self._legal = legal
        self.handles = ExitStack()  # tensors, arrays and scalars: not needed once phase 2 has returned

    def values(self) -> list[Any]:
        """The arguments in C order."""
        return [self._argument(param) for param in self._record.params]

    def status(self) -> int:
        """What phase 1 alone returns."""
        runtime, op = self._runtime, self._record.aclnn_name
        size, executor = c_uint64(), c_void_p()
        with self.handles:
            status = runtime.status(f"{op}GetWorkspaceSize", *self.values(), byref(size), byref(executor))
        if executor.value:  # some interfaces make one before they check
            runtime.call("aclDestroyAclOpExecutor", executor)
        return status

    def _argument(self, param: TensorParam | AttrParam) -> Any:
        if isinstance(param, AttrParam):
            return self._attribute(param)
        meta = self._call.inputs[param.name] if param.role == "input" else self._output_meta(param)
        if meta is None:
            return None
        if param.device_view and not self._has_illegal_shape(param, meta):
            # Packed: two axes of any strides do not always make one.
            meta = TensorMeta(meta.dtype, param.device_view(meta), meta.format)
        return self._tensor(*self._place(param, meta))

    def _has_illegal_shape(self, param: TensorParam, meta: TensorMeta) -> bool:
        legal = None if self._legal is None else self._legal.inputs[param.name]
        return legal is not None and meta.shape != legal.shape

    def _attribute(self, param: AttrParam) -> Any:
        value: Any = self._call.attrs[param.name]
        if isinstance(value, str):
            return value.encode()
        if param.type in _ARRAYS and value is not None:
            entry, destroy = _ARRAYS[param.type]
            handle = self._runtime.array(entry, value)
        elif isinstance(value, Scalar):
            handle, destroy = self._runtime.scalar(value.dtype.acl, value.content), "aclDestroyScalar"
        else:
            return value
        self.handles.callback(self._runtime.call, destroy, handle)
        return handle

    def _output_meta(self, param: TensorParam) -> TensorMeta | None:
        if self._call.is_null_output(param.name):
            return None
        declared = self._call.declared(param.name)
        if declared or (self._is_masked(param) and param.when_masked == "null"):
            return declared
        try:
            return self._record.output_metas(self._call)[param.name]
        except (KeyError, ValueError, MalformedTensor):  # an operand that the outputs follow from is missing
            if self._legal is None:
                raise
            return self._record.output_metas(self._legal)[param.name]

    def _is_masked(self, param: TensorParam) -> bool:
        if param.masked_by is None:
            return False
        mask = self._call.attrs["output_mask"]
        return not (isinstance(mask, tuple) and len(mask) > param.masked_by and mask[param.masked_by])

    def _place(self, param: TensorParam, meta: TensorMeta) -> tuple[TensorMeta, int]:
        return meta, self._block

    def _tensor(self, meta: TensorMeta, address: int) -> int:
        elements = meta.content_bytes // max(meta.dtype.itemsize, 1)
        handle = self._runtime.tensor(
            meta.dtype.acl,
            meta.shape,
            address,
            strides=meta.element_strides,
            offset=meta.storage_offset,
            form=meta.format.acl,
            storage=(elements,),
        )
        self.handles.callback(self._runtime.call, "aclDestroyTensor", handle)
        return handle


class Launch(Arguments):
    """One call with its data: operands on the device, both phases, and what comes back.

    Args:
        runtime: The simulator, with a device set.
        record: The operator.
        call: Metas and attributes.
        arrays: Operands by name, as `record.make_inputs` gives them.
        relayout: How outputs lie in memory.
        fill: Byte that outputs are filled with before.
    """

    def __init__(
        self,
        runtime: Runtime,
        record: OpRecord,
        call: CallMeta,
        arrays: Mapping[str, Array | None],
        relayout: Relayout = as_it_is,
        fill: int = 0,
    ) -> None:
        super().__init__(runtime, record, call)
        self._fill = fill
        self._arrays = arrays
        self._relayout = relayout
        self._results: dict[str, tuple[TensorMeta, int]] = {}
        self.memory = ExitStack()  # needed until the stream is done

    def run(self, stream: int) -> dict[str, Array]:
        """Both phases and the copies back; everything is freed, whatever happens."""
        runtime, op = self._runtime, self._record.aclnn_name
        with self.memory:
            with self.handles:
                size, executor = runtime.plan(op, *self.values())
                workspace = self._allocate(size) if size else None
                runtime.call(op, workspace, size, executor, stream)
            runtime.call("aclrtSynchronizeStream", stream)
            return {name: self._fetch(meta, address) for name, (meta, address) in self._results.items()}

    def _place(self, param: TensorParam, meta: TensorMeta) -> tuple[TensorMeta, int]:
        if param.role == "output":
            meta = self._relayout(meta)
        content = np.full(max(meta.content_bytes, 1), self._fill, np.uint8)
        array = self._arrays.get(param.name)
        if param.role == "input" and array is not None and meta.size:
            _view(meta, content)[...] = array.reshape(meta.shape)
        address = self._allocate(content.nbytes)
        self._runtime.call("aclrtMemcpy", address, content.nbytes, content.ctypes.data, content.nbytes, H2D)
        if param.role == "output" and not self._is_masked(param):
            self._results[param.name] = (meta, address)
        return meta, address

    def _allocate(self, size: int) -> int:
        address = self._runtime.malloc(size)
        self.memory.callback(self._runtime.call, "aclrtFree", address)
        return address

    def _fetch(self, meta: TensorMeta, address: int) -> Array:
        content = np.empty(max(meta.content_bytes, 1), np.uint8)
        self._runtime.call("aclrtMemcpy", content.ctypes.data, content.nbytes, address, content.nbytes, D2H)
        return _view(meta, content).copy()


def make_arrays(record: OpRecord, call: CallMeta, seed: int = 0) -> dict[str, Array | None]:
    """Data for a call, as its metas let it be: a stride of 0 repeats an element."""
    made = record.make_inputs(call, np.random.default_rng(seed))
    arrays: dict[str, Array | None] = {}
    for name, meta in call.inputs.items():
        arrays[name] = None
        if meta is not None:
            array = arrays[name] = _view(meta, np.zeros(max(meta.content_bytes, 1), np.uint8))
            array[...] = made[name]
    return arrays


def compute(
    runtime: Runtime,
    record: OpRecord,
    call: CallMeta,
    arrays: Mapping[str, Array | None],
    relayout: Relayout = as_it_is,
) -> dict[str, Array]:
    """The wanted outputs of a call, from a stream of its own."""
    stream = runtime.stream()
    try:
        return Launch(runtime, record, call, arrays, relayout).run(stream)
    finally:
        runtime.call("aclrtDestroyStream", stream)


def check(
    runtime: Runtime,
    record: OpRecord,
    call: CallMeta,
    arrays: dict[str, Array | None],
    relayout: Relayout = as_it_is,
) -> None:
    """Compares every wanted output with the reference; a call that writes nothing must leave the zeros.

    Coordinates are those of Atlas A2, whose kernels of attention have the rule that is the service's.
    """
    found = compute(runtime, record, call, arrays, relayout)
    golden = {name: np.zeros(output.shape) for name, output in found.items()}
    record.references_by_rule.get(CoordinateRule.VENDOR_A2, record.reference)(arrays, call.attrs, golden)
    for name, output in found.items():
        comparison = compare(golden[name], output, record.extra_tolerance(arrays, call.attrs, name))
        assert comparison.ok, f"{name}: {comparison}"


def _view(meta: TensorMeta, content: npt.NDArray[np.uint8]) -> Array:
    itemsize = meta.dtype.itemsize
    strides = tuple(step * itemsize for step in meta.element_strides)
    return np.ndarray(meta.shape, meta.dtype.numpy, content.data, meta.storage_offset * itemsize, strides)
