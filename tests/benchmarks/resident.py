"""Resident memory of a process, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

_KIB = 1024


def status_bytes(field: str, pid: int | str = "self") -> int:
    """What ``/proc/PID/status`` says, such as ``VmRSS``, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * _KIB


def restart_peak(pid: int | str = "self") -> int:
    """Lets ``VmHWM`` start anew from what is there; returns that in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return status_bytes("VmRSS", pid)
