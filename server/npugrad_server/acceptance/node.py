"""Describes a node for a bundle, by files and commands bounded in time and size; loads no library."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from npugrad_server.acl.libraries import LAYOUTS, RUNTIME_LIBRARY, TENSOR_LIBRARY, cann_folders
from npugrad_server.npus import device_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from npugrad_server.acceptance.bundle import Bundle

_COMMAND_S = 20.0
_TOOL_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin"
"""Where the driver's installer puts its tools; a container's PATH may lack these folders."""
_MOST_LIBRARIES, _MOST_VERSION_FILES = 16, 200
_WALK_S, _WALK_FOLDERS = 20.0, 20_000
_SHOWN = re.compile(
    r"(ASCEND|ACL|ATB|CANN|HCCL|LD_LIBRARY_PATH|LD_PRELOAD|NPUGRAD|NPU_|OMP|PATH$|PYTHON|PYTORCH|STREAMS_PER_"
    r"|TASK_QUEUE|TORCH|TE_PARALLEL)"
)
"""How the names of variables to show begin."""
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|KEY|AUTH", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_INSTALLED = Path("/usr/local/Ascend")
_VERSION_FILES = (
    "version.info",
    "version.cfg",
    "ascend_toolkit_install.info",
    "ascend_install.info",
    "config.ini",
)
_SYSTEM_FILES = (
    "/etc/os-release",
    "/etc/ascend_install.info",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/self/limits",
    "/proc/self/cgroup",
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/cpu.max",
)


def collect(bundle: Bundle) -> None:
    """Adds everything below ``node/``; where something cannot be found out, its file says why."""
    facts: dict[str, Callable[[], str]] = {
        "environment.txt": lambda: _lines(shown_environment(os.environ)),
        "system.txt": _system,
        "npu-smi.txt": lambda: _command("npu-smi", "info"),
        "packages.txt": _packages,
        "versions.txt": _versions,
        "kernels.txt": _kernels,
        "ldd.txt": _dependencies,
    }
    with ThreadPoolExecutor(len(facts)) as threads:
        for name, fact in facts.items():
            threads.submit(_add, bundle, name, fact)


def log_folders() -> tuple[Path, ...]:
    """Returns the folders to which the vendor's libraries write their logs."""
    named = [os.environ.get("ASCEND_PROCESS_LOG_PATH"), os.environ.get("ASCEND_WORK_PATH")]
    return tuple(dict.fromkeys((*(Path(name) for name in named if name), Path.home() / "ascend" / "log")))


def shown_environment(environment: Mapping[str, str]) -> Iterator[str]:
    """Yields the variables that affect CANN, torch and this program, as lines; secrets only by name."""
    for name in sorted(environment):
        if _SHOWN.match(name):
            value = "(hidden)" if _SECRET.search(name) else _USER.sub("(hidden)", environment[name])
            yield f"{name}={value}"


def _add(bundle: Bundle, name: str, fact: Callable[[], str]) -> None:
    start = time.monotonic()
    try:
        text = fact()
    except Exception as error:
        text = f"{type(error).__name__}: {error}\n"
    bundle.add_text(f"node/{name}", text)
    bundle.took(f"node/{name}", time.monotonic() - start)


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _command(*command: str) -> str:
    """Returns the output of a command, and how it ended."""
    words = " ".join(command)
    path = shutil.which(command[0]) or shutil.which(command[0], path=_TOOL_FOLDERS)
    if path is None:
        return f"$ {words}\nnot found\n"
    try:
        done = subprocess.run(
            [path, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode("utf-8", "replace")
        return f"$ {words}\n{said}\ndid not end within {_COMMAND_S:g} s\n"
    return f"$ {words}\n{done.stdout.decode('utf-8', 'replace')}\nended with status {done.returncode}\n"


def _system() -> str:
    parts = [
        f"{platform.platform()}\nPython {platform.python_version()}, {platform.python_implementation()}\n"
    ]
    parts.append(f"user {os.getuid()}, groups {', '.join(map(str, os.getgroups()))}\n")
    shared = (path for pattern in ("*hisi*", "devmm*") for path in sorted(Path("/dev").glob(pattern)))
    for node in (*device_nodes(), *map(str, shared)):
        found = os.stat(node)
        parts.append(f"{node} mode {found.st_mode:o}, owner {found.st_uid}:{found.st_gid}\n")
    for name in _SYSTEM_FILES:
        path = Path(name)
        if path.exists():
            parts.append(f"\n# {name}\n{path.read_text(errors='replace')[:20_000]}")
    return "".join(parts)


def _packages() -> str:
    found = {f"{one.metadata['Name']}=={one.version}" for one in distributions()}
    return _lines(sorted(found, key=str.lower))


def _homes() -> tuple[Path, ...]:
    names = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH")
    named = [Path(os.environ[name]) for name in names if os.environ.get(name)]
    return tuple(dict.fromkeys((*named, _INSTALLED)))


def _versions() -> str:
    """Returns the version files of driver, firmware, CANN and operator packages, including add-ons."""
    places = ("*", "*/*", "*/*/*", "vendors/*", "opp/vendors/*")
    paths = {
        path.resolve(): path
        for home in _homes()
        for name in _VERSION_FILES
        for pattern in (name, *(f"{place}/{name}" for place in places))
        for path in sorted(home.glob(pattern))
    }
    some = list(paths.values())[:_MOST_VERSION_FILES]
    texts = (f"# {path}\n{path.read_text(errors='replace')[:4000]}\n" for path in some)
    return "".join(texts) or f"found no version file in {', '.join(map(str, _homes()))}\n"


def _kernels() -> str:
    """Lists the folders of compiled kernels, with the number of files and bytes in each."""
    named = os.environ.get("ASCEND_OPP_PATH")
    opp = Path(named) if named else next((home / "opp" for home in _homes() if (home / "opp").is_dir()), None)
    if opp is None:
        return "found no operator package: ASCEND_OPP_PATH is not set\n"
    lines, end_s = [f"# {opp}: folder, files, bytes"], time.monotonic() + _WALK_S
    for place, folders, names in os.walk(opp):
        folders.sort()
        if len(lines) > _WALK_FOLDERS or time.monotonic() > end_s:
            lines.append(f"... there is more: at most {_WALK_FOLDERS} folders, and {_WALK_S:g} s")
            break
        if names:
            nbytes = sum(os.lstat(os.path.join(place, name)).st_size for name in names)
            lines.append(f"{os.path.relpath(place, opp)} {len(names)} {nbytes}")
    return _lines(lines)


def _dependencies() -> str:
    """Returns what the loader finds for every library used, even for one that cannot be loaded."""
    folders = [*map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))), *cann_folders()]
    names = (RUNTIME_LIBRARY, TENSOR_LIBRARY, *(name for names in LAYOUTS.values() for name in names))
    paths = [folder / name for name in names for folder in folders]
    torch_npu = find_spec("torch_npu")
    if torch_npu is not None and torch_npu.origin is not None:
        paths.append(Path(torch_npu.origin).parent / "lib" / "libtorch_npu.so")
    there = list({path.resolve(): path for path in paths if path.is_file()}.values())
    with ThreadPoolExecutor(4) as threads:
        said = list(threads.map(lambda path: _command("ldd", str(path)), there[:_MOST_LIBRARIES]))
    return "".join(said) or "found none of the libraries\n"
