"""What the papers measure of a network. Each result is a dataclass of plain arrays that can draw itself.

hessian_norm                  spectral norm of the loss's Hessian, by power iteration
orthogonality                 the gap V(H) over the layers, beside its bounds
similarity                    cosines between samples' representations over the layers
layer_norms                   norms of activations and gradients over the layers, beside the theory's
activation_gradient_bounds, parameter_gradient_bounds     gradients beside their lower bounds

layer_constant, stage_growth, STAGE_BAND, mlp_growth, resnet_growth     closed forms for norms
orthogonality_gap, gaussian_distance, gap_bound, stationary_gap      the same quantities of tensors
"""

from wnfused.optional import require

require("numpy", "wnfused.diagnostics")

from wnfused.diagnostics.gradient_bounds import (  # noqa: E402
    ActivationBounds,
    ParameterBounds,
    activation_gradient_bounds,
    homogeneous_sets,
    parameter_gradient_bounds,
)
from wnfused.diagnostics.hessian import HessianNorm, hessian_norm  # noqa: E402
from wnfused.diagnostics.norms import NormProfile, Norms, layer_norms  # noqa: E402
from wnfused.diagnostics.orthogonality import (  # noqa: E402
    OrthogonalityProfile,
    gap_bound,
    gaussian_distance,
    orthogonality,
    orthogonality_gap,
    stationary_gap,
)
from wnfused.diagnostics.similarity import SimilarityProfile, similarity  # noqa: E402
from wnfused.diagnostics.theory import (  # noqa: E402
    STAGE_BAND,
    layer_constant,
    mlp_growth,
    resnet_growth,
    stage_growth,
)

__all__ = [
    "STAGE_BAND",
    "ActivationBounds",
    "HessianNorm",
    "NormProfile",
    "Norms",
    "OrthogonalityProfile",
    "ParameterBounds",
    "SimilarityProfile",
    "activation_gradient_bounds",
    "gap_bound",
    "gaussian_distance",
    "hessian_norm",
    "homogeneous_sets",
    "layer_constant",
    "layer_norms",
    "mlp_growth",
    "orthogonality",
    "orthogonality_gap",
    "parameter_gradient_bounds",
    "resnet_growth",
    "similarity",
    "stage_growth",
    "stationary_gap",
]
