"""The ops as functions of tensors: ``weight_norm``, ``linear``, ``conv1d/2d/3d``, ``residual_stage``."""

from wnfused.ops import conv1d, conv2d, conv3d, linear, residual_stage, weight_norm

__all__ = ["conv1d", "conv2d", "conv3d", "linear", "residual_stage", "weight_norm"]
