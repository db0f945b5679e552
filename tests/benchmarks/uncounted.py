"""`npugrad-server` whose metrics are told of calls and count none: what the counting costs shows beside it.

Run as ``python -m tests.benchmarks.uncounted serve ...``.
"""

from __future__ import annotations

from npugrad_server.cli import main
from npugrad_server.metrics import Metrics
from npugrad_server.pool import PoolObserver


def _count_nothing(*_: object, **__: object) -> None:
    """Stands for every method that counts."""


def _replace_counting() -> None:
    of_calls = ("call_arrived", "call_answered", "bytes_moved", "stages_passed", "device_rejected")
    of_the_pool = (name for name in vars(PoolObserver) if not name.startswith("_"))
    for name in (*of_calls, *of_the_pool):
        if not callable(getattr(Metrics, name)):
            raise TypeError(f"{name}: found no method of Metrics; expected one that counts")
        setattr(Metrics, name, _count_nothing)


if __name__ == "__main__":
    _replace_counting()
    main()
