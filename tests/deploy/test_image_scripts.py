"""The scripts of the image's build: the account, the compiler and the check, run for real."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.deploy import image

from npugrad_server.backends.cpu.kernels import LIBRARIES as LOADED
from npugrad_server.backends.cpu.kernels import usable_variants

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "deploy" / "image"
ACCOUNT = "HwHiAiUser"
HOME = f"/home/{ACCOUNT}"
SETTING = "NPUGRAD_BUILD_KERNELS"

# ------------------------------------------------------------------------------------- the compiler


def test_no_compiler_is_installed_where_none_was_asked_for_or_the_base_has_one() -> None:
    assert f"compiler.sh: {SETTING}=0" in _installed({}, **{SETTING: "0"}).stdout
    made = _installed({"clang++": "exit 0", "apt-get": "echo apt-get $*"})
    assert (made.returncode, "apt-get" in made.stdout) == (0, False), made


@pytest.mark.parametrize(
    ("manager", "packages"),
    [
        ("apt-get", ["g++"]),
        ("dnf", ["gcc-c++", "libstdc++-static"]),
        ("yum", ["gcc-c++", "libstdc++-static"]),
    ],
)
def test_compiler_comes_by_the_package_manager_of_the_base(manager: str, packages: list[str]) -> None:
    made = _installed({manager: f"echo {manager} $*"})
    assert made.returncode == 0, made.stderr
    installs = [line for line in made.stdout.splitlines() if line.startswith(f"{manager} install ")]
    assert [line.split()[-1] for line in installs] == packages
    assert all("-y" in line or "--yes" in line or "--assumeyes" in line for line in installs), (
        "nobody answers"
    )


def test_static_runtime_is_no_must_but_the_compiler_is() -> None:
    no_static = 'case "$*" in *static) exit 1 ;; esac'
    assert _installed({"dnf": no_static}).returncode == 0
    assert _installed({"dnf": "exit 1"}).returncode == 1
    assert _installed({"apt-get": "exit 100"}).returncode == 100
    made = _installed({})
    assert made.returncode == 1
    assert f"no apt-get, dnf or yum to install one with; take a base with a compiler, or {SETTING}=0" in (
        made.stderr
    )


# ---------------------------------------------------------------------------------------- the check


@pytest.mark.deep
@pytest.mark.slow
def test_check_fails_the_build_unless_kernels_load_or_nobody_asked_for_them(tmp_path: Path) -> None:
    server = _server(tmp_path)
    made = _checked(server, NPUGRAD_KERNELS_VARIANT="none")
    assert (made.returncode, "no compiled kernels; NPUGRAD_BUILD_KERNELS=0" in made.stderr) == (1, True), made
    # A build shares the ports of its host with whatever runs there, at times with a server of ours.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        listen = {"NPUGRAD_LISTEN": address, "NPUGRAD_METRICS_LISTEN": address}
        made = _checked(server, NPUGRAD_KERNELS_VARIANT="none", NPUGRAD_BUILD_KERNELS="0", **listen)
    assert (made.returncode, "cpu-reference" in made.stdout, "FAIL" in made.stdout) == (0, True, False), made
    made = _checked(server, NPUGRAD_DRAIN_TIMEOUT_S="soon", NPUGRAD_BUILD_KERNELS="0")
    assert (made.returncode, "FAIL" in made.stdout) == (1, True), made
    if usable_variants() and any(LOADED.glob("*.so")):
        assert _checked(server).returncode == 0


def test_build_for_real_says_why_a_machine_cannot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert image.main([]) == 0
    assert capsys.readouterr().out.startswith("image: skipped: no mmdebstrap, buildah, ")


# -------------------------------------------------------------------------------------- the account

PASSWD = "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
GROUP = "root:x:0:\ndaemon:x:1:\nsudo:x:27:ubuntu\n"
OURS = f"{ACCOUNT}:x:1000:1000:npugrad server:{HOME}:/usr/sbin/nologin\n"


OUR_GROUP = f"{ACCOUNT}:x:1000:\n"
KEPT = f"{PASSWD}{ACCOUNT}:x:1000:1000::/home/{ACCOUNT}:/bin/bash\n", f"{GROUP}{ACCOUNT}:x:1000:HwDmUser\n"
LAST = "last:x:1001:1001::/:/bin/false\n"


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ((PASSWD, GROUP), (PASSWD + OURS, GROUP + OUR_GROUP)),
        ((PASSWD.rstrip("\n"), GROUP.rstrip("\n")), (PASSWD + OURS, GROUP + OUR_GROUP)),
        (KEPT, KEPT),
        (
            (
                f"{PASSWD}ubuntu:x:1000:1000:Ubuntu:/:/bin/bash\n{LAST}",
                f"{GROUP}ubuntu:x:1000:\nlast:x:1001:\n",
            ),
            (PASSWD + LAST + OURS, f"{GROUP}last:x:1001:\n{OUR_GROUP}"),
        ),
    ],
    ids=["none", "none, and no end of the last line", "ours", "another one of the number"],
)
def test_account_is_there_once_whatever_the_base_has(
    base: tuple[str, str], expected: tuple[str, str], tmp_path: Path
) -> None:
    for given in (base, expected):  # a second time changes nothing
        made = _make_account(tmp_path, *given)
        assert made.returncode == 0, made.stderr
        assert ((tmp_path / "etc/passwd").read_text(), (tmp_path / "etc/group").read_text()) == expected


@pytest.mark.parametrize(
    ("passwd", "group", "reason"),
    [
        (f"{ACCOUNT}:x:1001:1000::{HOME}:/bin/sh\n", f"{ACCOUNT}:x:1000:\n", "the number 1001"),
        (f"{ACCOUNT}:x:1000:1000::{HOME}:/bin/sh\n", f"{ACCOUNT}:x:1001:\n", "the number 1001"),
        (f"{ACCOUNT}:x:1000:100::{HOME}:/bin/sh\n", f"{ACCOUNT}:x:1000:\n", "the group 100"),
    ],
)
def test_base_whose_account_cannot_open_devices_fails_the_build(
    tmp_path: Path, passwd: str, group: str, reason: str
) -> None:
    made = _make_account(tmp_path, PASSWD + passwd, GROUP + group)
    assert made.returncode != 0
    assert reason in made.stderr


# ---------------------------------------------------------------------------------------- helpers


def _make_account(root: Path, passwd: str, group: str) -> subprocess.CompletedProcess[str]:
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/passwd").write_text(passwd)
    (root / "etc/group").write_text(group)
    command = ["sh", str(IMAGE / "account.sh"), str(root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _installed(tools: dict[str, str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run compiler.sh where there are only these commands, each a line of shell."""
    with tempfile.TemporaryDirectory() as folder:
        for name, line in tools.items():
            (Path(folder) / name).write_text(f"#!/bin/sh\n{line}\n")
            (Path(folder) / name).chmod(0o755)
        return _script("compiler.sh", PATH=folder, **environment)


def _server(folder: Path) -> Path:
    """Return a command npugrad-server that runs this checkout."""
    server = folder / "npugrad-server"
    server.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m npugrad_server "$@"\n')
    server.chmod(0o755)
    return server


def _checked(server: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run check.sh with this command and no setting of ours but these."""
    free = {name: value for name, value in os.environ.items() if not name.startswith("NPUGRAD_")}
    return _script("check.sh", str(server), **{**free, **environment})


def _script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", str(IMAGE / name), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
