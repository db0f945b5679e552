"""Names and C types of every CANN function that is called, and nothing else.

Source: CANN's public headers `acl/acl_base.h`, `acl/acl_rt.h`, `acl/acl.h`, `aclnn/acl_meta.h` and the
`aclnnop/*.h` of the operators. Every function has its types here: without them, its pointers would be cut to
32 bits.
"""

from __future__ import annotations

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
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npugrad.operator import TensorParam

if TYPE_CHECKING:
    from npugrad.attributes import AttrType
    from npugrad.operator import OpRecord

SIMULATION_MARKER = "cann_sim_marker"
"""A function that only the simulated CANN of the tests exports, from the library of `RUNTIME`."""


@dataclass(frozen=True)
class Symbol:
    """One C function.

    Attributes:
        name: As exported.
        result: ctypes type of its result; `c_int32` is an error code.
        arguments: ctypes types of its arguments.
        since: Oldest CANN release that has it.
        optional: Whether the NPU path works without it.
    """

    name: str
    result: Any
    arguments: tuple[Any, ...]
    since: str = "8.0"
    optional: bool = False


_CODE = c_int32
_STREAM = _ADDRESS = _HANDLE = c_void_p

RUNTIME: tuple[Symbol, ...] = (
    Symbol("aclInit", _CODE, (c_char_p,)),
    Symbol("aclFinalize", _CODE, ()),
    Symbol("aclrtGetDeviceCount", _CODE, (POINTER(c_uint32),)),
    Symbol("aclrtGetSocName", c_char_p, ()),
    Symbol("aclGetRecentErrMsg", c_char_p, ()),
    Symbol("aclrtMemcpyAsync", _CODE, (_ADDRESS, c_size_t, _ADDRESS, c_size_t, c_int, _STREAM)),
    Symbol("aclrtMemsetAsync", _CODE, (_ADDRESS, c_size_t, c_int32, c_size_t, _STREAM)),
    Symbol("aclrtSynchronizeStreamWithTimeout", _CODE, (_STREAM, c_int32)),
    Symbol("aclrtGetMemInfo", _CODE, (c_int, POINTER(c_size_t), POINTER(c_size_t))),
    Symbol("aclrtCtxSetSysParamOpt", _CODE, (c_int, c_int64)),
    Symbol("aclrtSetSysParamOpt", _CODE, (c_int, c_int64), optional=True),
    Symbol("aclrtCreateEventExWithFlag", _CODE, (POINTER(_HANDLE), c_uint32), optional=True),
    Symbol("aclrtRecordEvent", _CODE, (_HANDLE, _STREAM), optional=True),
    Symbol("aclrtEventElapsedTime", _CODE, (POINTER(c_float), _HANDLE, _HANDLE), optional=True),
    Symbol("aclrtDestroyEvent", _CODE, (_HANDLE,), optional=True),
    Symbol("aclrtPeekAtLastError", _CODE, (c_int,), optional=True),
    Symbol("aclrtGetLastError", _CODE, (c_int,), optional=True),
    Symbol("aclsysGetVersionStr", _CODE, (c_char_p, c_char_p), since="8.5", optional=True),
    Symbol("aclsysGetCANNVersion", _CODE, (c_int, c_char_p), since="8.1", optional=True),
)
"""Functions of libascendcl: devices, copies, streams, events, errors."""

DEVICE: tuple[Symbol, ...] = (
    Symbol("aclrtSetDevice", _CODE, (c_int32,)),
    Symbol("aclrtResetDevice", _CODE, (c_int32,)),
    Symbol("aclrtCreateStream", _CODE, (POINTER(_HANDLE),)),
    Symbol("aclrtDestroyStream", _CODE, (_HANDLE,)),
    Symbol("aclrtMalloc", _CODE, (POINTER(_ADDRESS), c_size_t, c_int)),
    Symbol("aclrtFree", _CODE, (_ADDRESS,)),
    Symbol("aclrtMallocHost", _CODE, (POINTER(_ADDRESS), c_size_t)),
    Symbol("aclrtFreeHost", _CODE, (_ADDRESS,)),
)
"""Functions of libascendcl that torch_npu calls for all other code; only `bare` does without it."""

TENSORS: tuple[Symbol, ...] = (
    Symbol(
        "aclCreateTensor",
        _HANDLE,
        (
            POINTER(c_int64),  # view shape
            c_uint64,
            c_int,  # aclDataType
            POINTER(c_int64),  # strides, in elements
            c_int64,  # offset, in elements
            c_int,  # aclFormat
            POINTER(c_int64),  # storage shape
            c_uint64,
            _ADDRESS,
        ),
    ),
    Symbol("aclDestroyTensor", _CODE, (_HANDLE,)),
    Symbol("aclCreateBoolArray", _HANDLE, (POINTER(c_bool), c_uint64)),
    Symbol("aclDestroyBoolArray", _CODE, (_HANDLE,)),
    Symbol("aclCreateIntArray", _HANDLE, (POINTER(c_int64), c_uint64), optional=True),
    Symbol("aclDestroyIntArray", _CODE, (_HANDLE,), optional=True),
    Symbol("aclCreateFloatArray", _HANDLE, (POINTER(c_float), c_uint64), optional=True),
    Symbol("aclDestroyFloatArray", _CODE, (_HANDLE,), optional=True),
    Symbol("aclCreateScalar", _HANDLE, (c_void_p, c_int), optional=True),  # the value, its aclDataType
    Symbol("aclDestroyScalar", _CODE, (_HANDLE,), optional=True),
    Symbol("aclDestroyAclOpExecutor", _CODE, (_HANDLE,)),
)
"""Functions of libnnopbase: descriptions of tensors, arrays and scalars, and executors."""

_ATTRIBUTES: dict[AttrType, Any] = {
    "int64": c_int64,
    "int32": c_int,
    "int8": c_int8,
    "uint64": c_uint64,
    "double": c_double,
    "float": c_float,
    "bool": c_bool,
    "int64_array": _HANDLE,
    "float_array": _HANDLE,
    "bool_array": _HANDLE,
    "scalar": _HANDLE,
    "string": c_char_p,
}


def operator_symbols(record: OpRecord) -> tuple[Symbol, Symbol]:
    """Both phases of an operator, from the order of its parameters."""
    own = (_HANDLE if isinstance(p, TensorParam) else _ATTRIBUTES[p.type] for p in record.params)
    plan = Symbol(
        f"{record.aclnn_name}GetWorkspaceSize",
        _CODE,
        (*own, POINTER(c_uint64), POINTER(_HANDLE)),
        since=record.min_cann,
    )
    launch = Symbol(record.aclnn_name, _CODE, (_ADDRESS, c_uint64, _HANDLE, _STREAM), since=record.min_cann)
    return plan, launch
