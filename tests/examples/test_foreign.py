"""Making the examples in other languages ready: once what was missing is there, and after a cut-off run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.examples import foreign

# Programs in place of Debian's: a package is a toolchain whose Go writes a program, unless it was cut off.
PROGRAMS = {
    "apt-get": """case "$*" in
*simulate*) echo "Inst golang" ;;
*download*) echo whole > golang_2.deb ;;
esac""",
    "dpkg-deb": """grep -q whole "$2" || { echo "$2: cut off"; exit 1; }
go="$3/usr/lib/go-1/bin/go"
mkdir -p "$(dirname "$go")"
cp "$(dirname "$0")/golang" "$go" """,
    "golang": """mkdir "$GOCACHE"
while [ "$1" != -o ]; do shift; done
echo program > "$2" """,
    "protoc": "exit 0",
}


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of a machine, alone in their folder; a function puts those of `PROGRAMS` there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "bash", "make", "mkdir", "cp", "grep", "dirname", "test"):
        (folder / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(foreign, "OUT", tmp_path / "out")
    return folder


def install(machine: Path) -> None:
    for name, text in PROGRAMS.items():
        (machine / name).write_text(f"#!/bin/sh\n{text}\n")
        (machine / name).chmod(0o755)


def test_what_was_missing_may_come_later(machine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert foreign.main(["cpp", "go"]) == 0
    told = capfd.readouterr().out
    assert "examples: cpp: found no g++\n" in told
    assert "examples: go: found no apt-get" in told
    for language in ("cpp", "go"):
        assert not (foreign.OUT / language / foreign.READY).exists(), "make would not try again"
    with pytest.raises(foreign.Unavailable, match="cpp: found no g\\+\\+"):
        foreign.command("cpp")
    install(machine)
    assert foreign.main(["go"]) == 0
    assert foreign.command("go") == [str(foreign.OUT / "go" / "quickstart")]
    assert (foreign.OUT / "go" / foreign.READY).exists()


def test_go_twice(machine: Path) -> None:
    install(machine)
    assert [foreign.main(["go"]) for _ in range(2)] == [0, 0]
    assert foreign.command("go")


def test_a_download_that_was_cut_off(machine: Path) -> None:
    install(machine)
    debs = foreign.OUT / "go" / "apt" / "debs"
    debs.mkdir(parents=True)
    (debs / "golang_1.deb").write_text("who")
    assert foreign.main(["go"]) == 0
    assert foreign.command("go")


def test_a_program_of_a_build_that_was_killed_is_not_run(machine: Path) -> None:
    install(machine)
    folder = foreign.OUT / "go"
    folder.mkdir(parents=True)
    (folder / "quickstart").write_text("half")
    with pytest.raises(foreign.Unavailable, match="go: not made ready; make examples does it"):
        foreign.command("go")
    assert foreign.main(["go"]) == 0
    assert (folder / "quickstart").read_text() == "program\n"
