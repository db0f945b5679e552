"""Prometheus and its tools: those on the path, else Debian's packages unpacked under `build/`."""

from __future__ import annotations

import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "prometheus"
_PACKAGES = {
    "promtool": "prometheus",
    "prometheus": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
}
_TEMPLATES = {"prometheus-alertmanager": Path("/usr/share/prometheus/alertmanager/default.tmpl")}
"""What Debian's programs look for at a fixed place, so that unpacking them is not enough."""
_DOWNLOAD_S = 120


@lru_cache
def program(name: str) -> Path:
    """A program of Prometheus; the test is skipped where it can neither be found nor fetched."""
    if found := shutil.which(name):
        return Path(found)
    path = FOLDER / "usr" / "bin" / name
    if not path.exists():
        _unpack(_PACKAGES[name])
    if not path.exists() or (name in _TEMPLATES and not _TEMPLATES[name].exists()):
        pytest.skip(f"{name} is neither installed nor can it be had: apt-get install {_PACKAGES[name]}")
    return path


def _unpack(package: str) -> None:
    """Fetches a package, which needs no rights, and unpacks it; two processes may do so at once."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["apt-get", "-q", "download", package],
        cwd=FOLDER, capture_output=True, timeout=_DOWNLOAD_S, check=False,
    )  # fmt: skip
    for archive in FOLDER.glob(f"{package}_*.deb"):
        subprocess.run(
            ["dpkg-deb", "-x", archive, FOLDER], capture_output=True, timeout=_DOWNLOAD_S, check=False
        )
