"""What ``wnfused probe --what`` can name: the measurements of ``wnfused.diagnostics`` and how each is printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from wnfused import diagnostics
from wnfused.diagnostics.drawing import Drawable

Measure = Callable[[nn.Module, Tensor, Tensor, bool], Drawable]


@dataclass(frozen=True)
class Measurement:
    """One that ``--what`` names.

    Attributes:
        measure: from (model, inputs, targets, progress) to the result.
        columns: its fields to print, by heading: one value for each station, or a single one.
        title: of the picture.
        samples: how many images, unless told.
        independent: whether it needs samples that do not see each other: batch norm is then put into eval mode, with
            the statistics of the measured images.
        double: float64 instead of float32.
    """

    measure: Measure
    columns: Mapping[str, str]
    title: str
    samples: int = 64
    independent: bool = False
    double: bool = True


MEASUREMENTS = {
    "norms": Measurement(
        lambda m, x, y, p: diagnostics.layer_norms(m, x, y, progress=p),
        {"activation": "activation", "gradient": "gradient"},
        "Norms of activations and gradients",
    ),
    "hessian": Measurement(
        lambda m, x, y, p: diagnostics.hessian_norm(m, x, y, samples=len(x), progress=p),
        {"norm": "norm", "eigenvalue": "eigenvalue", "iterations": "iterations"},
        "Spectral norm of the loss's Hessian",
        samples=1024,
        # Hundreds of products, each over all images: float32 takes a quarter of the time.
        double=False,
    ),
    "jacobian": Measurement(
        lambda m, x, y, p: diagnostics.jacobian_spectrum(m, x, progress=p),
        {"mean of J J^T": "mean", "variance": "variance"},
        "Input-output Jacobian",
        independent=True,
    ),
    "layer-jacobians": Measurement(
        lambda m, x, y, p: diagnostics.layer_jacobians(m, x, progress=p),
        {"largest": "largest", "chi": "mean"},
        "Jacobian of each layer",
        samples=4,
        independent=True,
    ),
    "jacobian-growth": Measurement(
        lambda m, x, y, p: diagnostics.jacobian_growth(m, x, progress=p),
        {"mean of J J^T": "growth"},
        "Jacobian from the input to each layer",
        independent=True,
    ),
    "orthogonality": Measurement(
        lambda m, x, y, p: diagnostics.orthogonality(m, x, progress=p),
        {"gap V": "gap", "W2^2": "distance"},
        "Orthogonality of representations",
        samples=8,
    ),
    "similarity": Measurement(
        lambda m, x, y, p: diagnostics.similarity(m, x, progress=p),
        {"|cos|": "absolute_cosine", "cos": "cosine"},
        "Similarity of representations",
    ),
    "gradient-bounds": Measurement(
        lambda m, x, y, p: diagnostics.activation_gradient_bounds(m, x, y, progress=p),
        {"gradient": "gradients", "bound": "bounds"},
        "Gradients and their lower bound",
    ),
    "parameter-bounds": Measurement(
        lambda m, x, y, p: diagnostics.parameter_gradient_bounds(m, x, y, progress=p),
        {"gradient": "gradient", "bound": "bound"},
        "Gradients of homogeneous sets and their lower bound",
    ),
}
