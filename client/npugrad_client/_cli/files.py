"""Calls in `.npz` files: operands and attributes in, results out.

An `.npz` file cannot store bfloat16. A key with the suffix `:bfloat16` stores the bits as uint16, also for
results; arrays that NumPy itself saved from ml_dtypes (void of 2 bytes) need `--dtype NAME=bfloat16`.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
import zlib
from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from npugrad.attributes import KINDS, Scalar
from npugrad.meta import TensorMeta
from npugrad.usage import instead
from npugrad_client._cli.terminal import FileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from npugrad.operator import AttrParam, OpRecord

_BF16 = ":bfloat16"
_META = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[-\d, ]*)\]")


def read_call(
    record: OpRecord, path: Path, dtypes: Sequence[str] = ()
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Reads operands and attributes of a call.

    Args:
        record: The operator.
        path: The `.npz` file; keys are operand names and, with one value or a list, attribute names.
        dtypes: ``NAME=bfloat16`` for operands whose 2-byte elements are bfloat16 bits.

    Raises:
        FileError: The file cannot be read, or contains a name that the operator does not have.
    """
    inputs, attrs = [p.name for p in record.inputs], {p.name: p.type for p in record.attrs}
    as_bf16 = {name for name, dtype in (_pair("--dtype", text) for text in dtypes) if _is_bf16(name, dtype)}
    _check_known("--dtype", as_bf16, inputs, record)
    found = _load(path)
    _check_known(str(path), [key.removesuffix(_BF16) for key in found], [*inputs, *attrs], record)
    operands: dict[str, npt.NDArray[Any]] = {}
    values: dict[str, Any] = {}
    for key, array in found.items():
        name = key.removesuffix(_BF16)
        if name in operands or name in values:
            raise FileError(f"{path}: has both {name} and {name}{_BF16}; keep one of them")
        if name in inputs or attrs[name] == "scalar":
            is_bf16 = key != name or name in as_bf16
            found_in = operands if name in inputs else values
            found_in[name] = _bits_to_bf16(name, array) if is_bf16 else _plain(name, array)
        else:
            values[name] = array.tolist()
    return operands, values


def _check_known(where: str, names: Iterable[str], known: Sequence[str], record: OpRecord) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        found = ", ".join(map(repr, unknown))
        raise FileError(f"{where}: found {found}; expected names of {record.name}: {', '.join(known)}")


def _load(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise FileError(f"{path}: no such file") from None
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise FileError(f"{path}: not a readable .npz file: {error}") from None
    except (AttributeError, TypeError):  # a .npy file is an array, which is no context manager
        raise FileError(
            f"{path}: holds a single array, and is not an .npz file as numpy.savez writes"
        ) from None


def _pair(option: str, text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise FileError(f"{option}: found {text!r}; expected NAME=VALUE")
    return name.strip(), value.strip()


def _is_bf16(name: str, dtype: str) -> bool:
    if dtype != "bfloat16":
        raise FileError(
            f"--dtype {name}={dtype}: expected bfloat16, the only type that .npz files cannot name"
        )
    return True


def _bits_to_bf16(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.itemsize != 2:
        raise FileError(f"{name}: found {array.dtype} elements; expected 2 bytes each to read as bfloat16")
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.asarray(array, order="C").view(ml_dtypes.bfloat16)


def _plain(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind == "V" and array.dtype.fields is None:
        raise FileError(
            f"{name}: raw {array.dtype.itemsize}-byte elements without a type; add "
            f"--dtype {name}=bfloat16 if they are bfloat16"
        )
    return array


def parse_attrs(record: OpRecord, texts: Sequence[str]) -> dict[str, Any]:
    """Attributes given as ``NAME=VALUE``; raises FileError for a name that the operator does not have."""
    known = {p.name: p for p in record.attrs}
    values: dict[str, Any] = {}
    for name, text in (_pair("--attr", text) for text in texts):
        if name not in known:
            raise FileError(f"--attr {name}: {record.name} has no such attribute; {instead(name, known)}")
        values[name] = _parse_attr(known[name], text)
    return values


def check_complete(record: OpRecord, attrs: Mapping[str, Any]) -> None:
    """Raises FileError, naming all at once, for attributes that are neither in the file nor given."""
    missing = [p.name for p in record.attrs if p.name not in attrs and not p.optional]
    if missing:
        names = ", ".join(missing)
        raise FileError(
            f"{record.name}: no value for {names}; set --attr {missing[0]}=VALUE or a key in the file"
        )


def _parse_attr(param: AttrParam, text: str) -> Any:
    """The value of an attribute given as text; documented names of modes stay text."""
    try:
        if text in param.choices:
            return text
        is_null = KINDS[param.type].is_pointer and text.lower() in ("null", "none")
        return None if is_null else _READ.get(param.type, int)(text)
    except (KeyError, ValueError):
        names = "".join(f" or {name}" for name in param.choices)
        expected = _FORMS.get(param.type, "an integer")
        raise FileError(f"--attr {param.name}={text}: expected {expected}{names}") from None


def _entries(text: str) -> list[str]:
    """Splits a list into its entries; an empty list needs brackets."""
    inner = text[1:-1].strip() if text.startswith("[") and text.endswith("]") else text
    return inner.split(",") if inner or inner == text else []


def _scalar(text: str) -> Scalar | bool | int | float:
    """Parses a number, with or without its type in front."""
    dtype, separator, value = text.rpartition(":")
    number = _BOOLEANS[value.lower()] if value.lower() in ("true", "false") else _number(value)
    try:
        return Scalar(dtype, number) if separator else number
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _string(text: str) -> str:
    """Returns the text itself, or the value of a JSON string."""
    if not text.startswith('"'):
        return text
    return cast("str", json.loads(text))  # it starts like a JSON string: it is one or an error


_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_READ: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: _BOOLEANS[text.lower()],
    "double": float,
    "float": float,
    "bool_array": lambda text: tuple(_BOOLEANS[t.strip().lower()] for t in _entries(text)),
    "int64_array": lambda text: tuple(map(int, _entries(text))),
    "float_array": lambda text: tuple(map(float, _entries(text))),
    "scalar": _scalar,
    "string": _string,
}
_FORMS = {
    "bool": "true or false",
    "double": "a number",
    "float": "a number",
    "bool_array": "bools such as true,false, or null",
    "int64_array": "integers such as 2,3, [] or null",
    "float_array": "numbers such as 0.5,2, [] or null",
    "scalar": "a number, with a type such as float32:0.5 or without, or null",
    "string": "text, in double quotes if it is empty or the word null, or has double quotes",
}


def parse_metas(texts: Sequence[str]) -> dict[str, TensorMeta | None]:
    """Metas given as ``NAME=DTYPE[SIZES]`` or ``NAME=null``.

    Raises:
        FileError: A text is malformed, or a dtype or size is invalid.
    """
    metas: dict[str, TensorMeta | None] = {}
    for text in texts:
        name, _, value = text.partition("=")
        match = _META.fullmatch(value.strip())
        if value.strip() in ("null", "none"):
            metas[name.strip()] = None
        elif match:
            metas[name.strip()] = _meta(name.strip(), match["dtype"], match["shape"])
        else:
            raise FileError(
                f"found {text!r}; expected NAME=DTYPE[SIZES], such as grad_out=float32[2,3,4], or NAME=null"
            )
    return metas


def _meta(name: str, dtype: str, shape: str) -> TensorMeta:
    try:
        return TensorMeta(dtype, [int(size) for size in shape.split(",") if size.strip()])
    except ValueError as error:  # also the contract's MalformedTensor
        raise FileError(f"{name}: {error}") from None


def results_path(path: Path) -> Path:
    """Adds the suffix to a path that NumPy would add; checked before a call, not after it.

    Raises:
        FileError: Results cannot be written there.
    """
    path = path if path.suffix == ".npz" else path.with_name(path.name + ".npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror}") from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise FileError(f"{path}: cannot be written: expected a file in a writable folder")
    return path


def write_results(path: Path, results: Mapping[str, npt.NDArray[Any] | None]) -> None:
    """Writes results to an `.npz` file, masked-out ones left out, bfloat16 as bits under `NAME:bfloat16`.

    Raises:
        FileError: The file cannot be written.
    """
    arrays: dict[str, Any] = {}
    for name, array in results.items():
        if array is None:
            continue
        is_bf16 = array.dtype == ml_dtypes.bfloat16
        arrays[name + _BF16 if is_bf16 else name] = array.view(np.uint16) if is_bf16 else array
    try:
        np.savez(path, **arrays)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror}") from None
