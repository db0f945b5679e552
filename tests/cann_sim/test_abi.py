"""Functions, types and numbers of the simulator are those of the headers that torch_npu ships."""

from __future__ import annotations

import re
import subprocess
from ctypes import c_bool, c_double, c_float, c_int8, c_int32, c_int64, c_uint64
from pathlib import Path
from typing import Any

import pytest
from tests.cann_sim.build import DEFAULT_CANN, SOURCES, Installation, vendor_functions
from tests.cann_sim.stubs import pages_of, phases

from npugrad.ops import OPERATORS
from npugrad_server.acl.symbols import operator_symbols

pytestmark = pytest.mark.npu_sim

# A constant of acl_types.h and the vendor's name for it.
CONSTANTS = {
    "kSuccess": "ACL_SUCCESS",
    "kInvalidParam": "ACL_ERROR_INVALID_PARAM",
    "kRepeatInitialize": "ACL_ERROR_REPEAT_INITIALIZE",
    "kRtParamInvalid": "ACL_ERROR_RT_PARAM_INVALID",
    "kRtInvalidDevice": "ACL_ERROR_RT_INVALID_DEVICEID",
    "kRtSysParamOptNotSet": "ACL_ERROR_RT_SYSPARAMOPT_NOT_SET",
    "kRtMemoryAllocation": "ACL_ERROR_RT_MEMORY_ALLOCATION",
    "kHostToHost": "ACL_MEMCPY_HOST_TO_HOST",
    "kHostToDevice": "ACL_MEMCPY_HOST_TO_DEVICE",
    "kDeviceToHost": "ACL_MEMCPY_DEVICE_TO_HOST",
    "kDeviceToDevice": "ACL_MEMCPY_DEVICE_TO_DEVICE",
    "kDefault": "ACL_MEMCPY_DEFAULT",
    "kDdr": "ACL_DDR_MEM",
    "kHbm": "ACL_HBM_MEM",
    "kStreamComplete": "ACL_STREAM_STATUS_COMPLETE",
    "kStreamNotReady": "ACL_STREAM_STATUS_NOT_READY",
    "kRecordedNotReady": "ACL_EVENT_RECORDED_STATUS_NOT_READY",
    "kRecordedComplete": "ACL_EVENT_RECORDED_STATUS_COMPLETE",
    "kWaitComplete": "ACL_EVENT_WAIT_STATUS_COMPLETE",
    "kWaitNotReady": "ACL_EVENT_WAIT_STATUS_NOT_READY",
    "kDeterministic": "ACL_OPT_DETERMINISTIC",
    "kEventTimeLine": "ACL_EVENT_TIME_LINE",
    "kStopOnFailure": "ACL_STOP_ON_FAILURE",
    "kPackageDriver": "ACL_PKG_NAME_DRIVER",
}
# Codes that appear as bare numbers elsewhere in the sources.
CODES = {
    107002: "ACL_ERROR_RT_CONTEXT_NULL",
    107003: "ACL_ERROR_RT_STREAM_CONTEXT",
    107006: "ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID",
    107007: "ACL_ERROR_RT_EVENT_TIMESTAMP_REVERSAL",
    507046: "ACL_ERROR_RT_STREAM_SYNC_TIMEOUT",
    507047: "ACL_ERROR_RT_EVENT_SYNC_TIMEOUT",
}
DTYPES = {
    "kFloat": "ACL_FLOAT",
    "kFloat16": "ACL_FLOAT16",
    "kInt8": "ACL_INT8",
    "kInt16": "ACL_INT16",
    "kInt32": "ACL_INT32",
    "kUint8": "ACL_UINT8",
    "kUint16": "ACL_UINT16",
    "kUint32": "ACL_UINT32",
    "kInt64": "ACL_INT64",
    "kUint64": "ACL_UINT64",
    "kDouble": "ACL_DOUBLE",
    "kBool": "ACL_BOOL",
    "kBfloat16": "ACL_BF16",
}
FORMATS = {
    "kNchw": "ACL_FORMAT_NCHW",
    "kNhwc": "ACL_FORMAT_NHWC",
    "kNd": "ACL_FORMAT_ND",
    "kNdhwc": "ACL_FORMAT_NDHWC",
    "kFractalNz": "ACL_FORMAT_FRACTAL_NZ",
    "kNcdhw": "ACL_FORMAT_NCDHW",
    "kNc": "ACL_FORMAT_NC",
    "kNcl": "ACL_FORMAT_NCL",
}
# What travels in the same register in the same way.
SCALARS = {
    "size_t": "u64",
    "uint64_t": "u64",
    "int64_t": "i64",
    "int32_t": "i32",
    "int": "i32",
    "aclError": "i32",
    "uint32_t": "u32",
    "void": "void",
    **dict.fromkeys(("aclrtStream", "aclrtEvent", "aclrtContext"), "pointer"),
}
HANDED: dict[Any, str] = {
    **{c_int32: "i32", c_int64: "i64", c_uint64: "u64", c_int8: "int8_t"},
    **{c_bool: "bool", c_double: "double", c_float: "float"},
}


def test_numbers_are_the_vendors(torch_npu: Path, tmp_path: Path) -> None:
    names = [f"acl::{ours}" for ours in CONSTANTS]
    vendor = {**CONSTANTS, **DTYPES, **FORMATS}
    ours = [*names, *(f"cann_sim::{name}" for name in (*DTYPES, *FORMATS)), *map(str, CODES)]
    checks = [
        f'static_assert(static_cast<long long>({mine}) == static_cast<long long>({theirs}), "{mine}");'
        for mine, theirs in zip(ours, [*vendor.values(), *CODES.values()], strict=True)
    ]
    checks.append('static_assert(sizeof(acl::PackageVersion) == sizeof(aclCANNPackageVersion), "version");')
    source = tmp_path / "numbers.cpp"
    source.write_text(
        '#include "acl/acl.h"\n#include "ascendcl/acl_types.h"\n#include "nnopbase/tensor.h"\n'
        + "\n".join(checks)
    )
    command = [
        "g++",
        "-std=c++17",
        "-fsyntax-only",
        f"-I{torch_npu / 'include'}",
        f"-I{SOURCES}",
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def passing(declaration: str) -> str:
    """How a parameter or result travels: pointers alike, enumerations as int."""
    text = re.sub(r"\b(const|enum|struct)\b", "", declaration).strip()
    if "*" in text or "[" in text:
        return "pointer"
    kind = text.split()[0] if text else "void"
    return SCALARS.get(kind, "i32" if kind.startswith("acl") else kind)


def prototypes(text: str) -> dict[str, tuple[str, ...]]:
    """Result and parameters of every function declared or defined in a text."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    found = {}
    for result, name, parameters in re.findall(
        r"((?:const )?\w+\s*\**)\s*\b(acl\w+)\(([^()]*)\)\s*[;{]", text, flags=re.DOTALL
    ):
        kinds = [passing(part) for part in parameters.split(",")]
        found[name] = (passing(result), *(kind for kind in kinds if kind != "void"))
    return found


def test_handles_are_made_and_destroyed_as_torch_npu_does(torch_npu: Path) -> None:
    """CANN's header of these, aclnn/acl_meta.h, does not come with torch_npu; its copies of the types do."""
    folder = torch_npu / "include" / "third_party" / "op-plugin" / "op_plugin" / "utils"
    text = (folder / "op_api_common_base.h").read_text()
    theirs = prototypes(re.sub(r"typedef ([\w ]+\*?) ?\(\*_(acl\w+)\)\(", r"\1 \2(", text))
    ours = prototypes((SOURCES / "nnopbase" / "tensor.cpp").read_text())
    assert len(ours) == 10
    assert {name: theirs[name] for name in ours} == ours


def test_functions_take_what_the_vendors_take(torch_npu: Path) -> None:
    headers = [path for path in (torch_npu / "include" / "acl").glob("*.h") if path.name != "acl_rt_api.h"]
    theirs = prototypes("".join(path.read_text() for path in headers))  # that one has C++ overloads
    ours = prototypes("".join(path.read_text() for path in (SOURCES / "ascendcl").glob("*.cpp")))
    assert len(ours) > 60
    known = {name: theirs[name] for name in ours if name in theirs}
    assert set(ours) - set(known) <= {"aclAppLog"}  # its dots are no prototype for this parser
    assert {name: ours[name] for name in known} == known


def test_generated_operators_take_what_the_launcher_hands_down() -> None:
    pages = pages_of(DEFAULT_CANN)
    made = prototypes("".join(map(phases, pages.values())))
    assert len(made) == 2 * len(pages)
    for record in OPERATORS.values():
        for symbol in operator_symbols(record):
            handed = (HANDED.get(each, "pointer") for each in (symbol.result, *symbol.arguments))
            assert made[symbol.name] == tuple(handed), symbol.name


def test_what_torch_npu_links_is_there_or_a_trap(cann_sim: Installation, torch_npu: Path) -> None:
    wanted = vendor_functions(torch_npu)
    assert len(wanted) > 80
    listing = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--format=just-symbols", *cann_sim.libraries.glob("*.so")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert wanted <= set(listing.stdout.split())


def test_nothing_to_warn_about(cann_sim: Installation, tmp_path: Path) -> None:
    assert cann_sim.warnings == ""
    for source in SOURCES.glob("*/*.cpp"):
        assert len(source.read_text().splitlines()) < 400, source
