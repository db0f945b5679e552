"""Step 2: bytes survive the round trip to the device, through the pinned memory that calls use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad_server.acceptance.step import Step

if TYPE_CHECKING:
    from npugrad_server.acceptance.rig import Rig
    from npugrad_server.acceptance.step import StepLog

_PAGE = 4096
_PIECE_BYTES = 16 * 2**20
"""Size of the pieces into which a copy is split."""
_STAGING_BYTES, _SIMULATED_STAGING_BYTES = 256 * 2**20, 24 * 2**20
"""Maximum pinned memory per stream and direction; larger copies pass in turns. Less when simulated."""
_EDGES = (-1, 0, 1)
_SMALL = (0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 511, 513, 1000003)


def sizes(staging_bytes: int) -> list[int]:
    """Returns sizes in bytes: some small ones, and each limit of a copy, one less and one more.

    Args:
        staging_bytes: The largest limit.
    """
    limits = [_PAGE, 16 * _PAGE, 2**20, _PIECE_BYTES, staging_bytes]
    found = [*_SMALL, *(limit + edge for limit in limits for edge in _EDGES), 2 * staging_bytes + _PAGE + 1]
    # A short copy last reveals what the long ones left in reused memory.
    return [*found, 12345]


def run(rig: Rig, out: StepLog) -> None:
    """Copies, compares, and reports the rates."""
    staging = _SIMULATED_STAGING_BYTES if rig.settings.simulated else _STAGING_BYTES
    order = {
        "device": rig.settings.index,
        "staging_bytes": staging,
        "sizes": sizes(staging),
        "concurrent_bytes": staging + 1,
    }
    out.progress(0, 1, f"{len(sizes(staging))} sizes to the device and back")
    with rig.trial("copies") as trial:
        found = trial.run(order)
    for entry in found:
        out.check(
            f"{entry['name']}: {entry['nbytes']} bytes", not entry["wrong"], "0 bytes wrong", entry["wrong"]
        )
    rows = [
        (
            entry["name"],
            entry["nbytes"],
            _rate(entry["nbytes"], entry["in_s"]),
            _rate(entry["nbytes"], entry["out_s"]),
        )
        for entry in found
        if entry["nbytes"] >= _PIECE_BYTES
    ]
    out.table("Copies of 16 MiB and more", ("what", "bytes", "to the device, GB/s", "back, GB/s"), rows)
    queued = found[-1].get("queued_s", 0.0)
    total = found[-1]["in_s"]
    out.note(
        f"Queueing copies in both directions on two streams took {queued * 1e3:.2f} of the "
        f"{total * 1e3:.2f} ms until all had arrived; the smaller this share, the more runs asynchronously."
    )


def _rate(nbytes: int, seconds: float) -> float | None:
    return round(nbytes / seconds / 1e9, 3) if seconds else None


STEP = Step(
    2,
    "round_trip",
    "Round trips and pinned copies",
    "Buffers of awkward sizes come back unchanged, large ones in pieces, also copied both ways at once.",
    run,
)
