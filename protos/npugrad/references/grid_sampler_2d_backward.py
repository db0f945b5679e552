"""Float64 reference of aclnnGridSampler2DBackward."""

from npugrad.references._grid_sampling import reference

__all__ = ["reference"]
