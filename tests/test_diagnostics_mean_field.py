"""Mean-field theory against integrals of another library, closed forms and random networks."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.integrate import quad
from torch import nn

from wnfused.diagnostics import chi, fixed_point, jacobian_theory, order_chaos_boundary, phase_diagram, q_map

FUNCTIONS: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "linear": (lambda x: x, lambda x: 1.0),
    "relu": (lambda x: max(x, 0.0), lambda x: float(x > 0)),
    "tanh": (math.tanh, lambda x: 1 / math.cosh(min(abs(x), 300)) ** 2),
    "hard_tanh": (lambda x: max(-1.0, min(1.0, x)), lambda x: float(abs(x) < 1)),
}


def mean(f: Callable[[float], float], q: float) -> float:
    """``E f(sqrt(q) z)``, with the kinks at 0 and +-1 as end points."""
    s = math.sqrt(q)
    ends = sorted({-12.0, *(k / s for k in (-5, -1, 0, 1, 5) if abs(k / s) < 12), 12.0})

    def density(z: float) -> float:
        return f(s * z) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    return sum(quad(density, a, b, epsabs=1e-13, epsrel=1e-12)[0] for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize("q", [1e-3, 0.3, 1.0, 7.0, 1e4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_moments(name: str, q: float) -> None:
    function, slope = FUNCTIONS[name]
    expected = 1.7 * mean(lambda x: function(x) ** 2, q) + 0.2
    assert q_map(name, q, 1.7, 0.2) == pytest.approx(expected, rel=1e-9)
    sw2, sb2 = order_chaos_boundary(name, q)
    slopes = mean(lambda x: slope(x) ** 2, q)
    assert float(sw2) == pytest.approx(1 / slopes, rel=1e-9)
    assert float(sb2) == pytest.approx(max(0, q - mean(lambda x: function(x) ** 2, q) / slopes), rel=1e-6, abs=1e-10)


def test_a_function_of_the_caller() -> None:
    for q in (0.0, 0.4, 30.0):
        assert q_map(torch.tanh, q, 2.0, 0.1) == pytest.approx(q_map("tanh", q, 2.0, 0.1), rel=1e-12)
    assert chi(torch.tanh, 2.0, 0.1) == pytest.approx(chi("tanh", 2.0, 0.1), rel=1e-9)
    # E erf^2 = 2/pi asin(2q / (1 + 2q)).
    assert q_map(torch.erf, 0.7, 1.0, 0.0) == pytest.approx(2 / math.pi * math.asin(1.4 / 2.4), rel=1e-12)


@pytest.mark.parametrize("name", ["relu", "tanh", "hard_tanh"])
@pytest.mark.parametrize(("sw2", "sb2"), [(1.5, 0.3), (0.5, 0.05)])
def test_fixed_points_are_fixed_and_attract(name: str, sw2: float, sb2: float) -> None:
    q = fixed_point(name, sw2, sb2)
    assert q_map(name, q, sw2, sb2) == pytest.approx(q, rel=1e-9)
    iterated = 5.0
    for _ in range(400):
        iterated = q_map(name, iterated, sw2, sb2)
    assert iterated == pytest.approx(q, rel=1e-6)


def test_fixed_points_at_the_ends() -> None:
    assert fixed_point("tanh", 1.0, 0.0) == 0.0
    assert fixed_point("tanh", 0.9, 0.0) == 0.0
    assert fixed_point("hard_tanh", 1.0, 0.0) < 0.1  # the map touches the diagonal there
    assert fixed_point("tanh", 1.0001, 0.0) == pytest.approx(0.5 * 1e-4, rel=0.01)  # q - 2 q^2 + ... = q / sw2
    assert math.isnan(fixed_point("relu", 2.0, 0.0))
    assert fixed_point("relu", 2.0, 0.1) == fixed_point("relu", 3.0, 0.0) == math.inf
    assert fixed_point(torch.exp, 1.0, 0.0) == math.inf
    assert chi("relu", 2.0, 0.0) == 1.0
    assert chi("relu", 3.0, 1.0) == 1.5


def test_chi_is_one_on_the_boundary_and_chaotic_beyond() -> None:
    for name in ("tanh", "hard_tanh"):
        sw2, sb2 = order_chaos_boundary(name, [0.1, 0.5, 2.0])
        assert (np.diff(sw2) > 0).all()
        assert (np.diff(sb2) > 0).all()
        for a, b in zip(sw2, sb2, strict=True):
            assert chi(name, a, b) == pytest.approx(1, rel=1e-8)
            assert chi(name, 1.2 * a, b) > 1
            assert chi(name, 0.8 * a, b) < 1
    sw2, sb2 = order_chaos_boundary("relu", [0.0, 1.0])
    assert (sw2.tolist(), sb2.tolist()) == ([2.0, 2.0], [0.0, 0.0])


def eigenvalues(name: str, depth: int, sw2: float, sb2: float, weights: str, width: int, seed: int) -> torch.Tensor:
    """Of J J^T of a random network that starts at its fixed point."""
    generator = torch.Generator().manual_seed(seed)
    function = {"linear": lambda h: h, "relu": torch.relu, "tanh": torch.tanh,
                "hard_tanh": torch.nn.functional.hardtanh}[name]  # fmt: skip
    q = fixed_point(name, sw2, sb2)
    q = 1.0 if math.isnan(q) else q
    h = math.sqrt(q) * torch.randn(width, generator=generator)
    j = torch.eye(width)
    for _ in range(depth):
        w = torch.randn(width, width, generator=generator) / math.sqrt(width)
        if weights == "orthogonal":
            w = torch.linalg.qr(w).Q
        h = h.requires_grad_()
        x = function(h)
        (slope,) = torch.autograd.grad(x.sum(), h)
        w = math.sqrt(sw2) * w
        # From pre-activation to pre-activation: W D, with the spectrum of eq. 1's D W at large width.
        j = w @ (slope[:, None] * j)
        h = (w @ x + math.sqrt(sb2) * torch.randn(width, generator=generator)).detach()
    return torch.linalg.eigvalsh(j.double() @ j.double().T)


@pytest.mark.parametrize(
    ("name", "sw2", "sb2", "weights", "depth"),
    [
        ("linear", 1.0, 0.0, "gaussian", 3),
        ("relu", 2.0, 0.0, "gaussian", 3),
        ("relu", 2.0, 0.0, "orthogonal", 4),
        ("relu", 2.0, 0.0, "orthogonal", 8),
        ("hard_tanh", 1.2, 0.05, "orthogonal", 5),
        ("tanh", 1.5, 0.1, "orthogonal", 5),
        ("tanh", 1.5, 0.1, "gaussian", 3),
    ],
)
def test_random_networks_have_the_spectrum(name: str, sw2: float, sb2: float, weights: str, depth: int) -> None:
    """At width 300 the trace scatters by about sqrt(L / 300) and the edge by 300^(-2/3), plus terms of order 1/300."""
    theory = jacobian_theory(name, depth, sw2=sw2, sb2=sb2, weights=weights)
    found = [eigenvalues(name, depth, sw2, sb2, weights, 300, seed) for seed in range(2)]
    assert np.mean([e.mean().item() for e in found]) == pytest.approx(theory.mean, rel=0.15)
    assert np.mean([e.var().item() for e in found]) == pytest.approx(theory.variance, rel=0.35)
    assert np.mean([e.max().item() for e in found]) == pytest.approx(theory.largest, rel=0.2)


def test_closed_forms_of_the_spectrum() -> None:
    for depth in (1, 2, 10, 100):
        theory = jacobian_theory("linear", depth, sw2=1)
        assert theory.largest == pytest.approx((depth + 1) * (1 + 1 / depth) ** depth, rel=1e-9)
        assert (theory.mean, theory.variance) == (1, depth)
    isometry = jacobian_theory("linear", 50, sw2=1, weights="orthogonal")
    assert (isometry.mean, isometry.variance) == (1, 0)
    assert isometry.largest == pytest.approx(1, rel=1e-9)
    for depth in (3, 8, 50):
        relu = jacobian_theory("relu", depth, sw2=2, weights="orthogonal")
        # Eq. 7: sw^(2L) p^(L-1) (1 - p) L^L / (L - 1)^(L-1).
        expected = 2**depth * 0.5 ** (depth - 1) * 0.5 * depth * (depth / (depth - 1)) ** (depth - 1)
        assert relu.largest == pytest.approx(expected, rel=1e-9)
        assert relu.variance == pytest.approx(depth)
        assert jacobian_theory("relu", depth, sw2=2).variance == pytest.approx(2 * depth)
    assert jacobian_theory("relu", 4, sw2=2, weights="orthogonal").largest == pytest.approx(9.48, abs=0.005)
    # Gaussian: e sw^(2L) p^(L-1) L for great depth.
    assert jacobian_theory("relu", 1000, sw2=2).largest == pytest.approx(2 * math.e * 1000, rel=2e-3)


def test_picture(tmp_path: Path) -> None:
    diagram = phase_diagram("tanh")
    assert diagram.sw2[0] == 1
    assert diagram.sb2[0] == 0
    diagram.save(tmp_path / "phase.png")
    phase_diagram("relu").save(tmp_path / "relu.png")
    assert (tmp_path / "phase.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("relu", torch.relu), ("relu", F.relu), ("relu", nn.ReLU()), ("relu", nn.ReLU(inplace=True)),
        ("hard_tanh", F.hardtanh), ("hard_tanh", nn.Hardtanh()), ("tanh", torch.tanh), ("tanh", nn.Tanh()),
        ("linear", nn.Identity()),
    ],
)  # fmt: skip
def test_torchs_own_activations_are_known(name, function) -> None:
    assert fixed_point(function, 1.7, 0.1) == fixed_point(name, 1.7, 0.1)
    assert chi(function, 1.7, 0.1) == chi(name, 1.7, 0.1)
    assert jacobian_theory(function, 4, sw2=1.7, sb2=0.1) == jacobian_theory(name, 4, sw2=1.7, sb2=0.1)
    assert np.array_equal(order_chaos_boundary(function, [0.5, 2]), order_chaos_boundary(name, [0.5, 2]))


@pytest.mark.parametrize("q", [0.0, 1e-3, 1.0, 1e4])
def test_a_kink_at_0_is_between_nodes(q: float) -> None:
    leaky, size = (
        float(order_chaos_boundary(f, q)[0]) for f in (functools.partial(F.leaky_relu, negative_slope=0.2), abs)
    )
    assert 1 / leaky == pytest.approx((1 + 0.2**2) / 2, rel=1e-12)
    assert size == pytest.approx(1, rel=1e-12)


def test_another_range_is_another_function() -> None:
    assert fixed_point(nn.Hardtanh(-2, 2), 1.7, 0.1) > fixed_point("hard_tanh", 1.7, 0.1)


def test_a_variance_without_end_has_slopes_all_the_same() -> None:
    """gelu is a ReLU for large arguments."""
    assert math.isinf(fixed_point(F.gelu, 2.5, 0.1))
    assert chi(F.gelu, 2.5, 0.1) == pytest.approx(1.25, rel=1e-5)
    found, relu = (jacobian_theory(a, 4, sw2=2.5, sb2=0.1) for a in (F.gelu, "relu"))
    assert found.largest == pytest.approx(relu.largest, rel=1e-4)
    assert found.variance == pytest.approx(relu.variance, rel=1e-4)


@pytest.mark.parametrize("c", [0.5, 2.0])
@pytest.mark.parametrize("weights", ["gaussian", "orthogonal"])
def test_a_factor_may_be_the_weights_or_the_activations(c, weights) -> None:
    """Slopes above 1, too."""
    theory = jacobian_theory("tanh", 4, sw2=2.0, sb2=0.1, weights=weights)
    scaled = jacobian_theory(lambda x: c * torch.tanh(x), 4, sw2=2.0 / c**2, sb2=0.1, weights=weights)
    for field in ("chi", "mean", "variance", "largest"):
        assert getattr(scaled, field) == pytest.approx(getattr(theory, field), rel=1e-9)


def test_what_is_too_large_or_nothing() -> None:
    large = jacobian_theory("relu", 3000, sw2=3)
    assert (large.chi, large.mean, large.variance, large.largest) == (1.5, math.inf, math.inf, math.inf)
    assert jacobian_theory("linear", 3000, sw2=3, weights="orthogonal").variance == 0
    nothing = jacobian_theory("relu", 4, sw2=0)
    assert (nothing.chi, nothing.mean, nothing.variance, nothing.largest) == (0, 0, 0, 0)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="activation: unknown 'gelu'; use one of linear, relu, tanh, hard_tanh"):
        chi("gelu", 1, 0)
    with pytest.raises(ValueError, match="sw2: -1 must be finite and at least 0"):
        fixed_point("relu", -1, 0)
    with pytest.raises(ValueError, match="q: nan"):
        q_map("relu", math.nan, 1, 0)
    with pytest.raises(ValueError, match=r"q: \[-1\] must be finite and at least 0"):
        order_chaos_boundary("tanh", [-1])
    with pytest.raises(ValueError, match="q: inf must be finite"):
        order_chaos_boundary("tanh", math.inf)
    with pytest.raises(ValueError, match="weights: unknown 'uniform'"):
        jacobian_theory("relu", 3, sw2=2, weights="uniform")
    with pytest.raises(ValueError, match="depth: 0"):
        jacobian_theory("relu", 0, sw2=2)
    with pytest.raises(ValueError, match=r"depth: 1\.5 must be an int of at least 1"):
        jacobian_theory("relu", 1.5, sw2=2)
    with pytest.raises(ValueError, match="largest_q, points: 0, 100"):
        phase_diagram("tanh", largest_q=0)
    with pytest.raises(TypeError, match="largest_q: expected a number, got str"):
        phase_diagram("tanh", largest_q="a")
    with pytest.raises(ValueError, match=r"points: 2\.5 must be an int of at least 1"):
        phase_diagram("tanh", points=2.5)
    with pytest.raises(TypeError, match="q: expected numbers, got 'a'"):
        order_chaos_boundary("tanh", "a")
    with pytest.raises(TypeError, match="q: expected numbers, got None"):
        order_chaos_boundary("tanh", None)
    with pytest.raises(ValueError, match=r"largest_q, points: 10+, 100 must be finite"):
        phase_diagram("tanh", largest_q=10**400)


@pytest.mark.parametrize(
    ("activation", "error", "message"),
    [
        (lambda x: 3, TypeError, "activation: .* must return a Tensor, not int"),
        (lambda x: x.sum(), ValueError, r"activation: .* must be elementwise; of shape \[2\] it makes \[\]"),
        (nn.Linear(3, 3), ValueError, "activation: .* does not run on a float64 tensor"),
        (lambda x: x.detach(), ValueError, "activation: what .* returns has no graph to differentiate"),
    ],
)
def test_wrong_activations(activation, error, message) -> None:
    with pytest.raises(error, match=message):
        chi(activation, 1, 0.1)


def test_a_constant_has_no_boundary() -> None:
    assert chi(lambda x: x * 0 + 1, 2.0, 0.1) == 0
    with pytest.raises(ValueError, match=r"activation: .* has slope 0 at q = 0\.5, where no weights make chi 1"):
        order_chaos_boundary(lambda x: x * 0 + 1, [0.5, 1.0])


@pytest.mark.filterwarnings("error")
def test_a_boundary_is_quiet_and_a_module_has_its_class_s_name() -> None:
    assert phase_diagram(F.gelu).activation == "gelu"
    assert phase_diagram(nn.SiLU()).activation == "SiLU"
