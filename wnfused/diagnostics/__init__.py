"""What the papers measure of a network. Each result is a dataclass of plain arrays that can draw itself.

- ``layer_norms``: norms of activations and gradients over the layers, beside the theory's
- ``hessian_norm``: spectral norm of the loss's Hessian, by power iteration
- ``jacobian_spectrum``: singular values of a network's input-output Jacobian
- ``layer_jacobians``: of every layer's own
- ``jacobian_growth``: the mean eigenvalue of J J^T from the input to every layer
- ``orthogonality``: the gap V(H) over the layers, beside its bounds
- ``similarity``: cosines between samples' representations over the layers
- ``activation_gradient_bounds``, ``parameter_gradient_bounds``: gradients beside their lower bounds;
  ``homogeneous_sets``: the sets of parameters that the paper names
- ``layer_constant``, ``stage_growth``, ``STAGE_BAND``, ``mlp_growth``, ``resnet_growth``: closed forms for norms
- ``q_map``, ``fixed_point``, ``chi``, ``order_chaos_boundary``, ``phase_diagram``,
  ``jacobian_theory``: mean-field theory
- ``orthogonality_gap``, ``gaussian_distance``, ``gap_bound``, ``stationary_gap``: the same quantities of tensors
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
from wnfused.diagnostics.jacobian import JacobianSpectrum, jacobian_spectrum  # noqa: E402
from wnfused.diagnostics.layer_jacobians import (  # noqa: E402
    JacobianGrowth,
    LayerJacobians,
    jacobian_growth,
    layer_jacobians,
)
from wnfused.diagnostics.mean_field import (  # noqa: E402
    JacobianTheory,
    PhaseDiagram,
    chi,
    fixed_point,
    jacobian_theory,
    order_chaos_boundary,
    phase_diagram,
    q_map,
)
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
    "JacobianGrowth",
    "JacobianSpectrum",
    "JacobianTheory",
    "LayerJacobians",
    "NormProfile",
    "Norms",
    "OrthogonalityProfile",
    "ParameterBounds",
    "PhaseDiagram",
    "SimilarityProfile",
    "activation_gradient_bounds",
    "chi",
    "fixed_point",
    "gap_bound",
    "gaussian_distance",
    "hessian_norm",
    "homogeneous_sets",
    "jacobian_growth",
    "jacobian_spectrum",
    "jacobian_theory",
    "layer_constant",
    "layer_jacobians",
    "layer_norms",
    "mlp_growth",
    "order_chaos_boundary",
    "orthogonality",
    "orthogonality_gap",
    "parameter_gradient_bounds",
    "phase_diagram",
    "q_map",
    "resnet_growth",
    "similarity",
    "stage_growth",
    "stationary_gap",
]
