"""`python -m tests.server.kernels.sanitized address|thread`: the kernels' tests with a sanitizer's checks.

`address` has those of AddressSanitizer and UndefinedBehaviorSanitizer, and loads their runtimes into Python.
ThreadSanitizer would follow every lock of Python: a driver runs the calls in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.server.kernels.conftest import FOLDER, ROOT, VARIANT, load_builder
from tests.server.kernels.driven import DRIVER, build_driver

from npugrad_server.backends.cpu.kernels import usable_variants

# What Python never gives back would drown a leak of ours; calls abort where a check fails. Python's own
# allocator would put small results side by side, with nothing between them that a check could find.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:allocator_may_return_null=1",
    "PYTHONMALLOC": "malloc",
}


def main(arguments: list[str]) -> int:
    """Builds the libraries, then runs pytest on each variant."""
    kind, *rest = arguments or [""]
    if kind not in ("address", "thread"):
        sys.stderr.write("sanitized: expected `address` or `thread`, then arguments of pytest\n")
        return 2
    build = load_builder()
    compiler = build.find_compiler()
    names = ("thread",) if kind == "thread" else ("address", "undefined")
    folder = ROOT / "build" / f"kernels-{kind}"
    # Who waits for whom is the same in all variants.
    variants = [os.environ[VARIANT]] if os.environ.get(VARIANT) else list(usable_variants())
    variants = variants[:1] if kind == "thread" else variants
    for one in build.build(folder, variants=variants, sanitizers=names):
        print(f"kernels: {one.variant}: {'built' if one.fresh else 'up to date'} with {', '.join(names)}")
    chosen = _threads(compiler, folder, build) if kind == "thread" else _preloaded(compiler)
    statuses = {}
    for variant in variants:
        environment = {**os.environ, **OPTIONS, **chosen, FOLDER: str(folder), VARIANT: variant}
        # A report that ends the process shall not end with what pytest has captured.
        run = [sys.executable, "-m", "pytest", "--capture=sys", "tests/server/kernels", *rest]
        command = [*_plain_addresses(kind), *run]
        print(f"kernels: {variant}, checked by {', '.join(names)}", flush=True)
        statuses[variant] = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    for variant, status in statuses.items():
        print(f"kernels: {variant}: {'ok' if not status else f'pytest ended with {status}'}")
    return max(statuses.values())


def _preloaded(compiler: list[str]) -> dict[str, str]:
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    return {"LD_PRELOAD": " ".join(_runtime(compiler, name) for name in names)}


def _threads(compiler: list[str], folder: Path, build: Any) -> dict[str, str]:
    driver = build_driver(folder / "driver", compiler, build.SANITIZERS["thread"])
    return {DRIVER: str(driver)}


def _plain_addresses(kind: str) -> list[str]:
    """ThreadSanitizer's map of memory fits no address that newer kernels draw by chance."""
    command = [shutil.which("setarch") or "setarch", "--addr-no-randomize"]
    if kind != "thread":
        return []
    try:
        return command if not subprocess.run([*command, "true"], check=False).returncode else []
    except OSError:
        return []


def _runtime(compiler: list[str], name: str) -> str:
    done = subprocess.run([*compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return os.path.realpath(done.stdout.strip())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
