"""What the papers measure of a network. Each result is a dataclass of plain arrays that can draw itself.

hessian_norm                  spectral norm of the loss's Hessian, by power iteration
orthogonality                 the gap V(H) over the layers, beside its bounds
similarity                    cosines between samples' representations over the layers
layer_norms                   norms of activations and gradients over the layers

orthogonality_gap, gaussian_distance, gap_bound, stationary_gap      the same quantities of tensors
"""

from wnfused.optional import require

require("numpy", "wnfused.diagnostics")

from wnfused.diagnostics.hessian import HessianNorm, hessian_norm  # noqa: E402
from wnfused.diagnostics.norms import Norms, layer_norms  # noqa: E402
from wnfused.diagnostics.orthogonality import (  # noqa: E402
    OrthogonalityProfile,
    gap_bound,
    gaussian_distance,
    orthogonality,
    orthogonality_gap,
    stationary_gap,
)
from wnfused.diagnostics.similarity import SimilarityProfile, similarity  # noqa: E402

__all__ = [
    "HessianNorm",
    "Norms",
    "OrthogonalityProfile",
    "SimilarityProfile",
    "gap_bound",
    "gaussian_distance",
    "hessian_norm",
    "layer_norms",
    "orthogonality",
    "orthogonality_gap",
    "similarity",
    "stationary_gap",
]
