"""The layers: drop-in replacements of torch's, and the residual blocks and stages of the papers."""

from wnfused.nn._layer import WeightNormalised
from wnfused.nn._weight import EffectiveWeight
from wnfused.nn.conv import WNConv1d, WNConv2d, WNConv3d
from wnfused.nn.conv_transpose import WNConvTranspose1d, WNConvTranspose2d, WNConvTranspose3d
from wnfused.nn.fixup import FixupBlock, ScalarBias, fixup_scalars
from wnfused.nn.lazy import (
    WNLazyConv1d,
    WNLazyConv2d,
    WNLazyConv3d,
    WNLazyConvTranspose1d,
    WNLazyConvTranspose2d,
    WNLazyConvTranspose3d,
    WNLazyLinear,
)
from wnfused.nn.linear import WNLinear
from wnfused.nn.residual import PlainResidualBlock, StageBlock, WNResidualBlock, WNResidualStage

__all__ = [
    "EffectiveWeight",
    "FixupBlock",
    "PlainResidualBlock",
    "ScalarBias",
    "StageBlock",
    "WNConv1d",
    "WNConv2d",
    "WNConv3d",
    "WNConvTranspose1d",
    "WNConvTranspose2d",
    "WNConvTranspose3d",
    "WNLazyConv1d",
    "WNLazyConv2d",
    "WNLazyConv3d",
    "WNLazyConvTranspose1d",
    "WNLazyConvTranspose2d",
    "WNLazyConvTranspose3d",
    "WNLazyLinear",
    "WNLinear",
    "WNResidualBlock",
    "WNResidualStage",
    "WeightNormalised",
    "fixup_scalars",
]
