"""New interpreters, for what forks cannot show: imports, memory, what libraries read of the environment."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def printed(program: str, *arguments: object, timeout_s: float = 60, **options: Any) -> str:
    """What a program prints; the test fails with its standard error where it does.

    Args:
        program: Python code.
        arguments: Its command line.
        timeout_s: It is killed after that.
        options: Of `subprocess.run`.
    """
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
