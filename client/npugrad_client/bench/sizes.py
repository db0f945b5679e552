"""Sizes of measured calls by operator; scenario files may give any others."""

from __future__ import annotations

from typing import Any

_LEVELS = ((50, 67), (25, 34), (13, 17))

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "multi_scale_deformable_attention_grad": {
        "small": {"bs": 1, "nq": 32, "nh": 2, "ch": 8, "levels": ((8, 8), (4, 4)), "points": 4},
        "medium": {"bs": 2, "nq": 300, "nh": 8, "ch": 32, "levels": _LEVELS, "points": 4},
        "large": {"bs": 2, "nq": 4484, "nh": 8, "ch": 32, "levels": _LEVELS, "points": 4},
    },
    "grid_sampler_2d_backward": {
        "small": {"n": 1, "c": 3, "h": 16, "w": 16, "oh": 16, "ow": 16},
        "medium": {"n": 4, "c": 3, "h": 128, "w": 128, "oh": 128, "ow": 128},
        "large": {"n": 4, "c": 64, "h": 128, "w": 128, "oh": 128, "ow": 128},
    },
    "group_norm_backward": {
        "small": {"n": 2, "c": 32, "hxw": 64, "group": 8},
        "medium": {"n": 2, "c": 128, "hxw": 1024, "group": 32},
        "large": {"n": 8, "c": 320, "hxw": 4096, "group": 32},
    },
    "fused_floyd_attention_grad": {
        "small": {"b": 1, "h": 1, "n": 16, "m": 128, "k": 128, "d": 32},
        "medium": {"b": 1, "h": 1, "n": 64, "m": 128, "k": 128, "d": 32},
        "large": {"b": 1, "h": 1, "n": 128, "m": 128, "k": 128, "d": 64},
    },
}
"""What `--size` chooses: keywords of each operator's `build`."""
