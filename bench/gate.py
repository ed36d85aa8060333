"""The correctness gate: no peer is timed before its outputs and gradients agree with float64.

The oracle is the plain module in float64 with ``w = g v / ||v||``, its ``dv`` and ``dg`` by the chain rule through that
composite; nothing of this package runs in it. Errors are relative, in the Frobenius norm: of the output, of ``dx``,
and of each layer's ``dv``, ``dg``, ``db`` (``dw`` for a peer without weight norm), the layers' taken together as a
root mean square and each by itself.

Tolerances, with ``u`` the unit roundoff:

- *Output in float32.* Roundings of a sum of ``K`` products walk at random to about ``u sqrt(K)``; the residual stream
  of ``L`` layers adds ``u sqrt(L)``. Winograd's transforms and an unlucky order of sums cost a factor up to 4, and a
  network's head, whose sums of positive and negative features cancel, another 2 (torch's own plain WRN-1000 reaches 5).
- *Output in bfloat16 and TensorFloat-32.* Operands are rounded, sums are kept in float32: ``u`` whatever ``K``, and
  ``u sqrt(L)`` where the stream itself is rounded at every block. ``x`` and ``w`` both, hence a factor 2.
- *Gradients of one layer.* ``dw`` sums over all positions of the batch, so ``K`` is the longer of both sums. The output
  gradient is 0 where the float64 pre-activation is within a thousandth of the ReLU's kink (a thirtieth where ours is
  bfloat16), so that no rounding can switch a unit that counts.
- *Gradients of a deep module.* With an error ``d`` in the pre-activations, a share of about ``d`` of all ReLUs
  switches, and each switch is an error of the size of the gradient there: ``sqrt(d)`` in the Frobenius norm. A single
  layer may be hit harder, by one switch in a small map, but nothing right reaches 1/2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from bench import models, parameters
from bench.workloads import FORWARD, TRAINING, Converted, ConvLayer, LinearLayer, Network, WindowLayer, Workload

KINK, KINK_BF16 = 1e-3, 1 / 30
DEEP = 1000  # layers of a network from which float64's maps are too many to keep
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-9}


class GateError(AssertionError):
    """A peer's result is not that of float64."""


@dataclass(frozen=True)
class Tolerance:
    """The largest relative errors that rounding explains."""

    output: float
    gradient: float
    layer_gradient: float


def tolerance(workload: Workload, precision: str) -> Tolerance:
    """As derived above, for a peer whose operands are rounded to ``precision``, a key of ``UNIT_ROUNDOFF``."""
    u = UNIT_ROUNDOFF[precision]
    shape = models.input_shape(workload)
    match workload:
        case LinearLayer(features=n):
            inner, depth = n, 1
        case ConvLayer(channels=n, kernel=k):
            inner, depth = n * k * k, 1
        case WindowLayer(channels=n, kernel=k, size=size, groups=groups):
            inner, depth = n // groups * k ** len(size), 1
        case Network(depth=depth, width=width):
            inner = 64 * width * 9
        case Converted():
            inner, depth = max(models.rows(workload)), len(models.rows(workload))
        case _:
            inner, depth = 9 * shape[1], 2 * models.blocks(workload)
    rounded = precision != "fp32"
    worst = 8 if isinstance(workload, (Network, Converted)) else 4
    output = 2 * u * (1 + math.sqrt(depth)) if rounded else worst * u * (math.sqrt(inner) + math.sqrt(depth))
    if depth == 1:
        positions = math.prod(shape) // shape[1]
        # Where tf32 operands are not rounded first, as the vendor's are not, the products cut them off: up to 2 u each.
        gradient = {"bf16": 4, "tf32": 6}[precision] * u if rounded else 4 * u * math.sqrt(max(inner, positions))
        return Tolerance(output, gradient, gradient)
    return Tolerance(output, math.sqrt(output), 0.5)


@dataclass
class Problem:
    """One workload's data, and what float64 makes of them. ``x`` and the output's gradient are float32 numbers."""

    workload: Workload
    device: str = "cpu"
    x: Tensor = field(init=False)
    labels: Tensor = field(init=False)
    dy: Tensor = field(init=False)
    _truths: dict[bool, Truth] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = models.input_shape(self.workload)
        self.x = torch.randn(shape, generator=generator)
        self.labels = torch.randint(10, shape[:1], generator=generator)
        self.dy = torch.randn(models.output_shape(self.workload), generator=generator)
        if isinstance(self.workload, (LinearLayer, ConvLayer, WindowLayer)):
            with torch.no_grad():
                layer = parameters.fill(models.plain(self.workload).double(), 1)[0].to(self.device)
                before_relu = layer(self.x.to(self.device).double())
            kink = KINK_BF16 if any("bf16" in name for name in self.workload.ours) else KINK
            self.dy *= (before_relu.abs() > kink * before_relu.std()).cpu()
        # Drawn on the CPU: the same numbers on every device.
        self.x, self.labels, self.dy = (t.to(self.device) for t in (self.x, self.labels, self.dy))

    def truth(self, pass_name: str) -> Truth:
        """Computed once for the passes that differentiate ``<dy, y>`` and once for those that take a loss."""
        takes_loss = pass_name in TRAINING
        if takes_loss not in self._truths:
            self._truths[takes_loss] = Truth.of(self, takes_loss)
        return self._truths[takes_loss]

    def differentiated(self, y: Tensor, takes_loss: bool) -> Tensor:
        """The number whose gradients are taken."""
        if takes_loss:
            return F.cross_entropy(y.to(torch.promote_types(y.dtype, torch.float32)), self.labels)
        return (y * self.dy.to(y.dtype)).sum()


@dataclass(frozen=True)
class Truth:
    """The float64 output, ``dx`` or None, and each layer's gradients under the keys ``w, v, g, b``."""

    y: Tensor
    dx: Tensor | None
    layers: list[dict[str, Tensor]]

    @classmethod
    def of(cls, problem: Problem, takes_loss: bool) -> Truth:
        module = models.unwritten(models.plain, problem.workload).double()
        parameters.fill(module, models.blocks(problem.workload))
        module.to(problem.device)
        if isinstance(problem.workload, Network) and problem.workload.depth > DEEP:
            _recompute(module)
        x = problem.x.double().requires_grad_(models.input_needs_gradient(problem.workload))
        y = module(x)
        problem.differentiated(y, takes_loss).backward()
        gradients = list(true_gradients(module, models.blocks(problem.workload)))
        return cls(y.detach(), x.grad, gradients)


def _recompute(module: nn.Module) -> None:
    """Lets each stage of a network keep few of its maps: 10,000 layers' for a batch of 128 are 98 GB in float64."""
    for stage in module.stages:
        segments = math.isqrt(len(stage))
        # Not re-entrant, it would keep what it recomputed until the garbage collector comes.
        keywords = {"use_reentrant": True, "preserve_rng_state": False}
        stage.forward = partial(checkpoint_sequential, list(stage), segments, **keywords)


def true_gradients(module: nn.Module, blocks: int) -> Iterator[dict[str, Tensor]]:
    """Each layer's ``dw, dv, dg, db`` from the gradients that a plain float64 module holds."""
    for number, layer in enumerate(parameters.layers(module)):
        dw, db = (layer.entries[key].parameter.grad for key in ("w", "b"))
        v, g, _ = parameters.draw(number, layer.name, dw.shape, blocks)
        v, g = (t.to(dw.device, torch.float64).requires_grad_() for t in (v, g))
        with torch.enable_grad():
            dv, dg = torch.autograd.grad(parameters.effective_weight(v, g), (v, g), dw)
        yield {"w": dw, "v": dv, "g": dg, "b": db}


def relative_error(found: Tensor, true: Tensor) -> float:
    """``||found - true|| / ||true||``; infinite where anything is not finite or the shapes differ."""
    found = found.detach().double().reshape(true.shape) if found.numel() == true.numel() else found
    if found.shape != true.shape or not bool(torch.isfinite(found).all()):
        return math.inf
    difference, size = torch.linalg.vector_norm(found - true).item(), torch.linalg.vector_norm(true).item()
    return difference / size if size else difference


def check(
    module: nn.Module,
    forward: Callable[[Tensor], Tensor],
    problem: Problem,
    pass_name: str,
    precision: str,
    x: Tensor,
) -> dict[str, float]:
    """Runs ``forward`` on ``x`` and compares; the errors, by name.

    Args:
        module: holds the parameters that ``forward`` uses.
        x: the problem's input in the peer's own layout.

    Raises:
        GateError: naming what is wrong, by how much, and what rounding would explain.
    """
    truth, allowed = problem.truth(pass_name), tolerance(problem.workload, precision)
    if pass_name == FORWARD:
        with torch.no_grad():
            errors = {"y": relative_error(forward(x), truth.y)}
    else:
        errors = _gradient_errors(module, forward, problem, pass_name, x, truth)
    for name, error in errors.items():
        limit = allowed.output if name == "y" else allowed.gradient
        limit = allowed.layer_gradient if name.startswith("worst") else limit
        if not error <= limit:
            raise GateError(f"{problem.workload.name}, {pass_name}: {name} is off by {error:.1e}, above {limit:.1e}")
    return errors


def _gradient_errors(
    module: nn.Module,
    forward: Callable[[Tensor], Tensor],
    problem: Problem,
    pass_name: str,
    x: Tensor,
    truth: Truth,
) -> dict[str, float]:
    held = list(module.parameters())
    inputs = [x, *held] if truth.dx is not None else held
    y = forward(x)
    gradients = torch.autograd.grad(problem.differentiated(y, pass_name in TRAINING), inputs)
    errors = {"y": relative_error(y, truth.y)}
    if truth.dx is not None:
        errors["dx"] = relative_error(gradients[0], truth.dx)
    by_parameter = {id(p): d for p, d in zip(held, gradients[-len(held) :], strict=True)}
    found: dict[str, list[float]] = {}
    for layer, true in zip(parameters.layers(module), truth.layers, strict=True):
        for key, entry in layer.entries.items():
            error = relative_error(entry.of(by_parameter[id(entry.parameter)]), true[key])
            found.setdefault(f"d{key}", []).append(error)
    for name, values in found.items():
        errors[name] = math.sqrt(sum(v * v for v in values) / len(values))
        errors[f"worst layer's {name}"] = max(values)
    return errors
