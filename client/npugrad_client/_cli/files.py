"""Calls in `.npz` files: operands and attributes in, results out.

An `.npz` file has no bfloat16. A key with the suffix `:bfloat16` holds the bits as uint16, and so do the
results; arrays that NumPy itself saved from ml_dtypes (void of 2 bytes) need `--dtype NAME=bfloat16`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from npugrad.spec import OpSpec

_BF16 = ":bfloat16"


class FileError(Exception):
    """A file or an argument does not describe a call; the message says found and expected."""


def read_call(
    spec: OpSpec, path: Path, attrs: Sequence[str] = (), dtypes: Sequence[str] = ()
) -> tuple[dict[str, npt.NDArray[Any] | None], dict[str, Any]]:
    """Reads operands and attributes of a call.

    Args:
        spec: The operator.
        path: The `.npz` file; keys are operand names and, as scalars or 1-D bools, attribute names.
        attrs: ``NAME=VALUE``, above what the file says; lists as ``true,false,true``, null as ``null``.
        dtypes: ``NAME=bfloat16`` for operands whose 2-byte elements are bfloat16 bits.

    Raises:
        FileError: The file cannot be read, or holds a name that the operator does not have.
    """
    found = _load(path)
    as_bf16 = {name for name, dtype in map(_pair, dtypes) if _is_bf16(name, dtype)}
    known_inputs, known_attrs = [p.name for p in spec.inputs], [p.name for p in spec.attrs]
    operands: dict[str, npt.NDArray[Any] | None] = {}
    values: dict[str, Any] = {}
    for key, array in found.items():
        name = key.removesuffix(_BF16)
        if name in known_inputs:
            operands[name] = (
                _bits_to_bf16(name, array) if key != name or name in as_bf16 else _plain(name, array)
            )
        elif name in known_attrs:
            values[name] = array.tolist()
        else:
            known = ", ".join([*known_inputs, *known_attrs])
            raise FileError(f"{path}: found {key!r}; expected names of {spec.name}: {known}")
    return operands, values | parse_attrs(spec, attrs)


def parse_attrs(spec: OpSpec, texts: Sequence[str]) -> dict[str, Any]:
    """Attributes given as ``NAME=VALUE``; raises FileError for a name that the operator does not have."""
    known = {p.name: p.type for p in spec.attrs}
    values: dict[str, Any] = {}
    for name, text in map(_pair, texts):
        if name not in known:
            raise FileError(f"--attr {name}: unknown; {spec.name} has {', '.join(known) or 'no attributes'}")
        values[name] = parse_attr(known[name], name, text)
    return values


def _load(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, AttributeError) as error:
        raise FileError(f"{path}: found no readable .npz file ({error})") from None


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise FileError(f"found {text!r}; expected NAME=VALUE")
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
    return array.view(ml_dtypes.bfloat16)


def _plain(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind == "V":
        raise FileError(
            f"{name}: found raw {array.dtype.itemsize}-byte elements; add --dtype {name}=bfloat16"
        )
    return array


def parse_attr(kind: str, name: str, text: str) -> Any:
    """The value of an attribute given as text.

    Args:
        kind: Type of the attribute in its record.
        name: Named in the error.
        text: The text; documented names of modes stay text.

    Raises:
        FileError: It cannot be read as that type.
    """
    booleans = {"true": True, "1": True, "false": False, "0": False}
    lowered = text.lower()
    try:
        if kind == "bool_array":
            return (
                None
                if lowered in ("null", "none")
                else tuple(booleans[t.strip()] for t in lowered.split(","))
            )
        if kind == "bool":
            return booleans[lowered]
        if kind == "double":
            return float(text)
    except (KeyError, ValueError):
        raise FileError(f"--attr {name}={text}: expected {_FORMS[kind]}") from None
    return int(text) if text.lstrip("+-").isdigit() else text


_FORMS = {"bool_array": "such as true,false or null", "bool": "true or false", "double": "a number"}


def write_results(path: Path, results: Mapping[str, npt.NDArray[Any] | None]) -> None:
    """Writes results to an `.npz` file, masked-out ones left out, bfloat16 as bits under `NAME:bfloat16`."""
    arrays: dict[str, Any] = {}
    for name, array in results.items():
        if array is None:
            continue
        is_bf16 = array.dtype == ml_dtypes.bfloat16
        arrays[name + _BF16 if is_bf16 else name] = array.view(np.uint16) if is_bf16 else array
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
