"""`python -m tests.deploy.image`: builds the image for real, without an engine or a registry, and runs it.

The base is a Debian made on the spot, the builder is buildah with its own storage. The server then runs as
process 1 of what was built, as Kubernetes would run it: uid 1000, no capabilities, a read-only root file
system, the image's command and environment, the arguments of ``cpu.yaml``, but for TLS. Everything happens in
namespaces of its own, so whatever is mounted or started ends with this program, however it ends.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from tests.fix_server import ServerProcess
from tests.project.floor_call import call_all

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "image"
RELEASE = "bookworm"
PYTHON = (3, 11)
"""Python of that release: the wheels are fetched for it by this interpreter."""
PACKAGES = ("python3", "python3-venv", "ca-certificates")
TOOLS = ("mmdebstrap", "buildah", "unshare", "mount", "chroot", "du")
NAMESPACES = ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child=KILL"]
INSIDE = "--inside"
BASE, IMAGE = "localhost/npugrad-base:latest", "localhost/npugrad:latest"
HOME = "/home/HwHiAiUser"
ENVIRONMENT = "opt/npugrad"
# $1 is the root file system, the rest the command. The mounts are the manifests' and what a container has.
ENTER = f"""
root=$1; shift
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o size=512m,mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o size=512m,uid=1000,gid=1000 tmpfs "$root{HOME}"
mount -o remount,bind,ro "$root"
exec chroot "$root" setpriv --reuid=1000 --regid=1000 --clear-groups --bounding-set=-all --inh-caps=-all \
    --no-new-privs -- "$@"
"""


class Failed(RuntimeError):
    """A step did not do what it should; the message says which."""


def main(arguments: list[str]) -> int:
    """Builds and runs the image; 0 also where this machine cannot, which is said."""
    if arguments != [INSIDE]:
        if reason := why_not():
            print(f"image: skipped: {reason}")
            return 0
        command = [*NAMESPACES, "--mount-proc", sys.executable, "-m", "tests.deploy.image", INSIDE]
        return subprocess.run(command, cwd=ROOT, check=False).returncode
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        with storage() as build:
            base_bytes = make_base(build)
            fetch_wheels()
            make_image(build)
            run_image(build, base_bytes)
    except Failed as error:
        print(f"image: FAILED: {error}", file=sys.stderr)
        return 1
    print("image: all as it should be")
    return 0


def why_not() -> str:
    """Why this machine cannot build; empty if it can."""
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        return f"no {', '.join(missing)}; on Debian: apt-get install mmdebstrap buildah util-linux"
    if os.geteuid() != 0:
        return "needs root, to mount and to change users"
    if sys.version_info[:2] != PYTHON:
        wanted = ".".join(map(str, PYTHON))
        again = f"make test-image PYTHON=python{wanted} VENV=.venv{wanted}"
        return f"the wheels must be for Python {wanted}, which {RELEASE} has: {again}"
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


# ------------------------------------------------------------------------------------------- the build


@contextmanager
def storage() -> Iterator[list[str]]:
    folder = WORK / "storage"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    os.environ["BUILDAH_ISOLATION"] = "chroot"
    try:
        run = str(folder / "run")
        yield ["buildah", "--root", str(folder), "--runroot", run, "--storage-driver", "vfs"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_base(build: list[str]) -> int:
    """Makes the base image from the distribution's packages; returns its bytes."""
    packed = WORK / "rootfs.tar"
    if packed.exists():
        print(f"image: {packed.relative_to(ROOT)} is there already")
    else:
        making = packed.with_suffix(".part.tar")
        making.unlink(missing_ok=True)
        include = f"--include={','.join(PACKAGES)}"
        step("base", "mmdebstrap", "--variant=minbase", include, *_proxies(), RELEASE, making, *_sources())
        making.rename(packed)
    container = step("base from scratch", *build, "from", "scratch").strip()
    step("base unpacked", *build, "add", "--quiet", container, packed, "/")
    step("base committed", *build, "commit", "--quiet", "--rm", container, BASE)
    return packed.stat().st_size


def _sources() -> list[str]:
    """This host's own package sources if it is of that release; else mmdebstrap knows where to look."""
    if platform.freedesktop_os_release().get("VERSION_CODENAME") != RELEASE:
        return []
    known = ("/etc/apt/sources.list", "/etc/apt/sources.list.d/debian.sources")
    return [path for path in known if Path(path).exists() and Path(path).stat().st_size]


def _proxies() -> list[str]:
    told = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False).stdout
    return [f"--aptopt={line}" for line in told.splitlines() if re.match(r"Acquire::https?::.*Proxy", line)]


def fetch_wheels() -> None:
    pins = [f"deploy/image/requirements-{name}.txt" for name in ("build", "server")]
    asked = [part for path in pins for part in ("-r", path)]
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--require-hashes")
    step("wheels", *pip, "-d", WORK / "wheels", *asked)


def make_image(build: list[str]) -> None:
    """Builds the Dockerfile with those wheels and no index."""
    arguments = {"BASE": BASE, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels"}
    given = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
    step(
        "build", *build, "bud", "--network", "host", "--pull=never", "-v", f"{WORK / 'wheels'}:/wheels:ro",
        *given, "-t", IMAGE, ".",
    )  # fmt: skip


def step(name: str, *command: str | Path) -> str:
    """Runs one command, its output in two files; prints how long it took and returns its standard output."""
    told, errors = (WORK / f"{name.replace(' ', '-')}.{kind}" for kind in ("out", "log"))
    WORK.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    with told.open("w") as out, errors.open("w") as log:
        done = subprocess.run(list(map(str, command)), cwd=ROOT, stdout=out, stderr=log, check=False)
    if done.returncode:
        ends = (path.read_text(errors="replace").splitlines()[-30:] for path in (told, errors))
        lines = [f"{name}: exit code {done.returncode}; the end of {told} and {errors}:", *chain(*ends)]
        raise Failed("\n".join(lines))
    print(f"image: {name}: {time.monotonic() - started_s:.1f} s", flush=True)
    return told.read_text()


# --------------------------------------------------------------------------------------------- the run


def run_image(build: list[str], base_bytes: int) -> None:
    """Runs the server of the image and asks of it what a cluster would."""
    container = step("image opened", *build, "from", "--pull-never", IMAGE).strip()
    root = Path(step("image mounted", *build, "mount", container).strip())
    config = json.loads(step("image read", *build, "inspect", "--type", "image", IMAGE))["OCIv1"]["config"]
    look_inside(root, base_bytes)
    log_path = WORK / "server.log"
    command = [*NAMESPACES, "sh", "-euc", ENTER, "enter", str(root), *server_command(config)]
    started_s = time.monotonic()
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    running = ServerProcess(process, log_path)
    try:
        running.wait_ready()
        print(f"image: listening after {time.monotonic() - started_s:.1f} s", flush=True)
        ask(running, child_of(process.pid))
    finally:
        running.kill()


def look_inside(root: Path, base_bytes: int) -> None:
    """Says how large the image is, and that nothing is left in it of what made it."""
    environment, whole = (
        int(step(f"size of {name}", "du", "-sb", path).split()[0]) / 1e6
        for name, path in (("environment", root / ENVIRONMENT), ("image", root))
    )
    print(f"image: {whole:.0f} MB: base {base_bytes / 1e6:.0f}, environment {environment:.0f}")
    packages = f"{ENVIRONMENT}/lib/python*/site-packages"
    unwanted = (
        *(f"{ENVIRONMENT}/bin/pip*", f"{packages}/pip", f"{packages}/setuptools"),
        *("usr/bin/*g++*", "opt/build", "src", "dist", "wheels/*"),
    )
    expect("left behind of the build", [str(path) for each in unwanted for path in root.glob(each)], [])


def server_command(config: dict[str, Any]) -> list[str]:
    """The image's command and environment with the manifest's arguments, on free ports of the loopback."""
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes/cpu.yaml").read_text("utf-8"))
    (manifest,) = (document for document in documents if document["kind"] == "Deployment")
    arguments = manifest["spec"]["template"]["spec"]["containers"][0]["args"]
    plain = [each for each in arguments if not each.startswith("--tls-")]
    here = [re.sub(r"^(--(metrics-)?listen)=.*", r"\1=127.0.0.1:0", each) for each in plain]
    expect("user of the image", config["User"], "1000:1000")
    expect("signal of the image", config["StopSignal"], "SIGTERM")
    return ["env", "-i", f"--chdir={config['WorkingDir']}", *config["Env"], *config["Entrypoint"], *here]


def child_of(pid: int) -> int:
    """The process that unshare waits for: the server, number 1 in its namespace."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def ask(running: ServerProcess, pid: int) -> None:
    """Looks at the running server: rights, gradients, probes, and its end."""
    status = dict(re.findall(r"^(\w+):\s+(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    expect("number in its namespace", status["NSpid"].split()[-1], "1")
    expect("users and groups", (status["Uid"].split(), status["Gid"].split()), (["1000"] * 4, ["1000"] * 4))
    held = [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")]
    expect("capabilities", held, [0] * 5)
    expect("no new privileges", status["NoNewPrivs"], "1")
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    expect("root file system", [each[5].split(",")[0] for each in mounts if each[4] == "/"], ["ro"])
    (device,) = running.info().devices
    expect("backend", device.backend, "cpu")
    started_s = time.monotonic()
    calls = call_all(running.address)
    print(f"image: {calls} calls of all operators within tolerance: {time.monotonic() - started_s:.1f} s")
    pages = [running.page(path)[0] for path in ("/livez", "/readyz", "/metrics", "/")]
    expect("pages", pages, [200] * 3 + [404])
    started_s = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    expect("exit code after SIGTERM", running.wait(), 0)
    print(f"image: ended {time.monotonic() - started_s:.1f} s after SIGTERM")


def expect(what: str, found: object, expected: object) -> None:
    """Compares; raises `Failed` where they differ."""
    if found != expected:
        raise Failed(f"{what}: found {found!r}; expected {expected!r}")
    print(f"image: {what}: {found}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
