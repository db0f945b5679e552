"""Runs an example as its documentation says: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "client" / "examples"


def run_example(name: str, *arguments: str, limit_s: float = 250) -> subprocess.CompletedProcess[str]:
    """Runs one to its end; output and errors as text."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    # More threads of PyTorch only wait for each other where other tests run.
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=one, capture_output=True, text=True, timeout=limit_s, check=False)
