"""Calls in files and on the command line: what is read, what is written, and what each mistake is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from npugrad import OPERATORS, TensorMeta
from npugrad.dtypes import DATA_DTYPES, DType
from npugrad_client._cli import files, terminal
from npugrad_client._cli.terminal import FileError

NORM = OPERATORS["group_norm_backward"]
GRID = OPERATORS["grid_sampler_2d_backward"]
FLOYD = OPERATORS["fused_floyd_attention_grad"]
BITS = np.arange(6, dtype=np.uint16).reshape(2, 3) * 9001


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "call.npz"


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


# ---------------------------------------------------------------------------------------------- operands


@pytest.mark.parametrize("dtype", [d for d in DATA_DTYPES if d is not DType.BFLOAT16], ids=str)
def test_every_type_is_read_as_it_was_written(path: Path, dtype: DType) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype.numpy)
    operands, attrs = files.read_call(NORM, save(path, grad_out=array))
    assert operands["grad_out"].dtype == dtype.numpy
    assert operands["grad_out"].tobytes() == array.tobytes()
    assert attrs == {}


@pytest.mark.parametrize(
    ("key", "array", "flags"),
    [
        ("grad_out:bfloat16", BITS, []),
        ("grad_out", BITS, ["grad_out=bfloat16"]),
        ("grad_out", BITS.view(ml_dtypes.bfloat16), ["grad_out=bfloat16"]),
        ("grad_out:bfloat16", BITS.view(ml_dtypes.bfloat16), []),
        ("grad_out:bfloat16", BITS.astype(">u2"), []),
        ("grad_out:bfloat16", np.asfortranarray(BITS), []),
    ],
    ids=["key", "flag", "saved as is", "both", "big-endian", "column-major"],
)
def test_bfloat16_is_read_in_each_way_bit_for_bit(path: Path, key: str, array: Any, flags: list[str]) -> None:
    operands, _ = files.read_call(NORM, save(path, **{key: array}), flags)
    assert operands["grad_out"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(operands["grad_out"].view(np.uint16), BITS)


def test_what_was_written_can_be_read(path: Path) -> None:
    results = {
        "grad_input": BITS.view(ml_dtypes.bfloat16),
        "grad_gamma": None,
        "grad_beta": np.arange(3, dtype=np.float16),
    }
    files.write_results(path, results)
    with np.load(path) as archive:
        assert sorted(archive.files) == ["grad_beta", "grad_input:bfloat16"]
        np.testing.assert_array_equal(archive["grad_input:bfloat16"], BITS)
        np.testing.assert_array_equal(archive["grad_beta"], np.arange(3))
        assert archive["grad_beta"].dtype == np.float16


def test_attributes_are_read_with_their_types(path: Path) -> None:
    save(
        path,
        interpolation_mode="nearest",
        padding_mode=np.int64(2),
        align_corners=True,
        output_mask=np.array([True, False]),
    )
    _, attrs = files.read_call(GRID, path)
    assert attrs == {
        "interpolation_mode": "nearest",
        "padding_mode": 2,
        "align_corners": True,
        "output_mask": [True, False],
    }


BAD_FILES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "unknown key": (
        {"dx": np.zeros(2)},
        [],
        "found 'dx'; expected names of group_norm_backward: grad_out",
    ),
    "unknown flag": ({}, ["dx=bfloat16"], "--dtype: found 'dx'; expected names of"),
    "twice": ({"input": BITS, "input:bfloat16": BITS}, [], "has both input and input:bfloat16"),
    "raw": (
        {"input": BITS.view("V2")},
        [],
        r"input: raw 2-byte elements without a type; .*--dtype input=bfloat16",
    ),
    "wide": (
        {"input:bfloat16": np.zeros(2, np.float32)},
        [],
        "input: found float32 elements; expected 2",
    ),
    "other type": ({}, ["input=float8"], "--dtype input=float8: expected bfloat16"),
    "no pair": ({}, ["input"], "--dtype: found 'input'; expected NAME=VALUE"),
    "objects": ({"input": np.array([{}])}, [], "not a readable .npz file: Object arrays"),
}


@pytest.mark.parametrize(("arrays", "flags", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_is_no_call_is_told(
    path: Path, arrays: dict[str, Any], flags: list[str], message: str
) -> None:
    with pytest.raises(FileError, match=message):
        files.read_call(NORM, save(path, **arrays), flags)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable .npz file"),
        (b"PK\x03\x04 not a zip", "not a readable .npz file"),
        (b"hello", "not a readable .npz file"),
        (None, "no such file"),
    ],
    ids=["empty", "broken", "text", "missing"],
)
def test_a_file_that_is_no_archive_is_told(path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileError, match=message):
        files.read_call(NORM, path)


def test_a_truncated_archive_is_told(path: Path) -> None:
    save(path, grad_out=np.zeros(10_000))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FileError, match=r"not a readable \.npz file"):
        files.read_call(NORM, path)


def test_a_folder_and_a_single_array_are_told(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"not a readable \.npz file"):
        files.read_call(NORM, tmp_path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(FileError, match=r"holds a single array, and is not an \.npz file"):
        files.read_call(NORM, tmp_path / "one.npy")


# -------------------------------------------------------------------------------------------- attributes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("output_mask=true,False", (True, False)),
        ("output_mask=1, 0", (True, False)),
        ("output_mask=null", None),
        ("align_corners=TRUE", True),
        ("align_corners=0", False),
        ("interpolation_mode=nearest", "nearest"),
        ("interpolation_mode=-1", -1),
        ("padding_mode = 2", 2),
    ],
)
def test_attributes_are_parsed_by_their_type(text: str, value: Any) -> None:
    assert files.parse_attrs(GRID, [text]) == {text.partition("=")[0].strip(): value}


def test_a_number_may_have_any_form() -> None:
    assert files.parse_attrs(FLOYD, ["scale_value=1e-1"]) == {"scale_value": 0.1}


def test_the_last_of_a_name_holds() -> None:
    assert files.parse_attrs(NORM, ["n=1", "n=2"]) == {"n": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nn=1", "--attr nn: grid_sampler_2d_backward has no such attribute; known are interpolation_mode, "),
        ("output_mask=yes", "--attr output_mask=yes: expected bools such as true,false, or null"),
        ("align_corners=2", "--attr align_corners=2: expected true or false"),
        ("interpolation_mode=bicubic", "expected an integer or bilinear or nearest"),
        ("interpolation_mode=1.5", "expected an integer"),
        ("interpolation_mode", "--attr: found 'interpolation_mode'; expected NAME=VALUE"),
    ],
)
def test_an_attribute_that_cannot_be_read_is_told(text: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        files.parse_attrs(GRID, [text])


# -------------------------------------------------------------------------------------------------- metas


@pytest.mark.parametrize(
    ("text", "meta"),
    [
        ("x=float32[2,3,4]", TensorMeta("float32", (2, 3, 4))),
        ("x=bfloat16[ 2, 3 ]", TensorMeta("bfloat16", (2, 3))),
        ("x=hifloat8[]", TensorMeta("hifloat8", ())),
        ("x=int64[0]", TensorMeta("int64", (0,))),
        ("x=null", None),
    ],
)
def test_metas_are_parsed(text: str, meta: TensorMeta | None) -> None:
    assert files.parse_metas([text]) == {"x": meta}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", r"found 'x'; expected NAME=DTYPE\[SIZES\], such as grad_out=float32\[2,3,4\], or NAME=null"),
        ("x=float32", "expected NAME=DTYPE"),
        ("x=float33[2]", "x: unknown dtype 'float33'; known are float32"),
        ("x=float32[-2]", r"x: found shape \[-2\]; expected sizes of 0 or more"),
        ("x=float32[4611686018427387904,4]", "x: found shape .*, above 2\\^63 - 1 bytes"),
        ("x=float32[2-3]", "x: invalid literal"),
    ],
)
def test_a_meta_that_cannot_be_read_is_told(text: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        files.parse_metas([text])


# ------------------------------------------------------------------------------------------ where to write


@pytest.mark.parametrize(("given", "used"), [("a", "a.npz"), ("a.npz", "a.npz"), ("a.b", "a.b.npz")])
def test_results_go_where_they_are_said_to_be(tmp_path: Path, given: str, used: str) -> None:
    path = files.results_path(tmp_path / "new" / "folder" / given)
    assert path == tmp_path / "new" / "folder" / used
    files.write_results(path, {"x": np.zeros(1)})
    assert path.exists()


def test_a_place_that_cannot_be_written_is_told_before_the_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"file/out\.npz: cannot be written"):
        files.results_path(tmp_path / "file" / "out.npz")
    (tmp_path / "out.npz").mkdir()
    with pytest.raises(FileError, match=r"out\.npz: cannot be written"):
        files.results_path(tmp_path / "out.npz")
    with pytest.raises(FileError, match=r"out\.npz: cannot be written: Is a directory"):
        terminal.write_text(tmp_path / "out.npz", "")
