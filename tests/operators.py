"""Records that tests ask for by name, however many there are."""

from __future__ import annotations

from dataclasses import replace

from npugrad.ops import get_operator
from npugrad.references import multi_scale_deformable_attention_grad

MSDA = get_operator("multi_scale_deformable_attention_grad")
UNCHECKED_MSDA = replace(MSDA, reference=multi_scale_deformable_attention_grad.reference)
"""With the reference behind the check of levels, which drops what lies outside the keys, as kernels do."""
GRID_SAMPLER = get_operator("grid_sampler_2d_backward")
GROUP_NORM = get_operator("group_norm_backward")
FLOYD = get_operator("fused_floyd_attention_grad")
LAYER_NORM = get_operator("layer_norm_backward")
GRID_SAMPLER_3D = get_operator("grid_sampler_3d_backward")
