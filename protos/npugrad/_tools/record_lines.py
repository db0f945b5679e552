"""Counts the lines that records take.

python protos/npugrad/_tools/record_lines.py
"""

from __future__ import annotations

from pathlib import Path

NPUGRAD = Path(__file__).resolve().parents[1]
FIRST = (
    *("multi_scale_deformable_attention_grad", "grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    *("group_norm_backward", "layer_norm_backward", "fused_floyd_attention_grad"),
)
"""The operators that were there before records followed their pages."""
VOCABULARY = ("page.py", "citing.py", "changes.py", "rules/*.py")


def lines(*patterns: str) -> int:
    """Lines of the files below `npugrad` that match."""
    files = {path for pattern in patterns for path in NPUGRAD.glob(pattern)}
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def counted() -> dict[str, int]:
    """Lines of the first records with what they share, of workloads, and of what records are written in."""
    shared = ("ops/_normalisation.py", "ops/_grid_sampler.py")
    return {
        "records": lines(*shared, *(f"ops/{name}.py" for name in FIRST)),
        "workloads": lines("ops/_*_workloads.py"),
        "vocabulary": lines(*VOCABULARY),
        "derivation": lines("derivation.py"),
    }


def operators() -> dict[str, int]:
    """Lines of each later record and its reference."""
    names = (path.stem for path in (NPUGRAD / "ops").glob("*.py") if path.stem[0] != "_")
    return {name: lines(f"ops/{name}.py", f"references/{name}.py") for name in sorted({*names} - {*FIRST})}


if __name__ == "__main__":
    for what, number in {**counted(), **operators()}.items():
        print(f"{number:5} {what}")
