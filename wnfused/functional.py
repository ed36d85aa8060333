"""The ops as functions of tensors: ``weight_norm``, ``linear``, ``conv1d/2d/3d``, ``residual_stage``."""

from wnfused.ops.conv import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from wnfused.ops.linear import linear
from wnfused.ops.residual_stage import residual_stage
from wnfused.ops.weight_norm import weight_norm

__all__ = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "linear",
    "residual_stage",
    "weight_norm",
]
