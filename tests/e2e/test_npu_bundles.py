"""What is in the file to send after an acceptance went wrong in each of many ways. All is SIMULATED.

A few ways are tried in each run of the tests, all of them by `make prove-bundles`.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tests.bundles import contents
from tests.cann_sim.build import Installation
from tests.fix_npu import npu_environment

from npugrad_server.acceptance.report import Report, StepReport

pytestmark = [pytest.mark.npu_sim, pytest.mark.slow]

_PROVE = os.environ.get("NPUGRAD_PROVE_BUNDLES") == "1"
_END_S = 540
_NO_CANN = {"ASCEND_HOME_PATH": "", "ASCEND_OPP_PATH": "", "LD_LIBRARY_PATH": ""}
_ROUND_TRIP = " 2  Round trips"
"""What is shown when step 2 begins."""


@dataclass(frozen=True)
class Failure:
    """One way to fail, and what has to be found of it.

    Attributes:
        name: In a few words.
        plan: Of the simulator.
        rung: Rung of the ladder that fails; empty when none does.
        words: What the ladder, or step 2 where no rung fails, says of it.
        env: Variables that differ.
        flags: Flags beside the steps, which are the ladder and, where it fails at no rung, step 2.
        number: Signal to send when step 2 has begun; None for none.
        data: Whether operands and results are kept.
        often: Whether it is tried in each run of the tests.
    """

    name: str
    plan: str = ""
    rung: str = ""
    words: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    number: signal.Signals | None = None
    data: bool = False
    often: bool = False


FLOYD = "aclnnFusedFloydAttentionGrad"
FAILURES = (
    Failure("no library", "", "load the runtime", "libascendcl.so cannot be loaded", _NO_CANN),
    Failure("no aclInit", "aclInit:*:507008:msg=no driver", "aclInit", "no driver"),
    Failure("no devices", "ndev=0", "find the devices", "found 0 devices"),
    Failure("no device", "aclrtSetDevice:*:507033", "set the device", "aclrtSetDevice returned 507033"),
    Failure(
        "device hangs",
        "aclrtSetDevice:*:hang",
        "set the device",
        "not ended within 6 s",
        {},
        ("--step-limit-s", "6"),
    ),
    Failure("no stream", "aclrtCreateStream:*:207005", "make a stream", "returned 207005"),
    Failure("no memory", "malloc:*:207001", "allocate memory", "aclrtMalloc returned 207001"),
    Failure("no copy", "aclrtMemcpyAsync:*:507010", "copy to the device", "returned 507010"),
    Failure("bytes change", "copy:1:corrupt", "synchronize", "bytes changed on the way"),
    Failure("crash", "aclrtMallocHost:*:crash", "allocate memory", "ended with status -11", often=True),
    Failure("killed", "aclrtMemcpyAsync:*:kill", "copy to the device", "ended with status -9"),
    Failure(
        "refused", f"{FLOYD}GetWorkspaceSize:*:561103:msg=why", "run fused_floyd_attention_grad", "561103"
    ),
    Failure("kernel fails", f"kernel.{FLOYD}:*:507015", "run fused_floyd_attention_grad", "returned 507015"),
    Failure(
        "kernel hangs",
        f"kernel.{FLOYD}:*:hang",
        "run fused_floyd_attention_grad",
        "507046",
        {},
        ("--step-limit-s", "12"),
    ),
    Failure(
        "wrong result",
        f"kernel.{FLOYD}:*:corrupt",
        "run fused_floyd_attention_grad",
        "outside",
        data=True,
        often=True,
    ),
    Failure(
        "torch_npu does not load",
        words="torch_npu cannot be imported",
        env={"ASCEND_OPP_PATH": "/nonexistent"},
    ),
    Failure(
        "step takes too long",
        "copy_ms=30000",
        words="took longer than 15 s",
        flags=("--steps", "2", "--step-limit-s", "15"),
    ),
    Failure(
        "SIGTERM",
        "copy_ms=30000",
        words="interrupted by SIGTERM",
        flags=("--steps", "2"),
        number=signal.SIGTERM,
        often=True,
    ),
    Failure(
        "SIGINT", "copy_ms=30000", words="interrupted by SIGINT", flags=("--steps", "2"), number=signal.SIGINT
    ),
    Failure(
        "SIGKILL", "copy_ms=30000", words="not run, or not yet", flags=("--steps", "2"), number=signal.SIGKILL
    ),
)


def run(failure: Failure, folder: Path, environment: Mapping[str, str]) -> int:
    """Runs the command to its end, and sends the signal when step 2 has begun."""
    steps = ("--steps", "0" if failure.rung else "0,2")
    command = [sys.executable, "-m", "npugrad_server", "acceptance", *steps, *failure.flags]
    files = ["--report", str(folder / "out.json"), "--bundle", str(folder / "all.tar.gz")]
    with subprocess.Popen(
        [*command, *files], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        if failure.number is not None:
            assert any(line.startswith(_ROUND_TRIP) for line in process.stdout), "step 2 did not begin"
            process.send_signal(failure.number)
        said, _ = process.communicate(timeout=_END_S)
    assert "Traceback" not in said, said
    return process.returncode


@pytest.mark.parametrize(
    "failure",
    [pytest.param(one, id=one.name.replace(" ", "-")) for one in FAILURES if _PROVE or one.often],
)
def test_a_bundle_tells_what_went_wrong(
    failure: Failure, cann_sim: Installation, torch_npu: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "vendor" / "debug"
    logs.mkdir(parents=True)
    (logs / "device-0.log").write_text("[ERROR] the vendor's own words\n")
    environment = {
        **os.environ,
        **npu_environment(cann_sim, tmp_path, failure.plan),
        "ASCEND_PROCESS_LOG_PATH": str(logs.parent),
        "NPUGRAD_SECRET": "hush",
        **failure.env,
    }
    status = run(failure, tmp_path, environment)
    assert status == (-signal.SIGKILL if failure.number is signal.SIGKILL else 1)
    found = contents(tmp_path / "all.tar.gz")
    report = Report.from_json(found["report.json"].decode())
    assert not report.ok
    _judge_report(failure, report)
    _judge_files(failure, found)
    assert (tmp_path / "all.tar.gz").stat().st_size < 2**25
    print(
        failure.name, *(f"{s['stage']} {s['seconds']}" for s in json.loads(found["seconds.json"])), sep="; "
    )


def _judge_report(failure: Failure, report: Report) -> None:
    steps: dict[str, StepReport] = {step.key: step for step in report.steps}
    if failure.rung:
        checks = {check.name: check for check in steps["ladder"].checks}
        assert failure.words in checks[failure.rung].found
        names = list(checks)
        assert all(checks[name].ok for name in names[: names.index(failure.rung)])
        (table,) = steps["ladder"].tables
        seconds = [row[2] for row in table.rows if row[1] == "done"]
        assert all(isinstance(one, float) and one >= 0 for one in seconds)
    else:
        assert "ladder" not in steps or steps["ladder"].outcome == "passed"
        assert failure.words in steps["round_trip"].error


def _judge_files(failure: Failure, found: Mapping[str, bytes]) -> None:
    names = ("environment", "kernels", "ldd", "npu-smi", "packages", "system", "versions")
    assert all(found[f"node/{name}.txt"] for name in names)
    assert found["logs/0/debug/device-0.log"] == b"[ERROR] the vendor's own words\n"
    assert b"numpy==" in found["node/packages.txt"]
    assert not any(b"hush" in content for content in found.values())
    if "LD_LIBRARY_PATH" not in failure.env:
        assert b"libcann_sim.so =>" in found["node/ldd.txt"]
    kept = [name for name in found if name.endswith(".npz")]
    assert bool(kept) is failure.data
    for name in kept:
        with np.load(io.BytesIO(found[name])) as arrays:
            assert all(array.size for array in arrays.values())
    assert b"</html>" in found["report.html"]
