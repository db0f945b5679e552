"""Records that tests ask for by name, however many there are."""

from __future__ import annotations

from npugrad.ops import get_operator

MSDA = get_operator("multi_scale_deformable_attention_grad")
GRID_SAMPLER = get_operator("grid_sampler_2d_backward")
GROUP_NORM = get_operator("group_norm_backward")
FLOYD = get_operator("fused_floyd_attention_grad")
LAYER_NORM = get_operator("layer_norm_backward")
GRID_SAMPLER_3D = get_operator("grid_sampler_3d_backward")
