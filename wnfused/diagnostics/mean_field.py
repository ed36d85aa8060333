"""Mean-field theory of wide random layers: ``h = W phi(h') + b``, W of variance ``sw^2 / n``, b of variance ``sb^2``.

With z standard normal, the variance q of a pre-activation and the mean squared singular value chi of a layer obey

    q    <- sw^2 E phi(sqrt(q) z)^2 + sb^2,           q* its fixed point
    chi   = sw^2 E phi'(sqrt(q*) z)^2                 > 1 chaotic: gradients explode;  < 1 ordered: they vanish

and the line ``chi = 1`` between them is, by parameter q*, ``sw^2 = 1 / E phi'^2``, ``sb^2 = q* - sw^2 E phi^2``. Of the
input-output Jacobian of L layers the eigenvalues of ``J J^T`` have mean ``chi^L``. Source: Hlav (2019), eq. 2 to 7,
after Pennington, Schoenholz & Ganguli (2017, 2018), whose S-transforms give the variance and the largest.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from wnfused._numbers import at_least_0, number, positive
from wnfused.diagnostics.arguments import floats
from wnfused.diagnostics.drawing import COLOURS, THEORY, Drawable

Activation = str | Callable[[Tensor], Tensor]
"""``"linear"``, ``"relu"``, ``"hard_tanh"`` (closed forms), ``"tanh"`` or a smooth elementwise function of a float64
tensor that autograd can differentiate (quadrature). torch's own functions and modules of these four are taken by their
closed forms; of any other function a kink away from 0 leaves the quadrature wrong by up to a few percent."""

WEIGHTS = ("gaussian", "orthogonal")


def q_map(activation: Activation, q: float, sw2: float, sb2: float) -> float:
    """``sw^2 E phi(sqrt(q) z)^2 + sb^2``: the next layer's variance of a pre-activation.

    Args:
        activation: phi, a name or a function, see ``Activation``.
        q: the variance before this layer; finite, at least 0.
        sw2: ``sw^2``, the weights' variance times fan-in; finite, at least 0.
        sb2: ``sb^2``, the biases' variance; finite, at least 0.

    Raises:
        TypeError, ValueError: a variance that is not finite and at least 0; an activation that is unknown, or as a
            function is not elementwise.
    """
    at_least_0(q=q, sw2=sw2, sb2=sb2)
    return sw2 * _Moments(activation).square(q) + sb2


def fixed_point(activation: Activation, sw2: float, sb2: float) -> float:
    """The largest q* with ``q_map(q*) = q*``, to which the variance converges from above.

    Infinite where it grows without end; NaN for ReLU and linear layers at their critical point (``sw^2`` 2 or 1 and
    ``sb^2 = 0``), where every q is fixed and chi depends on none. The map is taken to be concave in q, as it is for
    saturating activations.

    Args:
        activation, sw2, sb2: as in ``q_map``.

    Raises:
        TypeError, ValueError: as ``q_map``.
    """
    at_least_0(sw2=sw2, sb2=sb2)
    moments = _Moments(activation)
    if moments.slope is not None:  # q -> sw^2 p q + sb^2
        rest = 1 - sw2 * moments.slope
        if abs(rest) < 1e-14:
            return math.nan if sb2 == 0 else math.inf
        return math.inf if rest < 0 else sb2 / rest

    def excess(q: float) -> float:
        return sw2 * moments.square(q) + sb2 - q

    high = max(sw2 + sb2, 1e-9)
    while excess(high) > 0:
        high *= 2
        if high > 1e12:
            return math.inf
    # From the first scale on which the map lies above the diagonal; with sb2 = 0 there may be none but 0.
    low = high
    while excess(low) <= 0:
        low /= 4
        if low < 1e-12:
            return 0.0
    for _ in range(200):
        middle = math.sqrt(low * high)
        if not low < middle < high:
            break
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low


def chi(activation: Activation, sw2: float, sb2: float) -> float:
    """``sw^2 E phi'(sqrt(q*) z)^2``: by how much a layer multiplies the mean squared length of a perturbation.

    Where q* is infinite, its limit for large q.

    Args:
        activation, sw2, sb2: as in ``q_map``; the activation has a derivative.

    Raises:
        TypeError, ValueError: as ``q_map``; an activation without a derivative.
    """
    return sw2 * _Moments(activation).slopes(fixed_point(activation, sw2, sb2))


def order_chaos_boundary(activation: Activation, q: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """``(sw^2, sb^2)`` on the line ``chi = 1``, for fixed points ``q`` of any shape.

    ReLU and linear layers have a single point, ``(2, 0)`` and ``(1, 0)``, whatever q is.

    Args:
        activation: as in ``chi``.
        q: finite, at least 0; a number or an array.

    Returns:
        Both in the shape of q, float64.

    Raises:
        TypeError: ``q`` are no numbers.
        ValueError: one that is not finite and at least 0; an activation as in ``chi``, or one of slope 0 everywhere,
            with which no weights make chi 1.
    """
    values = floats("q", q)
    if not ((values >= 0) & np.isfinite(values)).all():
        raise ValueError(f"q: {q!r} must be finite and at least 0")
    moments = _Moments(activation)
    flat = values.ravel().tolist()
    slopes = [moments.slopes(value) for value in flat]
    if 0 in slopes:
        level = flat[slopes.index(0)]
        raise ValueError(f"activation: {activation!r} has slope 0 at q = {level:g}, where no weights make chi 1")
    sw2 = np.array([1 / slope for slope in slopes]).reshape(values.shape)
    sb2 = values - sw2 * np.array([moments.square(value) for value in flat]).reshape(values.shape)
    # Exactly 0 at q = 0 and for ReLU; rounding may leave it just below.
    return sw2, np.where(sb2 < 1e-12 * np.maximum(values, 1), 0.0, sb2)


@dataclass(frozen=True)
class JacobianTheory:
    """Eigenvalues of ``J J^T`` for L wide layers: chi of a layer, and their mean, variance and largest.

    >>> jacobian_theory("relu", 4, sw2=2, sb2=0, weights="orthogonal").largest  # doctest: +SKIP
    9.481
    """

    chi: float
    mean: float
    variance: float
    largest: float


def jacobian_theory(
    activation: Activation, depth: int, *, sw2: float, sb2: float = 0.0, weights: str = "gaussian"
) -> JacobianTheory:
    """What wide networks of ``depth`` layers have, at the fixed point q*.

    With ``m_k = E phi'^(2k)``: mean ``chi^L``; variance ``chi^(2L) L (m_2 / m_1^2 - 1 - s)`` with s = -1 for Gaussian
    and 0 for orthogonal weights, which for the piecewise linear ones at chi = 1 is ``L/p`` and ``L (1 - p)/p``; and
    the largest is the edge of the free product's spectrum, ``(L+1)^(L+1) / L^L`` for linear Gaussian layers.

    What is too large for a float is infinite.

    Args:
        activation, sw2, sb2: as in ``chi``.
        depth: L, at least 1.
        weights: ``"gaussian"`` or ``"orthogonal"`` (scaled by sw).

    Raises:
        TypeError, ValueError: naming the argument that cannot work; an activation as in ``chi``.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights: unknown {weights!r}; use 'gaussian' or 'orthogonal'")
    positive(depth=depth)
    moments = _Moments(activation)
    q = fixed_point(activation, sw2, sb2)
    m1, m2 = moments.slopes(q), moments.slopes(q, power=2)
    gaussian = weights == "gaussian"
    x = sw2 * m1
    if x == 0:
        return JacobianTheory(0.0, 0.0, 0.0, 0.0)
    spread = m2 / m1**2 - 1 + gaussian
    return JacobianTheory(
        chi=x,
        mean=_exp(depth * math.log(x)),
        variance=_exp(2 * depth * math.log(x)) * depth * spread if spread else 0.0,
        largest=_edge(moments, q, depth, sw2, gaussian),
    )


def _exp(x: float) -> float:
    """Infinite where math.exp would raise."""
    return math.exp(x) if x < 709 else math.inf


def _edge(moments: _Moments, q: float, depth: int, sw2: float, gaussian: bool) -> float:
    """The minimum over w of ``(1 + z)/z / S(z)^L`` with ``z = psi(w) = E[w s / (1 - w s)]``, ``s = phi'^2``.

    ``S_D(z) = w (1 + z)/z`` is the S-transform of the slopes' squares, that of ``W W^T`` is ``1 / (sw^2 (1 + z))`` or
    ``1 / sw^2``; the inverse of the product's moment generating function turns where its spectrum ends. w lies between
    0 and the inverse of the largest s, by which both are scaled.
    """
    largest = moments.largest_slope(q)

    def log_eigenvalue(logit: float) -> float:
        # 1 - w for a logit, without cancellation.
        w, rest = 1 / (1 + math.exp(-logit)), 1 / (1 + math.exp(logit))
        z = moments.psi(q, w, rest, largest)
        layer = math.log(sw2 * largest) + math.log(z / (w * (1 + z))) + (math.log1p(z) if gaussian else 0.0)
        return math.log1p(1 / z) + depth * layer

    low, high = -40.0, 40.0 if moments.bernoulli else 12.0
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(100):  # golden section
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if log_eigenvalue(a) < log_eigenvalue(b) else (a, high)
    return _exp(log_eigenvalue((low + high) / 2))


_FUNCTIONS = (
    (torch.relu, "relu"), (F.relu, "relu"), (Tensor.relu, "relu"), (F.hardtanh, "hard_tanh"), (torch.tanh, "tanh"),
    (F.tanh, "tanh"), (Tensor.tanh, "tanh"),
)  # fmt: skip
_MODULES = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Identity: "linear"}


def _closed_form(activation: Activation) -> Activation:
    """The name of one of torch's own activations, some of which have kinks that a quadrature misses."""
    if type(activation) is nn.Hardtanh and (activation.min_val, activation.max_val) == (-1, 1):
        return "hard_tanh"
    by_function = next((name for function, name in _FUNCTIONS if activation is function), activation)
    return _MODULES.get(type(activation), by_function)


def _check_elementwise(activation: Callable[[Tensor], Tensor]) -> None:
    x = torch.zeros(2, dtype=torch.float64)
    try:
        y = activation(x)
    except Exception as error:  # it is the user's own code that runs, which may raise anything
        raise ValueError(f"activation: {activation!r} does not run on a float64 tensor: {error}") from error
    if not isinstance(y, Tensor):
        raise TypeError(f"activation: {activation!r} must return a Tensor, not {type(y).__name__}")
    if y.shape != x.shape:
        raise ValueError(f"activation: {activation!r} must be elementwise; of shape [2] it makes {list(y.shape)}")


# What stands for an infinite variance: slopes are then at their limits to six digits.
_LARGEST_Q = 1e12
# What stands for none: of a function with a kink at 0 the slopes are then those of both sides.
_SMALLEST_Q = 1e-200


class _Moments:
    """Expectations of an activation and its slope under ``sqrt(q) z``."""

    def __init__(self, activation: Activation) -> None:
        known = ("linear", "relu", "tanh", "hard_tanh")
        if not callable(activation) and activation not in known:
            raise ValueError(f"activation: unknown {activation!r}; use one of {', '.join(known)}, or a function")
        self.activation = activation = _closed_form(activation)
        if not isinstance(activation, str):
            _check_elementwise(activation)
        self.slope = {"linear": 1.0, "relu": 0.5}.get(activation) if isinstance(activation, str) else None
        """p of positively homogeneous activations, for which ``E phi^2 = p q``."""
        self.bernoulli = self.slope is not None or activation == "hard_tanh"
        """Whether the slope is 0 or 1."""

    def square(self, q: float) -> float:
        """``E phi(sqrt(q) z)^2``."""
        if self.slope is not None:
            return self.slope * q
        if self.activation == "hard_tanh":
            if q == 0:
                return 0.0
            edge = 1 / math.sqrt(2 * q)
            if edge > 6:  # no saturation that a double could hold
                return q
            inner = math.erf(edge) - 2 / math.sqrt(math.pi) * edge * math.exp(-(edge**2))
            return q * inner + math.erfc(edge)
        return self._mean(lambda x: self._function(x).square(), q)

    def slopes(self, q: float, power: int = 1) -> float:
        """``E phi'(sqrt(q) z)^(2 power)``."""
        if self.slope is not None:
            return self.slope
        if self.activation == "hard_tanh":
            return math.erf(1 / math.sqrt(2 * q)) if q > 0 else 1.0
        return self._mean(lambda x: self._derivative(x).square() ** power, q)

    def largest_slope(self, q: float) -> float:
        """The largest ``phi'(sqrt(q) z)^2``."""
        if self.bernoulli:
            return 1.0
        x, _ = self._nodes(q)
        return self._derivative(torch.cat([x, x.new_zeros(1)])).square().max().item()

    def psi(self, q: float, w: float, rest: float, largest: float) -> float:
        """``E[w s / (1 - w s)]`` with ``s = phi'(sqrt(q) z)^2 / largest`` and ``rest = 1 - w``."""
        if self.bernoulli:
            return self.slopes(q) * w / rest

        def share(x: Tensor) -> Tensor:
            s = w * self._derivative(x).square() / largest
            return s / (1 - s)

        return self._mean(share, q)

    def _function(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if self.activation == "tanh" else self.activation(x)  # type: ignore[operator]

    def _derivative(self, x: Tensor) -> Tensor:
        if self.activation == "tanh":
            return 1 / torch.cosh(x.clamp(-300, 300)).square()
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = self._function(x)
            if not y.requires_grad:
                raise ValueError(f"activation: what {self.activation!r} returns has no graph to differentiate")
            return torch.autograd.grad(y.sum(), x)[0]

    @classmethod
    def _mean(cls, f: Callable[[Tensor], Tensor], q: float) -> float:
        """``E f(sqrt(q) z)``."""
        x, weights = cls._nodes(q)
        return (weights * f(x)).sum().item()

    @staticmethod
    def _nodes(q: float) -> tuple[Tensor, Tensor]:
        """``sqrt(q) z`` and weights for means over z, by the trapezoidal rule in t with ``z = a sinh t``.

        ``a = 1/sqrt(q)`` for large q puts nodes where f bends, which Gauss-Hermite's do not reach; for functions
        analytic near the real line the error falls as ``exp(-2 pi d / step)``, here below 1e-14. No node is at 0, where
        activations have their kinks.
        """
        q = min(max(q, _SMALLEST_Q), _LARGEST_Q)
        a = min(1.0, q**-0.5)
        step = 1 / 32
        count = math.ceil(math.asinh(12 / a) / step)
        t = step * (torch.arange(-count, count, dtype=torch.float64) + 0.5)
        z = a * torch.sinh(t)
        density = torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        return math.sqrt(q) * z, step * a * torch.cosh(t) * density


@dataclass(frozen=True, eq=False)
class PhaseDiagram(Drawable):
    """The line between order and chaos: ``sw^2`` and ``sb^2`` ``[Q]`` where chi is 1, rising; a point for ReLU."""

    activation: str
    sw2: np.ndarray
    sb2: np.ndarray

    def _draw(self, axes: Sequence[Any], label: str | None) -> None:
        (axis,) = axes
        name = label or self.activation
        if np.ptp(self.sw2) < 1e-9:
            alone = not axis.lines
            words = f"{name}: critical at one point"
            axis.plot(self.sw2[:1], self.sb2[:1], "o", markersize=8, label=words, clip_on=False)
            if alone:  # variances begin at 0, whatever matplotlib puts around a single point
                axis.set_xlim(0, 2 * self.sw2[0], auto=True)
                axis.set_ylim(0, max(1.0, 2 * self.sb2[0]), auto=True)
        else:
            axis.plot(self.sw2, self.sb2, linewidth=2, label=name)
        if not axis.texts:
            for x, words, colour in ((0.05, "ordered: gradients vanish", COLOURS[0]), (0.95, "chaotic", COLOURS[1])):
                axis.annotate(words, (x, 0.94 - 0.9 * (x > 0.5)), xycoords="axes fraction", color=colour,
                              ha="left" if x < 0.5 else "right")  # fmt: skip
        axis.axvline(1, color=THEORY, linewidth=0.8, linestyle=":")
        axis.set_xlabel(r"weight variance $\sigma_w^2$")
        axis.set_ylabel(r"bias variance $\sigma_b^2$")


def phase_diagram(activation: Activation, *, largest_q: float = 3.0, points: int = 100) -> PhaseDiagram:
    """``order_chaos_boundary`` for q* from 0 to ``largest_q``, to be drawn.

    Args:
        activation: as in ``chi``.
        largest_q: finite, above 0.
        points: at least 2.

    Raises:
        TypeError, ValueError: naming the argument that cannot work; an activation as in ``chi``.
    """
    number(largest_q=largest_q)
    positive(points=points)
    if not 0 < largest_q <= sys.float_info.max or points < 2:
        raise ValueError(f"largest_q, points: {largest_q}, {points} must be finite and above 0, and at least 2")
    name = activation if isinstance(activation, str) else getattr(activation, "__name__", type(activation).__name__)
    # Squares put more points where the line starts, at q* = 0.
    return PhaseDiagram(name, *order_chaos_boundary(activation, largest_q * np.linspace(0, 1, points) ** 2))
