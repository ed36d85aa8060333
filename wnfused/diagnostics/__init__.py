"""What the papers measure of a network. Each result is a dataclass of plain arrays that can draw itself.

hessian_norm                  spectral norm of the loss's Hessian, by power iteration
layer_norms                   norms of activations and gradients over the layers
"""

from wnfused.optional import require

require("numpy", "wnfused.diagnostics")

from wnfused.diagnostics.hessian import HessianNorm, hessian_norm  # noqa: E402
from wnfused.diagnostics.norms import Norms, layer_norms  # noqa: E402

__all__ = ["HessianNorm", "Norms", "hessian_norm", "layer_norms"]
