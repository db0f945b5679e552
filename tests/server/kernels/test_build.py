"""The builder as a command: what it does without a compiler, with one that fails, and with nothing to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.server.kernels.conftest import ROOT

SETTING = "NPUGRAD_BUILD_KERNELS"
FAILS = '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such type" >&2\nexit 1\n'
# As fast as a build can be: whatever `-o` names is there afterwards.
WORKS = '#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done\nexit 0\n'


def run(tmp_path: Path, *arguments: str, compiler: str = "", **environment: str) -> tuple[int, str]:
    """Exit code and what was said, where no other compiler is on the path."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    if compiler:
        (tools / "c++").write_text(compiler)
        (tools / "c++").chmod(0o755)
    command = [sys.executable, "server/kernels/build.py", "--out", str(tmp_path / "lib"), *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={"PATH": str(tools), **environment},
        check=False,
        timeout=60,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def made(tmp_path: Path) -> list[str]:
    """Names of the libraries that were built."""
    return sorted(path.name for path in tmp_path.glob("lib/*.so"))


def test_without_a_compiler_it_fails_unless_the_kernels_are_optional(tmp_path: Path) -> None:
    code, said = run(tmp_path)
    assert (code, "no C++ compiler" in said) == (1, True), said
    code, said = run(tmp_path, "--optional")
    assert (code, "none built" in said, "no C++ compiler" in said) == (0, True, True), said
    assert made(tmp_path) == []


def test_an_error_of_the_compiler_fails_though_the_kernels_are_optional(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--optional", compiler=FAILS)
    assert (code, "no such type" in said) == (1, True), said


def test_a_compiler_that_is_named_but_not_there_fails(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--optional", CXX="no-such-compiler")
    assert (code, "found CXX=no-such-compiler" in said) == (1, True), said


@pytest.mark.parametrize("arguments", [(), ("--optional",)])
def test_the_setting_leaves_out_kernels_that_are_optional(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code, said = run(tmp_path, *arguments, compiler=WORKS, **{SETTING: "0"})
    assert code == 0, said
    assert (made(tmp_path) == []) == bool(arguments)


def test_the_setting_can_make_the_kernels_needed(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--optional", **{SETTING: "1"})
    assert (code, "no C++ compiler" in said) == (1, True), said


def test_what_is_up_to_date_is_not_built_again(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--optional", compiler=WORKS)
    assert (code, ": built, " in said) == (0, True), said
    assert made(tmp_path)
    code, said = run(tmp_path, "--optional", compiler=WORKS)
    assert (code, ": built, " in said, ": up to date, " in said) == (0, False, True), said
