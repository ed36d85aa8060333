"""The spectral norm of the loss's Hessian at the parameters, by power iteration with exact second derivatives.

    H = d^2 l / d theta^2,   l = (1/M) sum_m l_m,   ||H||_2 = max |lambda_i(H)|

It limits the learning rate of gradient descent (to ``2 / ||H||_2`` on a quadratic); tables 2 of Arpit, Campos & Bengio
(2019) and 1 of Zhang, Dauphin & Ma (2019) compare initialisations by it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from wnfused._numbers import function, number, positive
from wnfused.diagnostics.arguments import (
    Loss,
    check_differentiable,
    check_inputs,
    check_model,
    check_targets,
    checked_loss,
    cross_entropy,
    gaussian,
    mini_batches,
    seeded,
)
from wnfused.diagnostics.drawing import Drawable, logarithmic
from wnfused.diagnostics.progress import Progress, advancing
from wnfused.diagnostics.state import forked, outputs_of, undisturbed


@dataclass(frozen=True, eq=False)
class HessianNorm(Drawable):
    """What ``hessian_norm`` found.

    Attributes:
        norm: ``||H v||`` of the last iteration: a lower bound on ``||H||_2`` that grows towards it.
        eigenvalue: the Rayleigh quotient ``v^T H v``, which has the sign of the eigenvalue of largest magnitude.
        residual: ``||H v - eigenvalue v||``: some eigenvalue of H is no further than this from ``eigenvalue``. Large
            beside ``norm`` only where two eigenvalues of opposite sign have nearly the same magnitude.
        converged: the last two estimates differ by less than ``tolerance``, relatively.
        estimates: ``||H v||`` after each iteration ``[iterations]``.
        samples: how many.
        parameters: how many numbers H has a row for.
    """

    norm: float
    eigenvalue: float
    residual: float
    converged: bool
    estimates: np.ndarray
    samples: int
    parameters: int

    @property
    def iterations(self) -> int:
        return len(self.estimates)

    def _draw(self, axes: Sequence[Any], label: str | None) -> None:
        (axis,) = axes
        value = f"{self.norm:.3g}" + ("" if self.converged else ", not converged")
        name = f"{label}: {value}" if label else value
        # Of a loss that overflows the last ones are not finite.
        estimates = np.where(np.isfinite(self.estimates) & (self.estimates > 0), self.estimates, np.nan)
        (line,) = axis.plot(np.arange(1, self.iterations + 1), estimates, linewidth=2, label=name)
        axis.plot([self.iterations], estimates[-1:], "o" if self.converged else "x", color=line.get_color())
        axis.set_xscale("log")
        logarithmic(axis, estimates)
        axis.set_xlabel("power iteration")
        axis.set_ylabel(r"$\|H v\|_2$, growing towards $\|H\|_2$")


def hessian_norm(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    loss: Loss | None = None,
    samples: int = 1024,
    batch_size: int | None = 128,
    tolerance: float = 1e-5,
    max_iterations: int = 1000,
    parameters: Iterable[Tensor] | None = None,
    generator: torch.Generator | None = None,
    progress: Progress = False,
) -> HessianNorm:
    """``||H||_2`` of the mean loss by ``v <- H v / ||H v||`` from a Gaussian start.

    ``H v`` is the gradient of ``<dl/dtheta, v>`` (Pearlmutter 1994), through the layers' own second derivatives; for a
    symmetric H the estimates ``||H v||`` never fall. ``torch.nn.utils``' weight norms, whose second derivatives are
    wrong, are computed by their formula meanwhile. The model is measured in the mode (train or eval) it is in, and
    left as it is. In train mode batch norm takes its statistics from each mini-batch: ``batch_size=None`` for
    statistics over all samples, as in the paper.

    Args:
        inputs, targets: ``[n, ...]``, of which the first ``samples`` are used.
        loss: from (outputs, targets) to the *sum* of the samples' losses; default: cross-entropy, whose targets are
            classes in int64 or probabilities.
        batch_size: samples differentiated at once, which bounds the memory; None: all, which keeps the gradient's
            graph from one iteration to the next and takes half the time.
        tolerance: relative change of the estimate at which to stop.
        max_iterations: at which to stop all the same, with ``converged`` False.
        parameters: theta; default: all parameters of the model that ask for a gradient. Those that do not affect the
            loss have second derivatives of 0.
        generator: of the start; default: seeded with 0.
        progress: True for a bar on the terminal, or a function of (iterations done, None).

    Raises:
        TypeError, ValueError: naming the argument that cannot work; targets that the cross-entropy does not take; a
            loss without a graph.
        RuntimeError: inside of ``torch.inference_mode()``.

    A loss whose derivatives overflow ends the iteration with a norm of inf or NaN and ``converged`` False.
    """
    check_model(model)
    check_inputs(inputs)
    check_differentiable()
    check_targets(targets, inputs)
    function(loss=loss)
    positive(samples=samples, max_iterations=max_iterations)
    if batch_size is not None:
        positive(batch_size=batch_size)
    number(tolerance=tolerance)
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance: {tolerance} must be above 0 and below 1")
    if isinstance(parameters, Tensor):
        raise TypeError("parameters: expected several tensors, got one; use [tensor]")
    if parameters is None:
        parameters = [p for p in model.parameters() if p.requires_grad]
    theta = [*parameters] if isinstance(parameters, Iterable) else [parameters]
    for p in theta:
        if not isinstance(p, Tensor):
            raise TypeError(f"parameters: expected tensors, got {p!r}")
    if not theta or not all(p.requires_grad for p in theta):
        raise ValueError(
            "parameters: none asks for a gradient" if not theta else "parameters: all must have requires_grad=True"
        )
    inputs, targets = inputs[:samples], targets[:samples]
    with undisturbed(model, freeze=False), torch.enable_grad(), _by_the_formula(model):
        product = _HessianProduct(model, theta, inputs, targets, loss or cross_entropy, batch_size)
        with advancing(progress, "power iteration", None) as advance:
            return _iterate(product, theta, tolerance, max_iterations, seeded(generator), advance)


@contextlib.contextmanager
def _by_the_formula(model: nn.Module) -> Iterator[None]:
    """While this holds, torch's two weight norms compute ``v g / ||v||`` by operations that have right second
    derivatives; those of torch's own are wrong."""
    # Attributes of an instance hide the methods of its class. Copies of a module share its hooks.
    hidden: dict[int, tuple[dict[str, Any], str]] = {}
    for module in model.modules():
        if isinstance(module, _WeightNorm) and "forward" not in module.__dict__:
            hidden[id(module)] = module.__dict__, "forward"
            module.__dict__["forward"] = functools.partial(_normalised, dim=module.dim)
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm) and id(hook) not in hidden:
                hidden[id(hook)] = hook.__dict__, "compute_weight"
                hook.__dict__["compute_weight"] = functools.partial(_hooked_weight, hook)
    try:
        yield
    finally:
        for attributes, name in hidden.values():
            del attributes[name]


def _normalised(g: Tensor, v: Tensor, dim: int) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _hooked_weight(hook: WeightNorm, module: nn.Module) -> Tensor:
    return _normalised(getattr(module, f"{hook.name}_g"), getattr(module, f"{hook.name}_v"), hook.dim)


class _HessianProduct:
    """``v -> H v`` for lists of tensors shaped as the parameters; sums over mini-batches in float32 at least."""

    def __init__(
        self, model: nn.Module, theta: list[Tensor], inputs: Tensor, targets: Tensor, loss: Loss, batch_size: int | None
    ) -> None:
        self.model, self.theta, self.inputs, self.targets, self.loss = model, theta, inputs, targets, loss
        self.batch_size = batch_size
        self.samples = len(inputs)
        # Of a single mini-batch the gradient, with its graph, serves every iteration.
        self._kept = self._gradient(inputs, targets) if batch_size is None or batch_size >= len(inputs) else None

    def __call__(self, v: list[Tensor]) -> list[Tensor]:
        if self._kept is not None:
            return self._of(self._kept, v, keep=True)
        total = [torch.zeros_like(t) for t in v]
        for batch in mini_batches(self.inputs, self.targets, self.batch_size):
            for t, part in zip(total, self._of(self._gradient(*batch), v, keep=False), strict=True):
                t += part
        return total

    def _gradient(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        # The same random numbers every time: a dropped unit stays dropped, or there would be no one Hessian.
        with forked(self.model, seed=0):
            total = checked_loss(self.loss, outputs_of(self.model, inputs), targets) / self.samples
        if not total.requires_grad:
            raise ValueError("loss: what it returns has no graph: no parameter that asks for a gradient affects it")
        return torch.autograd.grad(total, self.theta, create_graph=True, materialize_grads=True)

    def _of(self, gradient: tuple[Tensor, ...], v: list[Tensor], keep: bool) -> list[Tensor]:
        depends = [(g, t.to(g.dtype)) for g, t in zip(gradient, v, strict=True) if g.requires_grad]
        if not depends:  # a loss linear in the parameters
            return [torch.zeros_like(t) for t in v]
        slopes, directions = zip(*depends, strict=True)
        products = torch.autograd.grad(slopes, self.theta, directions, retain_graph=keep, materialize_grads=True)
        return [p.to(t.dtype) for p, t in zip(products, v, strict=True)]


def _iterate(
    product: _HessianProduct,
    theta: list[Tensor],
    tolerance: float,
    max_iterations: int,
    generator: torch.Generator,
    advance: Callable[[], None],
) -> HessianNorm:
    v = [gaussian(p.shape, generator, p) for p in theta]
    v = _scaled(v, 1 / _norm(v))
    estimates: list[float] = []
    converged = False
    eigenvalue = residual = float("nan")
    while not converged and len(estimates) < max_iterations:
        w = product(v)
        estimate = _norm(w)
        estimates.append(estimate)
        advance()
        eigenvalue = _dot(v, w)
        residual = _norm([x - eigenvalue * y for x, y in zip(w, v, strict=True)])
        if estimate == 0:
            converged = True
        elif not math.isfinite(estimate):
            break
        else:
            v = _scaled(w, 1 / estimate)
            converged = len(estimates) > 1 and abs(estimate - estimates[-2]) < tolerance * estimate
    return HessianNorm(
        estimates[-1], eigenvalue, residual, converged, np.array(estimates), product.samples,
        sum(p.numel() for p in theta),
    )  # fmt: skip


def _dot(a: list[Tensor], b: list[Tensor]) -> float:
    return sum(_together([torch.sum(x.double() * y.double()) for x, y in zip(a, b, strict=True)]))


def _norm(a: list[Tensor]) -> float:
    return math.hypot(*_together([torch.linalg.vector_norm(x, dtype=torch.float64) for x in a]))


def _together(numbers: list[Tensor]) -> list[float]:
    """From a device at once: it is waited for a single time."""
    return torch.stack([x.to(numbers[0].device) for x in numbers]).tolist()


def _scaled(a: list[Tensor], factor: float) -> list[Tensor]:
    return [x * factor for x in a]
