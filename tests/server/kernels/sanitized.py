"""`python -m tests.server.kernels.sanitized`: the kernels' tests with the sanitizers' checks compiled in."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "build" / "kernels-asan"
# What Python never gives back would drown a leak of ours; calls abort where a check fails.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}


def main(arguments: list[str]) -> int:
    """Builds the libraries, then runs pytest with the sanitizer's runtime loaded first."""
    build = _builder()
    for one in build.build(FOLDER, sanitizers=("address", "undefined")):
        print(f"kernels: {one.variant}: {'built' if one.fresh else 'up to date'} with sanitizers")
    runtimes = [
        _runtime(build.find_compiler(), name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    environment = {
        **os.environ,
        **OPTIONS,
        "LD_PRELOAD": " ".join(runtimes),
        "NPUGRAD_TEST_KERNELS": str(FOLDER),
    }
    command = [sys.executable, "-m", "pytest", "tests/server/kernels", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _runtime(compiler: list[str], name: str) -> str:
    done = subprocess.run([*compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return os.path.realpath(done.stdout.strip())


def _builder() -> Any:
    spec = importlib.util.spec_from_file_location("kernels_build", ROOT / "server" / "kernels" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
