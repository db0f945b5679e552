"""What a second run forgives, and what is red at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.second_runs import LEDGER, ledger

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import os, random, time, warnings
from pathlib import Path
import pytest
from hypothesis import given, strategies
from tests.derived import told

def again(name):
    mark = Path(__file__).with_name(name)
    with mark.open("a") as file:
        file.write(f"{os.getpid()} {random.random()}\\n")
    return len(mark.read_text().splitlines()) > 1

@pytest.fixture
def set_up():
    assert again("set_up")

@pytest.fixture
def torn_down():
    yield
    assert again("torn_down")

def test_fine(): pass
def test_chance(): assert again("chance")
def test_other_chance(): assert again("other_chance")
def test_third_chance(): assert again("third_chance")
def test_fourth_chance(): assert again("fourth_chance")
def test_wrong(): assert again("wrong") is None
def test_set_up(set_up): pass
def test_torn_down(torn_down): pass
@given(strategies.integers())
def test_drawn(number): assert again("drawn")
def test_crash(): again("crash") or os.abort()
@pytest.mark.timeout(0.1)
def test_slow(): again("slow") or time.sleep(60)
def test_warns(): again("warns") or warnings.warn("odd")
@pytest.mark.timeout(0.1)
def test_slow_case():
    with told("a case"): again("slow_case") or time.sleep(60)
def test_case_warns():
    with told("a case"): again("case_warns") or warnings.warn("odd")
def test_thrown_away():
    class Odd:
        def __del__(self): raise ValueError
    again("thrown_away") or Odd()
"""
RED_AT_ONCE = {
    "set_up": "an error in its setup",
    "torn_down": "an error in its teardown",
    "drawn": "it draws its data",
    "slow": "the runner's time-out",
    "slow_case": "the runner's time-out",
    "warns": "a warning",
    "case_warns": "a warning",
    "thrown_away": "a warning",
}


def run(folder: Path, *names: str, known: str = "", options: tuple[str, ...] = ()) -> tuple[int, list[str]]:
    """The exit code and the last lines of a run of these tests, with a ledger."""
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (folder / "known.txt").write_text(known)
    (folder / "more").mkdir()
    (folder / "more" / "conftest.py").touch()  # one that is not for all files, as in this repository
    (folder / "more" / "test_more.py").write_text("def test_more(): pass\n")
    tests = [f"{folder}/more/test_more.py", *(f"{folder}/test_it.py::test_{name}" for name in names)]
    own = ["-c", f"{folder}/pytest.ini", "--rootdir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.second_runs", *own, *options, *tests],
        cwd=ROOT,
        env={**os.environ, "NPUGRAD_SECOND_RUNS": str(folder / "known.txt")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    prefixes = ("RED: ", "SECOND RUN: ", "passed, ")
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith(prefixes)]


def test_what_passes_alone_is_forgiven_and_named(tmp_path: Path) -> None:
    assert run(tmp_path, "fine", "chance", "other_chance", "third_chance", options=("-n", "2")) == (
        0,
        [
            *(
                f"SECOND RUN: test_it.py::test_{name}: failed among others, passed alone"
                for name in ("chance", "other_chance", "third_chance")
            ),
            "passed, 3 of at most 3 in a second run",
        ],
    )
    for name in ("chance", "other_chance", "third_chance"):
        (first, seeded), (second, again) = map(str.split, (tmp_path / name).read_text().splitlines())
        assert first != second, "in a process of its own"
        assert seeded == again, "with the same seed"


@pytest.mark.deep
def test_what_fails_twice_is_red(tmp_path: Path) -> None:
    assert run(tmp_path, "wrong", "chance") == (
        1,
        [
            "SECOND RUN: test_it.py::test_chance: failed among others, passed alone",
            "RED: test_it.py::test_wrong: it failed twice",
        ],
    )


def test_what_is_no_matter_of_chance_is_red_at_once(tmp_path: Path) -> None:
    code, lines = run(tmp_path, *RED_AT_ONCE)
    assert code == 1
    assert sorted(lines) == sorted(
        f"RED: test_it.py::test_{name}: {why}" for name, why in RED_AT_ONCE.items()
    )
    # Only hypothesis itself tries an example again.
    assert all(
        len((tmp_path / name).read_text().splitlines()) == 1 for name in RED_AT_ONCE.keys() - {"drawn"}
    )


@pytest.mark.deep
def test_a_process_that_crashes_is_red_at_once(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "crash", options=("-n", "1"))
    assert code == 1
    assert "RED: test_it.py::test_crash: its process crashed" in lines
    assert len((tmp_path / "crash").read_text().splitlines()) == 1


@pytest.mark.deep
def test_more_than_three_are_red_at_once(tmp_path: Path) -> None:
    names = ("chance", "other_chance", "third_chance", "fourth_chance")
    code, lines = run(tmp_path, *names)
    assert code == 1
    assert sorted(lines) == sorted(
        f"RED: test_it.py::test_{name}: more than 3 tests failed" for name in names
    )
    assert all(len((tmp_path / name).read_text().splitlines()) == 1 for name in names)


@pytest.mark.deep
def test_a_name_in_the_ledger_has_had_its_second_run(tmp_path: Path) -> None:
    known = "# a comment\ntest_it.py::test_chance  # waits for a clock\n"
    code, lines = run(tmp_path, "chance", known=known)
    assert (code, lines) == (1, ["RED: test_it.py::test_chance: once more, after: waits for a clock"])


@pytest.mark.parametrize("text", ["a::b\n", "a::b  # \n", *["".join(f"a::{i}  # why\n" for i in range(6))]])
def test_the_ledger_has_at_most_five_names_each_with_its_cause(tmp_path: Path, text: str) -> None:
    assert len(ledger(LEDGER)) <= 5
    (tmp_path / "known.txt").write_text(text)
    with pytest.raises(ValueError, match="at most five tests, each with its cause"):
        ledger(tmp_path / "known.txt")
