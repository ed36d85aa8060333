"""The ops as functions of tensors: weight norms of one tensor and of many, layers, the residual stage."""

from wnfused.ops.conv import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from wnfused.ops.linear import linear
from wnfused.ops.residual_stage import residual_stage
from wnfused.ops.weight_norm import weight_norm
from wnfused.ops.weight_norm_many import row_scales_many, weight_norm_many

__all__ = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "linear",
    "residual_stage",
    "row_scales_many",
    "weight_norm",
    "weight_norm_many",
]
