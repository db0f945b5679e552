"""The builder: what it does without a compiler, with one that fails, and with nothing to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.server.kernels.conftest import ROOT

from npugrad_server.backends.cpu.kernels import usable_variants

SETTING = "NPUGRAD_BUILD_KERNELS"
FAILS = '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such type" >&2\nexit 1\n'
# As fast as a build can be: whatever `-o` names is there afterwards.
WORKS = '#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done\nexit 0\n'
FLAGS_AVX2 = "avx2 fma f16c bmi1 bmi2"
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(
    build_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Give a function that builds, with no compiler on the path but its own; it gives exit code and words."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("CXX", SETTING):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tools))

    def run(*arguments: str, compiler: str = "", **environment: str) -> tuple[int, str]:
        if compiler:
            (tools / "c++").write_text(compiler)
            (tools / "c++").chmod(0o755)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        code = build_module.main(["--out", str(tmp_path / "lib"), *arguments])
        return code, "".join(capfd.readouterr())

    return run


def made(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("lib/*.so"))


def test_it_is_a_command(tmp_path: Path) -> None:
    for arguments, code in (([], 1), (["--optional"], 0)):
        done = subprocess.run(
            [sys.executable, "server/kernels/build.py", "--out", str(tmp_path / "lib"), *arguments],
            cwd=ROOT,
            env={"PATH": ""},
            check=False,
            timeout=60,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, "no C++ compiler" in done.stdout + done.stderr) == (code, True), done


def test_without_a_compiler_it_fails_unless_the_kernels_are_optional(run: Run, tmp_path: Path) -> None:
    code, said = run()
    assert (code, "no C++ compiler" in said) == (1, True), said
    code, said = run("--optional")
    assert (code, "none built" in said, "no C++ compiler" in said) == (0, True, True), said
    code, said = run("--optional", **{SETTING: "1"})
    assert (code, "no C++ compiler" in said) == (1, True), said
    assert made(tmp_path) == []


@pytest.mark.parametrize("flags", ["", FLAGS_AVX2, f"{FLAGS_AVX2} avx512f avx512bw avx512dq avx512vl"])
def test_the_variant_of_this_processor_is_built_first_and_told(
    run: Run, build_module: Any, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    loaded, *rest = usable_variants("x86_64", frozenset(flags.split()))
    monkeypatch.setattr(build_module, "machine", lambda: "x86_64")
    monkeypatch.setattr(build_module, "processor_flags", lambda: set(flags.split()))
    code, said = run(compiler=WORKS)
    first, *others = said.splitlines()[:-1]
    assert code == 0
    assert first.startswith(f"kernels: {loaded}, for this processor: built, ")
    assert not any("for this processor" in line for line in others)
    assert set(rest) <= {line.split(":")[1].strip() for line in others}


def test_an_error_of_the_compiler_fails_though_the_kernels_are_optional(run: Run) -> None:
    code, said = run("--optional", compiler=FAILS)
    assert (code, "no such type" in said) == (1, True), said


def test_a_compiler_that_is_named_but_not_there_fails(run: Run) -> None:
    code, said = run("--optional", CXX="no-such-compiler")
    assert (code, "found CXX=no-such-compiler" in said) == (1, True), said


def test_the_setting_leaves_out_kernels_that_are_optional(run: Run, tmp_path: Path) -> None:
    code, said = run("--optional", compiler=WORKS, **{SETTING: "0"})
    assert (code, made(tmp_path)) == (0, []), said
    code, said = run()
    assert (code, bool(made(tmp_path))) == (0, True), said


def test_what_is_up_to_date_is_not_built_again(run: Run, tmp_path: Path) -> None:
    code, said = run("--optional", compiler=WORKS)
    assert (code, ": built, " in said) == (0, True), said
    assert made(tmp_path)
    code, said = run("--optional")
    assert (code, ": built, " in said, ": up to date, " in said) == (0, False, True), said
