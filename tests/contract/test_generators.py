"""The generators: frozen bits, any part by itself, distributions that are what they say, sane refusals."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npugrad import generators
from npugrad.dtypes import DType, dtype_from_name
from npugrad.generators import GENERATORS, TILE_WORDS, Draw, fill, words

SIZE = 70_001
"""Elements of a golden content: several tiles, and an odd end."""
DATA = [dtype for dtype in DType if dtype.has_data]
FLOATS = [dtype_from_name(name) for name in ("float32", "float16", "bfloat16", "float64")]

GOLDEN = (
    ("uniform", "float32", "602cdf988129d73ffbabbfe6e92eabc067cba4ae3ddf301c5a324711c022c5c7"),
    ("uniform", "float16", "f56814257d5d8e3eb31f6e7875f2177e2731cc569e2260a54e121c03cd239310"),
    ("uniform", "bfloat16", "c56051d65ee02bd1c88f0b58c5ade0f1c284728c0f90421e22896be58ed35d26"),
    ("uniform", "float64", "42518b8bbdfe109f1e8c2de5ae490947c9bcfa4455e8e50ddf438202ade53967"),
    ("normal", "float32", "b9a9757f6a4d3484e01c6fe37a768ab0c3ecad4ae69d61e62e9a3fe2f1636f83"),
    ("normal", "float16", "ddb9451012d45d41c8c7e0871c35daf3d7ae85126eb370407ec11c2216acbcd0"),
    ("normal", "bfloat16", "5b0ad6b345d91959624e05aebce4e1b444e594bb866d91af330df4c9f0c945e8"),
    ("normal", "float64", "caac6f46721c114d2e358aee12cb0f7af101a0ad01d543949f2e2bb3fa341df2"),
    ("integers", "float32", "29c8d2db776b78a8122f89ca03fa2e1686d0b9c110bdc0dbda0eafc54a83dbe8"),
    ("integers", "float16", "ec1f43824adcbe669c15de809ebd30fab3a390aae4586178f8e09863f25e79dd"),
    ("integers", "bfloat16", "c356eb66b23b6d721dee5dd81419ea52f65903795d105247a402f897cc5a3576"),
    ("integers", "float64", "d6e46d8fcec3632794efb29018848f60b17563a4c529b6c57ba8eb6965d055b4"),
    ("integers", "int8 uint8", "73365d07b02677c688f7c1c505bedd2ffe924a49619c1b55793a043a3333134d"),
    ("integers", "int16 uint16", "41e516a469a89d4596b0ed6972249c2345bc6aa6f16b877ea59e6ad9e9b633ef"),
    ("integers", "int32 uint32", "0b2957300cbf8addb9aba578fca096f0bc29f4d885ea86973d9bf388bc2f52fa"),
    ("integers", "int64 uint64", "ab2a1f67ea0a1549b30ff1f53959c8c5a41a51ac3828229250a57fedf1b32a75"),
    ("bernoulli", "float32", "715fb39564f8d23f035417c61be04251f16bca3b5611ca0c454c17d5f3e15f18"),
    ("bernoulli", "float16", "6503c3672663754efd5730544abeeb2d9619846a07664cb7fb10e6effd24d99c"),
    ("bernoulli", "bfloat16", "6e0813169985376e564fa0868edfdd8e21c755b85d63ab7aa944e12f4d6c3f17"),
    ("bernoulli", "float64", "af1b6c198f2f504807ed994a1d16f9051ef85d00909587aed56116a32e66bde3"),
    ("bernoulli", "int8 uint8 bool", "229706835922c32f06c0e17c0099449924b8e60cb200f23c09683d80afc34a7a"),
    ("bernoulli", "int16 uint16", "00aa613eb90f650fee6c3f2b664309bf6375fc741d2e6b5c7145ea4366bbc677"),
    ("bernoulli", "int32 uint32", "783f44e495bc93cbdc4a918f88c9882e4e0d6856ad0c7ce0b364bd58473b642c"),
    ("bernoulli", "int64 uint64", "e644546055d22c6bd77c9f2481c47163cf397fcdf20b1bee9c26088318c68143"),
    ("constant", "float32", "ea3c4eb52dd13863782d42b193ebd2d9cbf95703ca64de28d03b0e33c372653d"),
    ("constant", "float16", "6e682a5d3bac041587980f70e33833f8778c6c060984127ee16be7c2553e50ec"),
    ("constant", "bfloat16", "d2b55f31f5bf163e75a594f15a711585135122a9d2ff9468f84458685a9e45d6"),
    ("constant", "float64", "959b81d7c76b9c7b4bc385c35ef899f5fa28060ad3531e2b32de9a84cbf80ee4"),
    ("constant", "int8 uint8 bool", "d64db054adb445267efe3c03c513b678dabfe46e35f11ef2e265bc9dff8051e6"),
    ("constant", "int16 uint16", "fd78f498848d83d016d1e3c1ba80a3866ce9c83027032c43af056e9635fcf8f9"),
    ("constant", "int32 uint32", "fd8799318b3f5cba36586b4620f4d860428409e0b4a93ade9acb0eb81499fcfa"),
    ("constant", "int64 uint64", "9795de1918198fcc9399469e90b173e9adddc6e7f711855129b555618d1ad164"),
)
"""Generator, dtypes, SHA-256 of `SIZE` elements of seed 2024 with default parameters (1 for the constant)."""
DIGESTS = {(generator, dtype): digest for generator, dtypes, digest in GOLDEN for dtype in dtypes.split()}


def make(draw: Draw, dtype: DType | str, size: int, seed: int = 2024, first: int = 0) -> Any:
    found = np.empty(size, dtype_from_name(dtype).numpy)
    fill(found, draw, seed, first)
    return found


def golden_draw(generator: str) -> Draw:
    return Draw(generator, (1.0,) if generator == "constant" else ())


# ------------------------------------------------------------------------------------------------- bits


def test_golden_digests() -> None:
    """These never change: digests that callers keep would no longer hold. Every legal pair has one."""
    legal = {(g, d.value) for g in GENERATORS for d in DATA if golden_draw(g).problem(d) is None}
    found = {
        (generator, dtype): hashlib.sha256(make(golden_draw(generator), dtype, SIZE)).hexdigest()
        for generator, dtype in legal
    }
    assert found == DIGESTS


_DIGESTS = """
import hashlib, sys, numpy as np
from npugrad.dtypes import dtype_from_name
from npugrad.generators import Draw, fill
for generator in ("uniform", "normal", "integers", "bernoulli"):
    for dtype in ("float32", "float16", "bfloat16"):
        a = np.empty(70001, dtype_from_name(dtype).numpy)
        fill(a, Draw(generator), 2024)
        print(generator, dtype, hashlib.sha256(a.tobytes()).hexdigest())
"""


def test_bits_do_not_depend_on_the_instructions_that_numpy_uses() -> None:
    core: Any = getattr(np, "_core", None) or np.core  # its name before NumPy 2
    numpy = core._multiarray_umath
    off = " ".join(name for name in numpy.__cpu_dispatch__ if numpy.__cpu_features__.get(name))
    env = {**os.environ, "NPY_DISABLE_CPU_FEATURES": off}
    done = subprocess.run(
        [sys.executable, "-c", _DIGESTS], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    found = [line.split() for line in done.stdout.splitlines()]
    assert len(found) == 12
    assert all(DIGESTS[generator, dtype] == digest for generator, dtype, digest in found)


def test_words_far_from_the_first_are_frozen_too() -> None:
    """Wide types take a word a draw, narrow ones half a word."""
    drawn = words(5, 2**45, 8).tolist()
    assert drawn == [
        *(62045274, 1149632819, 2607275992, 2432167359),
        *(290790849, 3038013450, 3566921560, 2239183345),
    ]
    wide = make(Draw("integers", (0.0, 2.0**32)), "uint32", 8, seed=5, first=2**45)
    assert wide.tolist() == drawn
    narrow = make(Draw("integers", (0.0, 2.0**16)), "uint16", 16, seed=5, first=2**46)
    assert narrow.tolist() == [half for word in drawn for half in (word % 2**16, word >> 16)]


@given(
    st.sampled_from(["uniform", "normal", "integers", "bernoulli"]),
    st.sampled_from(FLOATS),
    st.sampled_from([1, 2, 3, 8, 40_000, 2**32 - 1]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 3 * TILE_WORDS),
    st.integers(1, TILE_WORDS + 5),
)
def test_any_part_is_the_same_by_itself(
    generator: str, dtype: DType, repeat: int, seed: int, first: int, size: int
) -> None:
    draw = Draw(generator, (), repeat)
    whole = make(draw, dtype, first + size, seed)
    assert make(draw, dtype, size, seed, first).tobytes() == whole[first:].tobytes()


def test_repeat_stands_each_value_in_a_row() -> None:
    for dtype in ("float32", "float16"):
        once = make(Draw("normal"), dtype, 5000)
        assert np.array_equal(make(Draw("normal", (), 8), dtype, 40_000), np.repeat(once, 8))


def test_a_content_may_be_longer_than_memory_and_than_all_words_of_a_key() -> None:
    """Beyond 2^32 elements nothing starts again."""
    found = make(Draw("normal", (), 2**32 - 1), "float32", 100, first=2**32 - 51)
    first, second = make(Draw("normal"), "float32", 2)
    assert (found[:50] == first).all()
    assert (found[50:] == second).all()
    late = make(Draw("integers", (0.0, 2.0**32)), "uint32", 1000, first=2**32 + 7)
    assert not np.intersect1d(late, make(Draw("integers", (0.0, 2.0**32)), "uint32", 2000)).size


# --------------------------------------------------------------------------------------- distributions


def close(found: float, expected: float, deviation: float) -> bool:
    """Within five standard errors of `SIZE` draws."""
    return bool(abs(found - expected) < 5 * deviation / np.sqrt(SIZE))


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_uniform_is_even_and_normal_nearly_normal(seed: int) -> None:
    for dtype in FLOATS:
        found = make(Draw("uniform", (-1.0, 3.0)), dtype, SIZE, seed).astype(np.float64)
        assert found.min() >= -1
        assert found.max() <= 3
        assert close(found.mean(), 1, 4 / np.sqrt(12))
        counts, _ = np.histogram(found, 16, (-1, 3))
        assert ((counts - SIZE / 16) ** 2 / (SIZE / 16)).sum() < 60  # chi-squared of 15 degrees: p about 3e-7
        found = make(Draw("normal"), dtype, SIZE, seed).astype(np.float64)
        assert np.abs(found).max() < 3.3
        assert close(found.mean(), 0, 1)
        assert abs(found.std() - 1) < 0.02
        assert abs((found**4).mean() - 3) < 0.15
        for reach, share in ((1, 0.3173), (2, 0.0455), (3, 0.0027)):
            assert abs((np.abs(found) > reach).mean() - share) < 0.01


def test_integers_reach_both_ends_of_a_type() -> None:
    for dtype in (d for d in DATA if d.itemsize <= 4 and d not in FLOATS and d is not DType.BOOL):
        held = np.iinfo(dtype.numpy)
        for low, high in ((held.min, held.min + 2), (held.max - 1, held.max + 1), (held.min, held.max + 1)):
            draw = Draw("integers", (float(low), float(high)))
            assert draw.problem(dtype) is None
            found = make(draw, dtype, 1000)
            assert low <= found.min() < found.max() < high
        for end in (held.min, held.max):
            assert Draw("constant", (float(end),)).problem(dtype) is None
            assert set(make(Draw("constant", (float(end),)), dtype, 3).tolist()) == {end}


def test_bits_do_not_depend_on_what_was_drawn_before() -> None:
    """Zeros of either sign are equal, and the tables of small types are kept under their parameters."""
    for dtype in FLOATS:
        expected = make(Draw("normal", (0.0, 0.0)), dtype, 100).tobytes()
        for zeros in ((-0.0, 0.0), (0.0, -0.0), (-0.0, -0.0)):
            generators._table.cache_clear()
            for parameters in (zeros, (0.0, 0.0)):
                assert make(Draw("normal", parameters), dtype, 100).tobytes() == expected


def test_normal_is_scaled_and_shifted() -> None:
    plain = make(Draw("normal"), "float32", 1000)
    found = make(Draw("normal", (2.0, 0.5)), "float32", 1000)
    assert np.array_equal(found, plain * np.float32(0.5) + np.float32(2))


def test_integers_are_even_and_bernoulli_has_its_share_of_ones() -> None:
    for dtype in ("int8", "int64", "uint16", "float32"):
        low = 0 if dtype.startswith("u") else -3
        drawn = make(Draw("integers", (low, low + 7)), dtype, SIZE).astype(np.int64)
        counts = np.bincount(drawn - low)
        assert len(counts) == 7
        assert ((counts - SIZE / 7) ** 2 / (SIZE / 7)).sum() < 40
    for dtype, p in itertools.product(("bool", "uint8", "float16", "int32"), (0.0, 0.25, 1.0)):
        found = make(Draw("bernoulli", (p,)), dtype, SIZE).astype(np.float64)
        assert set(np.unique(found)) <= {0, 1}
        assert close(found.mean(), p, 0.5) if 0 < p < 1 else found.mean() == p


# -------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("draw", "dtype", "problem"),
    [
        (Draw("gauss"), "float32", "found generator 'gauss'; expected one of uniform, normal, integers"),
        (Draw("\u00e9" * 99), "float32", "found generator '" + "\\xe9" * 40 + "'; expected one of"),
        (Draw("normal"), "complex64", "found dtype complex64; expected one whose data can be sent"),
        (Draw("normal", (), 0), "float32", "found repeat 0; expected 1 to 4294967295"),
        (Draw("normal", (), 2**32), "float32", "found repeat 4294967296; expected"),
        (Draw("normal", (0, 1, 2)), "float32", "found 3 parameters of normal; expected at most mean, std"),
        (Draw("normal", (float("nan"),)), "float32", "found mean nan of normal; expected at most"),
        (Draw("uniform", (0, float("inf"))), "float32", "found high inf of uniform; expected at most"),
        (Draw("normal", (0, -1)), "float32", "found std -1 of normal; expected 0 or more"),
        (Draw("normal", (60_000, 10_000)), "float16", "found values up to 93000; expected at most 65504"),
        (Draw("uniform", (0, 1e5)), "float16", "found high 100000 of uniform; expected at most 65504"),
        (Draw("uniform", (1, 0)), "float32", "found low 1 above high 0; expected low to high"),
        (Draw("uniform"), "int32", "found uniform for dtype int32; expected a float type, or the generator"),
        (Draw("normal"), "bool", "found normal for dtype bool; expected a float type"),
        (Draw("integers"), "bool", "found integers for dtype bool; expected another type"),
        (Draw("integers", (0.5, 3)), "int32", "found integers from 0.5 to below 3; expected whole numbers"),
        (Draw("integers", (3, 3)), "int32", "found integers from 3 to below 3; expected whole numbers, 1 to"),
        (Draw("integers", (-1, 3)), "uint8", "found low -1 of integers; expected at least 0 for uint8"),
        (Draw("integers", (0, 300)), "uint8", "found high 300 of integers; expected at most 256 for uint8"),
        (Draw("integers", (-129, 0)), "int8", "found low -129 of integers; expected at least -128 for int8"),
        (Draw("integers", (2.0**54 - 2, 2.0**54)), "int64", "found low 1.80144e+16 of integers; expected at"),
        (
            Draw("constant", (256,)),
            "uint8",
            "found value 256 of constant; expected a whole number that uint8",
        ),
        (Draw("bernoulli", (1.5,)), "float32", "found p 1.5 of bernoulli; expected 0 to 1"),
        (
            Draw("constant", (2,)),
            "bool",
            "found value 2 of constant; expected a whole number that bool holds",
        ),
        (Draw("constant", (-1,)), "uint8", "found value -1 of constant; expected a whole number"),
        (Draw("constant", (0.5,)), "int32", "found value 0.5 of constant; expected a whole number"),
    ],
)
def test_what_cannot_be_drawn_is_told(draw: Draw, dtype: str, problem: str) -> None:
    found = draw.problem(dtype_from_name(dtype))
    assert found is not None
    assert found.startswith(problem)
    assert found.isascii()


@given(
    st.sampled_from([*GENERATORS, "none"]),
    st.lists(st.floats(), max_size=4).map(tuple),
    st.integers(-1, 2**33),
    st.sampled_from(list(DType)),
)
def test_what_is_not_refused_can_be_drawn(
    generator: str, parameters: tuple[float, ...], repeat: int, dtype: DType
) -> None:
    draw = Draw(generator, parameters, repeat)
    if draw.problem(dtype) is None:
        with np.errstate(all="raise", under="ignore"):
            found = make(draw, dtype, 100)
        assert np.isfinite(found.astype(np.float64)).all()
