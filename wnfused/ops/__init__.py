"""The ops: one file each, with schema, fake kernels, derivatives and the public function."""

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
