"""Singular values of the input-output Jacobian of a network, or of a part of it, sample by sample.

    J_i = d f(x_i) / d x_i  [d_out, d_in],    singular values s_1 >= s_2 >= ...

All near 1 is dynamical isometry; the mean eigenvalue of ``J J^T``, ``||J||_F^2 / d_out``, is ``chi^L`` in a wide random
network of L layers (``wnfused.diagnostics.mean_field``). Source: Hlav (2019), eq. 1 to 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wnfused._numbers import positive
from wnfused.diagnostics.arguments import (
    check_by_sample,
    check_differentiable,
    check_inputs,
    check_model,
    gaussian,
    seeded,
)
from wnfused.diagnostics.drawing import THEORY, Drawable, logarithmic
from wnfused.diagnostics.lanczos import Product, finite_svdvals, largest_singular_values
from wnfused.diagnostics.progress import Progress, advancing
from wnfused.diagnostics.state import outputs_of, undisturbed

METHODS = ("auto", "exact", "lanczos")
# Up to so many products, and so many numbers in all matrices together, a Jacobian is written out.
_EXACT_SIDE, _EXACT_NUMBERS = 512, 2**26


@dataclass(frozen=True, eq=False)
class JacobianSpectrum(Drawable):
    """What ``jacobian_spectrum`` found for n samples.

    Attributes:
        singular_values: ``[n, r]``, falling; all ``min(d_out, d_in)`` if ``exact``, else the largest.
        exact: whether J was written out.
        outputs: ``d_out``.
        inputs: ``d_in``.
        mean: of the ``d_out`` eigenvalues of ``J J^T`` ``[n]``; estimated from probes unless ``exact``.
        variance: of the same eigenvalues ``[n]``, estimated likewise.
    """

    singular_values: np.ndarray
    exact: bool
    outputs: int
    inputs: int
    mean: np.ndarray
    variance: np.ndarray

    def _draw(self, axes: Sequence[Any], label: str | None) -> None:
        (axis,) = axes
        # Of a rank-deficient J some are 0, or of rounding's size, which no axis should show.
        largest = self.singular_values.max(axis=1, keepdims=True, initial=0)
        values = np.where(self.singular_values > 1e-7 * largest, self.singular_values, np.nan)
        side = min(self.outputs, self.inputs)
        x = 100 * (np.arange(values.shape[1]) + 0.5) / side
        (line,) = axis.plot(
            x, _quiet(np.nanmedian, values), linewidth=2, label=label, marker="o" if values.shape[1] <= 40 else None,
            markersize=4,
        )  # fmt: skip
        axis.fill_between(
            x, _quiet(np.nanmin, values), _quiet(np.nanmax, values), color=line.get_color(), alpha=0.15, linewidth=0
        )
        axis.axhline(1, color=THEORY, linewidth=1, linestyle=":")
        logarithmic(axis, values)
        axis.set_xlabel(f"rank among the {side} singular values (%)")
        axis.set_ylabel("singular value of $J$\n(median; band: all samples)")


def jacobian_spectrum(
    model: nn.Module,
    inputs: Tensor,
    *,
    start: str | None = None,
    end: str | None = None,
    method: str = "auto",
    count: int = 10,
    probes: int = 16,
    generator: torch.Generator | None = None,
    progress: Progress = False,
) -> JacobianSpectrum:
    """Singular values of ``d end / d start`` for each of the samples ``inputs [n, ...]``, all samples at once.

    NaN for a sample whose f(x) is not finite, as of NaN in its input.

    Args:
        start: name of the module whose output is x; default: the model's input, which must be floating point.
        end: name of the module whose output is f(x); default: the model's output. Neither may be called
            more than once.
        method: ``"exact"`` writes J out by ``min(d_out, d_in)`` products and finds all singular values; ``"lanczos"``
            finds the largest ``count`` by products alone, as networks with large maps need (of equal ones among many
            others perhaps one alone); ``"auto"``: exact up to 512 products.
        probes: random vectors that estimate mean and variance with ``"lanczos"``.
        generator: of the probes; default: seeded with 0.
        progress: True for a bar on the terminal, or a function of (products done, products in all or None).

    Raises:
        TypeError, ValueError: naming the argument that cannot work; a model whose batch norm takes its statistics from
            the batch, where samples have no Jacobians of their own; x or f(x) that are not one for each sample.
        RuntimeError: inside of ``torch.inference_mode()``.

    Source: eq. 1 of Hlav (2019); Golub & Kahan (1965) for the bidiagonalisation.
    """
    check_model(model)
    check_inputs(inputs)
    check_independent(model)
    check_differentiable()
    positive(count=count, probes=probes)
    if method not in METHODS:
        raise ValueError(f"method: unknown {method!r}; use one of {', '.join(METHODS)}")
    with undisturbed(model), torch.enable_grad():
        x, y = _ends(model, inputs, start, end)
        return spectrum(Products(x, y), method, count, probes, seeded(generator), progress)


def spectrum(
    products: Products, method: str, count: int, probes: int, generator: torch.Generator, progress: Progress,
    tolerance: float = 1e-6,
) -> JacobianSpectrum:  # fmt: skip
    """The measurement, once there is a way to multiply by J; ``tolerance`` is that of Lanczos."""
    n, d_out, d_in = products.samples, products.outputs, products.inputs
    side = min(d_out, d_in)
    small = side <= _EXACT_SIDE and n * d_out * d_in <= _EXACT_NUMBERS
    if method == "exact" or (method == "auto" and small):
        with advancing(progress, "Jacobian", side) as advance:
            values = products.where_finite(finite_svdvals(products.matrix(advance)))
        squares = values.square()
        mean = squares.sum(1) / d_out
        variance = squares.square().sum(1) / d_out - mean.square()
        return JacobianSpectrum(
            values.cpu().numpy(), True, d_out, d_in, mean.cpu().numpy(), variance.clamp(min=0).cpu().numpy()
        )
    with advancing(progress, "Jacobian", None) as advance:
        forward: Product = products.forward
        transposed: Product = products.transposed
        if d_in > d_out:
            forward, transposed = transposed, forward
        start = gaussian((n, side), generator, products.like)
        values = largest_singular_values(
            forward, transposed, start, min(count, side), tolerance=tolerance, generator=generator, advance=advance
        )
        mean, variance = _probed(products, probes, generator, advance)
    values, mean, variance = (products.where_finite(found) for found in (values, mean, variance))
    return JacobianSpectrum(values.cpu().numpy(), False, d_out, d_in, mean.cpu().numpy(), variance.cpu().numpy())


def check_independent(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        if module.training:
            raise ValueError(
                f"model: batch norm {name!r} is in train mode, where a sample's output depends on the others; "
                "call model.eval(), after a pass in train mode that sets its statistics"
            )
        if module.running_mean is None or module.running_var is None:
            raise ValueError(
                f"model: batch norm {name!r} keeps no statistics, so that a sample's output depends on the others even "
                "in eval mode; build it with track_running_stats=True"
            )


def finite_samples(y: Tensor) -> Tensor:
    """For which samples all of y is finite ``[n]``: elsewhere a Jacobian may look as if nothing were wrong."""
    return y.detach().isfinite().reshape(len(y), -1).all(1)


class Products:
    """``v -> J v`` and ``u -> J^T u`` for all samples at once, from a graph of y as a function of x that is kept."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._x, self._y = x, y
        self.samples, self.like = len(x), x
        self.inputs, self.outputs = x[0].numel(), y[0].numel()
        self._finite = finite_samples(y)
        self._slope: tuple[Tensor, Tensor] | None = None

    def transposed(self, u: Tensor) -> Tensor:
        (product,) = torch.autograd.grad(
            self._y, self._x, self._as(u, self._y), retain_graph=True, materialize_grads=True
        )
        return product.detach().flatten(1)

    def forward(self, v: Tensor) -> Tensor:
        """``J^T u`` is linear in u, and J the transpose of its Jacobian: a second backward pass through the first."""
        if self._slope is None:
            u = torch.zeros_like(self._y).requires_grad_()
            (product,) = torch.autograd.grad(self._y, self._x, u, create_graph=True, materialize_grads=True)
            self._slope = u, product
        u, product = self._slope
        if not product.requires_grad:  # y does not depend on x
            return torch.zeros_like(u).flatten(1)
        (result,) = torch.autograd.grad(product, u, self._as(v, product), retain_graph=True, materialize_grads=True)
        return result.detach().flatten(1)

    def matrix(self, advance: Callable[[], None]) -> Tensor:
        """All J ``[n, d_out, d_in]`` in float64, row by row or column by column, whichever are fewer."""
        rows = self.outputs <= self.inputs
        side, product = (self.outputs, self.transposed) if rows else (self.inputs, self.forward)
        unit = torch.zeros(self.samples, side, dtype=self.like.dtype, device=self.like.device)
        parts = []
        for i in range(side):
            unit[:, i] = 1
            parts.append(product(unit).double())
            unit[:, i] = 0
            advance()
        return torch.stack(parts, 1 if rows else 2)

    def where_finite(self, found: Tensor) -> Tensor:
        """``found [n, ...]``, NaN for samples whose y is not finite."""
        keep = self._finite.to(found.device).reshape(-1, *[1] * (found.dim() - 1))
        return torch.where(keep, found, torch.nan)

    @staticmethod
    def _as(flat: Tensor, like: Tensor) -> Tensor:
        return flat.to(like.dtype).reshape(like.shape)


def _ends(model: nn.Module, inputs: Tensor, start: str | None, end: str | None) -> tuple[Tensor, Tensor]:
    """The tensors x and y with the graph between them."""
    found: dict[str, Tensor] = {}
    modules = dict(model.named_modules())
    for argument, name in (("start", start), ("end", end)):
        if name is not None and not (isinstance(name, str) and name in modules):
            raise ValueError(f"{argument}: the model has no module {name!r}")
    hooks = []

    def begin(module: nn.Module, _: Any, output: Any) -> Tensor | None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        return keep("x", output.detach().requires_grad_(), "start", start)

    def finish(module: nn.Module, _: Any, output: Any) -> Tensor | None:
        return keep("y", output, "end", end) if isinstance(output, Tensor) else None

    def keep(key: str, output: Tensor, argument: str, name: str | None) -> Tensor:
        if key in found:
            raise ValueError(f"{argument}: {name!r} is called more than once; name a module that is called once")
        found[key] = output
        return output.clone()  # which may be written in place

    try:
        if start is not None:
            hooks.append(modules[start].register_forward_hook(begin))
        if end is not None:
            hooks.append(modules[end].register_forward_hook(finish))
        if start is None:
            if not inputs.is_floating_point():
                raise TypeError(f"inputs: {inputs.dtype} has no derivatives; name a module as start")
            found["x"] = inputs.detach().clone().requires_grad_()
            output = outputs_of(model, found["x"])
        else:
            output = outputs_of(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if end is None:
        found["y"] = output
    for argument, name, key in (("start", start, "x"), ("end", end, "y")):
        source = repr(name or "the model")
        if not isinstance(found.get(key), Tensor):
            raise ValueError(f"{argument}: {source} was not called, or its output is no floating-point tensor")
        check_by_sample(f"{argument}: the output of {source}", found[key], len(inputs))
    x, y = found["x"], found["y"]
    if not y.requires_grad:
        raise ValueError(f"end: the output of {end or 'the model'!r} does not depend on {start or 'its input'!r}")
    return x, y


def _probed(
    products: Products, probes: int, generator: torch.Generator, advance: Callable[[], None]
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the eigenvalues of ``A = J J^T`` by Hutchinson's estimate with signs as probes:
    ``E u^T A u = tr A`` and ``E ||A u||^2 = tr A^2``."""
    n, d = products.samples, products.outputs
    traces = torch.zeros(2, n, dtype=torch.float64, device="cpu")
    for _ in range(probes):
        u = gaussian((n, d), generator, products.like).sign()
        back = products.transposed(u)
        there = products.forward(back)
        traces[0] += back.double().square().sum(1).cpu() / (d * probes)
        traces[1] += there.double().square().sum(1).cpu() / (d * probes)
        advance()
    return traces[0], (traces[1] - traces[0].square()).clamp(min=0)


def _quiet(reduce: Callable[..., np.ndarray], values: np.ndarray) -> np.ndarray:
    """Over the samples; NaN, without a warning, where all are."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return reduce(values, axis=0)
