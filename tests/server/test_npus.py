"""Which devices a start takes, and what it says when NPUs are missing or do not fit."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import structlog
from tests.cann_sim.build import Installation
from tests.fix_npu import npu_environment
from tests.worker_forks import forked_workers
from typer.testing import CliRunner

from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad_server.cli import app
from npugrad_server.config import ServerSettings
from npugrad_server.npus import NpuReport, find_npus, node_problems, op_init_problem
from npugrad_server.start_checks import StartError, pool_settings

SMALL = {"input_arena_bytes": 2**20, "output_arena_bytes": 2**20}
TWO = NpuReport(count=2, soc="Ascend910B2", cann="9.1.0")
NO_CANN = NpuReport(problems=("libascendcl.so cannot be loaded",))
NO_DRIVER = NpuReport(problems=("aclrtGetDeviceCount returned 507899",), device_nodes=("/dev/davinci0",))


def made(report: NpuReport, **settings: Any) -> Any:
    return pool_settings(ServerSettings(**{**SMALL, **settings}), report)


def problems(report: NpuReport, **settings: Any) -> tuple[str, ...]:
    with pytest.raises(StartError) as caught:
        made(report, **settings)
    return caught.value.problems


def test_auto_takes_all_npus_and_their_product() -> None:
    found = made(TWO)
    assert (found.devices, found.product) == (("npu:0", "npu:1"), Product.ATLAS_A2)


def test_auto_takes_a_cpu_where_there_is_no_sign_of_an_npu() -> None:
    found = made(NO_CANN)
    assert (found.devices, found.product) == (("cpu:0",), Product.ATLAS_A2)


def test_auto_never_takes_a_cpu_in_the_place_of_a_broken_npu() -> None:
    first, second = problems(NO_DRIVER)
    assert "auto found NPUs that cannot be used" in first
    assert second == "npu: aclrtGetDeviceCount returned 507899"


@pytest.mark.parametrize(("count", "share"), [(1, 8), (2, 8), (4, 16)])
def test_arenas_are_shares_of_the_memory_unless_set(
    count: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npugrad_server.start_checks.memory_bytes", lambda: 2**30)
    found = made(NO_CANN, devices=f"test:{count}", input_arena_bytes=None, output_arena_bytes=None)
    assert (found.input_arena_bytes, found.output_arena_bytes) == (2**28, 2**30 // share)


def test_npus_that_cannot_be_used_are_an_error_with_all_the_reasons() -> None:
    report = NpuReport(problems=("torch_npu not installed", "no CANN"))
    assert problems(report, devices="npu:0")[1:] == ("npu: torch_npu not installed", "npu: no CANN")
    assert "which has 2" in problems(TWO, devices="npu:0,npu:2")[0]


@pytest.mark.parametrize(
    ("soc", "product"), [("Ascend910_9391", Product.ATLAS_A3), ("Ascend910B", Product.ATLAS_TRAINING)]
)
def test_the_product_is_that_of_the_chip(soc: str, product: Product) -> None:
    report = NpuReport(count=1, soc=soc)
    assert made(report, devices="npu:0").product is product
    assert made(report, devices="npu:0", product=product.value).product is product
    (problem,) = problems(report, devices="npu:0", product="atlas-a2")
    assert problem == f"product: found atlas-a2; expected {product} or auto, as the NPU is {soc}"


@pytest.mark.parametrize(
    ("installed", "asked", "profile"),
    [
        ("9.1.0", "auto", "9.1.0"),
        ("9.0.1", "9.0.0", "9.0.0"),
        ("8.2.RC1", "auto", "8.5.0"),
        ("9.9.0", "auto", "9.2.0-beta.2"),
        ("7.7.0.1.238-odd", "auto", ""),
        ("", "9.1.0", "9.1.0"),
    ],
)
def test_calls_are_checked_by_the_pages_of_the_cann_of_the_npus(
    installed: str, asked: str, profile: str
) -> None:
    report = NpuReport(count=1, soc="Ascend910B2", cann=installed)
    assert made(report, devices="npu:0", cann=asked).cann == profile
    assert made(report, devices="cpu:0").cann == "", "auto is about NPUs"


def test_a_release_that_is_not_the_one_of_the_npus_or_none_is_refused() -> None:
    (problem,) = problems(TWO, cann="9.0.0")
    assert problem == "cann: found 9.0.0; expected 9.1.0 or auto, as it is the CANN of the NPUs"
    with pytest.raises(ValueError, match="found 'new'; expected a release of CANN"):
        made(TWO, cann="new")


@pytest.mark.parametrize(
    ("soc", "kind"),
    [
        ("Ascend310P3", "of no known product"),
        ("Ascend950PR_9579", "of the Ascend 950 family, which is not supported"),
    ],
)
def test_a_chip_of_no_product_is_refused(soc: str, kind: str) -> None:
    (problem,) = problems(NpuReport(count=1, soc=soc), devices="npu:0")
    expected = f"product: found NPU '{soc}', which is {kind}; expected one of atlas-training"
    assert problem.startswith(expected)


def test_who_starts_the_graph_engine_is_told_which_packages_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    problem = op_init_problem({"ACL_OP_INIT_MODE": "0"})
    assert problem.startswith("ACL_OP_INIT_MODE=0 has torch_npu start CANN's graph engine, which needs ")
    assert " decorator, " in problem
    assert "numpy" not in problem  # it is imported
    assert op_init_problem({"ACL_OP_INIT_MODE": "often"})
    (tmp_path / "decorator.py").touch()
    importlib.invalidate_caches()
    assert " decorator, " not in op_init_problem({"ACL_OP_INIT_MODE": "0"})
    for mode in ("1", "2", ""):
        assert op_init_problem({"ACL_OP_INIT_MODE": mode}) == ""
    assert op_init_problem({}) == ""


# ----------------------------------------------------------------------------------- the command, for real


def check(*arguments: str, env: Mapping[str, str] | None = None) -> tuple[int, list[str]]:
    """Exit code and lines of `npugrad-server check`; with an environment its workers are programs."""
    small = ["--metrics-listen", "", "--input-arena-bytes", "64MiB", "--output-arena-bytes", "64MiB"]
    ours = ("ASCEND_", "LD_LIBRARY_PATH", "NPUGRAD_")
    without = {name: None for name in os.environ if name.startswith(ours)}
    with forked_workers() if env is None else nullcontext():
        done = CliRunner().invoke(
            app,
            ["check", "--listen", "127.0.0.1:0", *small, *arguments],
            env={**without, "OMP_NUM_THREADS": "1", **(env or {})},
        )
    structlog.reset_defaults()
    return done.exit_code, done.stdout.splitlines()


@pytest.mark.slow
def test_check_says_what_an_npu_would_need() -> None:
    code, lines = check("--devices", "npu:0")
    assert code == 1
    text = "\n".join(lines)
    assert "FAIL  devices: found npu:0" in text
    assert "FAIL  npu: libascendcl.so cannot be loaded, so there is no usable CANN here. Tried" in text
    code, lines = check("--devices", "auto")
    assert code == 0
    assert any(line.startswith("note  npu: libascendcl.so cannot be loaded") for line in lines)
    assert any(line.startswith("ok    cpu:0: ready") for line in lines)


@pytest.mark.slow
def test_check_sees_packages_that_do_not_belong_together(tmp_path: Path) -> None:
    """Their versions are compared before anything is imported."""
    for name, version in (("torch", "2.12.1+cpu"), ("torch_npu", "2.13.0.post1")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    _, lines = check("--devices", "npu:0", env={"PYTHONPATH": path})
    expected = "found torch 2.12.1+cpu and torch_npu 2.13.0.post1; expected the same major and minor version"
    assert any(expected in line for line in lines), lines


@pytest.mark.npu_sim
@pytest.mark.slow
def test_check_names_what_the_graph_engine_lacks(
    cann_sim: Installation, torch_npu: Path, tmp_path: Path
) -> None:
    """As where torch_npu starts it at once and its TBE cannot import a module."""
    assert importlib.util.find_spec("decorator") is None, "this test needs an environment without it"
    plan = "aclSetCompileopt:*:500001"
    variables = {**npu_environment(cann_sim, tmp_path, plan), "ACL_OP_INIT_MODE": "0"}
    code, lines = check("--devices", "npu:0", env=variables)
    assert code == 1
    needs = "ACL_OP_INIT_MODE=0 has torch_npu start CANN's graph engine, which needs "
    (note,) = (line for line in lines if line.startswith(f"note  npu: {needs}"))
    assert "decorator" in note
    (failed,) = (line for line in lines if line.startswith("FAIL  npu:0: "))
    assert "returned 500001" in failed
    assert needs in failed


NODES = ("davinci0", "davinci1", "davinci_manager", "devmm_svm", "hisi_hdc")


@pytest.mark.parametrize(
    ("there", "closed", "expected"),
    [
        ((), (), ()),
        (NODES, (), ()),
        (
            ("davinci0", "davinci_manager"),
            (),
            (
                "found davinci0, davinci_manager, but not devmm_svm, hisi_hdc; expected davinciN and "
                "davinci_manager, devmm_svm, hisi_hdc, in a container too",
            ),
        ),
        (NODES[2:], (), ("found davinci_manager, devmm_svm, hisi_hdc, but not davinciN; expected ",)),
        (
            NODES,
            ("davinci1", "hisi_hdc"),
            (
                "davinci1, hisi_hdc cannot be opened by user USER with groups GROUPS: found owner OWNER, "
                "mode -r--------; expected a user or group that may read and write, and, in a container, "
                "that it is given these devices",
            ),
        ),
    ],
)
def test_device_files_that_are_missing_or_closed_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    there: tuple[str, ...],
    closed: tuple[str, ...],
    expected: tuple[str, ...],
) -> None:
    """Files of the caller's own; root, who may open everything, looks as nobody, from inside the folder."""
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for name in there:
        Path(name).touch()
        Path(name).chmod(0o400 if name in closed else 0o666)
    user, nobody = os.geteuid(), 65534
    os.seteuid(nobody if user == 0 else user)
    try:
        found = node_problems(Path())
    finally:
        os.seteuid(user)
    facts = {
        "USER": str(nobody if user == 0 else user),
        "GROUPS": ", ".join(map(str, sorted({os.getegid(), *os.getgroups()}))),
        "OWNER": f"{user}:{os.getegid()}",
    }
    for name, fact in facts.items():
        expected = tuple(text.replace(name, fact) for text in expected)
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True)), found


HIDDEN = {"ASCEND_RT_VISIBLE_DEVICES": "3"}
HIDES = (
    "ASCEND_RT_VISIBLE_DEVICES='3' hides all devices that it does not list (ascending, commas only); npu:N "
    "counts the visible ones, from npu:0"
)


@pytest.mark.npu_sim
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "devices", "code", "line"),
    [
        ("ndev=2", "auto", 0, "ok    npu:1: ready, npu, SIMULATED Ascend910B2, CANN 9.1.0, torch_npu 2.13.0"),
        (
            "ndev=1",
            "npu:3",
            1,
            f"FAIL  devices: found npu:3; expected NPUs of this host, which has 1; {HIDES}",
        ),
        ("ndev=0", "npu:0", 1, f"FAIL  npu: CANN finds no NPU on this host; {HIDES}"),
        (
            "aclrtGetDeviceCount:*:507899",
            "npu:0",
            1,
            "FAIL  npu: aclrtGetDeviceCount returned 507899 (driver error or lost connection to the device)",
        ),
        ("aclInit:*:507008:msg=words", "npu:0", 1, "FAIL  npu: aclInit returned 507008 (device unknown"),
        (
            "aclrtGetDeviceCount:*:kill",
            "npu:0",
            1,
            "FAIL  npu: the process that looks for NPUs exited with status -9",
        ),
        (
            "aclrtSetDevice:*:507033",
            "npu:0",
            1,
            "FAIL  npu:0: down, cannot be taken: torch_npu returned 507033",
        ),
        (
            ";".join(f"{record.aclnn_name}GetWorkspaceSize:*:561112" for record in OPERATORS.values()),
            "npu:0",
            1,
            "FAIL  npu:0: down, no operator runs on this device: multi_scale",
        ),
    ],
)
def test_check_on_a_simulated_node(
    cann_sim: Installation, torch_npu: Path, tmp_path: Path, plan: str, devices: str, code: int, line: str
) -> None:
    """The simulator counts its devices itself, as CANN counts those that the variable leaves."""
    environment = npu_environment(cann_sim, tmp_path, plan) | (HIDDEN if HIDES in line else {})
    found, lines = check("--devices", devices, env=environment)
    assert any(one.startswith(line) for one in lines), lines
    assert found == code


def report(folder: Path, environment: Mapping[str, str], timeout_s: float = 30) -> NpuReport:
    """What `find_npus` finds where the driver's device files lie in this folder."""
    with mock.patch.dict(os.environ, environment):
        return find_npus(timeout_s, folder)


@pytest.mark.npu_sim
@pytest.mark.parametrize(
    ("plan", "timeout_s", "problem"),
    [
        ("aclInit:*:hang", 3, "the NPU driver did not answer within 3 s"),
        ("aclInit:*:kill", 30, "the process that looks for NPUs exited with status -9: "),
    ],
)
def test_a_driver_that_hangs_or_crashes_is_told_in_time_and_no_reason_to_take_a_cpu(
    cann_sim: Installation, tmp_path: Path, plan: str, timeout_s: float, problem: str
) -> None:
    node = tmp_path / "davinci0"
    node.touch()
    found = report(tmp_path, npu_environment(cann_sim, tmp_path, plan), timeout_s)
    assert (found.problems[0], found.device_nodes) == (problem, (str(node),))
    assert found.problems[1:] == node_problems(tmp_path) != ()
    assert "auto found NPUs that cannot be used" in problems(found)[0]


@pytest.mark.parametrize(
    "act", ['if (write(1, "[INFO] words\\n", 13)) {}', "if (fork() == 0) { sleep(60); _exit(0); }"]
)
def test_what_a_library_prints_or_forks_does_not_disturb_the_answer(tmp_path: Path, act: str) -> None:
    """CANN logs to standard output where its environment asks for it, and forks helpers that outlive it."""
    if not shutil.which("gcc"):
        pytest.skip("needs a C compiler")
    library, source = tmp_path / "lib64" / "libascendcl.so", tmp_path / "library.c"
    library.parent.mkdir()
    source.write_text(f"#include <unistd.h>\n__attribute__((constructor)) void act(void) {{ {act} }}\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    found = report(tmp_path, {"ASCEND_HOME_PATH": str(tmp_path), "LD_LIBRARY_PATH": ""})
    assert any("libnnopbase.so cannot be loaded" in problem for problem in found.problems), found


@pytest.mark.npu_sim
@pytest.mark.slow
def test_check_names_operators_that_the_node_lacks(
    install_cann_sim: Callable[..., Installation], torch_npu: Path, tmp_path: Path
) -> None:
    """One that its CANN is too old for is fine, and told, and so is the release."""
    old = npu_environment(install_cann_sim("split", "8.5.0"), tmp_path / "old")
    code, lines = check("--devices", "npu:0", env=old)
    assert (code, sum(line.startswith("note  ") for line in lines)) == (0, 1)
    assert "aclnnFusedFloydAttentionGradGetWorkspaceSize is not in libopapi_nn.so" in lines[-1]
    assert lines[-1].startswith("note  fused_floyd_attention_grad is not available: ")
    assert lines[-1].endswith("expected CANN 9.0 or newer")


@pytest.mark.npu_sim
@pytest.mark.slow
@pytest.mark.parametrize("cann", ["8.0.RC3", "8.3.RC1"])
def test_check_names_the_release_of_cann_and_what_does_not_go_with_it(
    install_cann_sim: Callable[..., Installation], torch_npu: Path, tmp_path: Path, cann: str
) -> None:
    """The first has no function that tells it, the second another than later ones.

    The simulator has two of the operators that came with 8.5; what they take before that is not documented.
    """
    node = npu_environment(install_cann_sim("split", cann), tmp_path)
    code, lines = check("--devices", "npu:0", env=node | HIDDEN)
    assert any(f"SIMULATED Ascend910B2, CANN {cann}, torch_npu 2.13.0" in line for line in lines), lines
    assert code == 0
    pair = f"found torch_npu 2.13.0 with CANN {cann}; expected CANN 8.5 to 9.2, as the vendor declares for it"
    assert {f"note  npu: {pair}", f"note  npu: {HIDES}"} <= set(lines)
    for name in ("layer_norm_backward", "grid_sampler_3d_backward"):
        found = f"found CANN {cann}; expected CANN 8.5 or newer"
        assert f"note  {name} is not available: {found}" in lines
    assert not any("grid_sampler_2d_backward" in line for line in lines)
