"""Calls that are made of aclnnFusedFloydAttentionGrad: sizes of models, and what small calls vary."""

from __future__ import annotations

from npugrad.workloads import Workload, Workloads, named


def _sizes(h: int, n: int, m: int, k: int, d: int) -> dict[str, int]:
    return {"b": 1, "h": h, "n": n, "m": m, "k": k, "d": d}


WORKLOADS = Workloads(
    named=named(
        Workload(name="tiny", sizes=_sizes(1, 16, 128, 128, 32)),  # the smallest that the page allows: 3 MiB
        Workload(name="small", sizes=_sizes(1, 16, 128, 128, 32)),
        Workload(name="medium", sizes=_sizes(1, 64, 128, 128, 32)),
        Workload(name="large", sizes=_sizes(1, 128, 128, 128, 64)),
        Workload(name="triangle", model="triangle attention", sizes=_sizes(1, 128, 128, 128, 32), shown=True),
        Workload(
            name="triangles",
            model="triangle attention of four heads",
            sizes=_sizes(4, 128, 128, 128, 64),
            simulated=_sizes(1, 16, 128, 128, 32),
        ),
        Workload(
            name="long",
            model="attention of pairs with long keys",
            sizes=_sizes(4, 64, 256, 384, 128),
            simulated=_sizes(1, 16, 256, 128, 32),
        ),
    ),
    variants={"with_mask": (False, True), "mask_dtype": ("bool", "uint8"), "d": (32, 64, 128)},
)
