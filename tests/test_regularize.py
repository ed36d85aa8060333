"""Penalties by their formulas, gradients of both orders, retractions by their properties, models by their parts."""

import copy
import gc
import math
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import prune

import wnfused
from wnfused import WNConv2d, WNLinear
from wnfused.init import orthogonal_batched
from wnfused.regularize import (
    Regularizer,
    cayley_step,
    double_soft,
    gain_adjusted,
    mutual_coherence,
    orthogonal_proxy,
    polar_retraction,
    qr_retraction,
    retract_,
    singular_value_margin,
    soft,
    srip,
)  # fmt: skip

SHAPES = [(3, 5), (5, 3), (4, 4), (2, 3, 2, 6), (1, 4)]


def eye(w, columns=False):
    return torch.eye(w.shape[-1 if columns else -2], dtype=w.dtype)


def norm2(e):
    return e.square().sum((-2, -1))


def drawn(shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ------------------------------------------------------------------------------------------------------- penalties


@pytest.mark.parametrize("shape", SHAPES)
def test_penalties_are_their_formulas(shape):
    w = drawn(shape)
    rows, columns = shape[-2:]
    short = w if rows <= columns else w.mT
    defect = short @ short.mT - eye(short)
    torch.testing.assert_close(soft(w), norm2(defect))
    torch.testing.assert_close(soft(w), norm2(w @ w.mT - eye(w)) - max(rows - columns, 0))
    torch.testing.assert_close(double_soft(w), norm2(w.mT @ w - eye(w, True)) + norm2(w @ w.mT - eye(w)))
    torch.testing.assert_close(gain_adjusted(w, 1.3), norm2(short @ short.mT / 1.69 - eye(short)))
    torch.testing.assert_close(mutual_coherence(w), defect.abs().amax((-2, -1)))
    start = drawn((*shape[:-2], min(shape[-2:])), 2)
    powers = [start.unsqueeze(-1)]
    for _ in range(2):
        powers.append(defect @ powers[-1])
    expected = (powers[2].norm(dim=-2) / powers[1].norm(dim=-2)).squeeze(-1)
    torch.testing.assert_close(srip(w, start=start), expected)
    assert soft(w).shape == shape[:-2]


def test_srip_converges_to_the_spectral_norm():
    w = drawn((4, 7))
    exact = torch.linalg.matrix_norm(w @ w.T - torch.eye(4), ord=2)
    assert srip(w, steps=200) == pytest.approx(exact.item())
    assert (srip(w.expand(20, 4, 7), steps=1) <= exact * (1 + 1e-9)).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "name", ["soft", "gain", "gains", "double_soft", "mutual_coherence", "srip", "srip 1", "srip 4"]
)
def test_gradients_of_both_orders(name, shape):
    w = drawn(shape).requires_grad_()
    start = drawn((*shape[:-2], min(shape[-2:])), 2)
    gains = torch.rand(shape[:-2], dtype=torch.float64) + 0.5
    function = {
        "soft": soft, "gain": lambda w: gain_adjusted(w, 0.8), "gains": lambda w: gain_adjusted(w, gains),
        "double_soft": double_soft, "mutual_coherence": mutual_coherence, "srip": lambda w: srip(w, start=start),
        "srip 1": lambda w: srip(w, start=start, steps=1), "srip 4": lambda w: srip(w, start=start, steps=4),
    }[name]  # fmt: skip
    torch.autograd.gradcheck(function, w)
    torch.autograd.gradgradcheck(function, w)


def test_printed_gradients():
    """``4 (W W^T - I) W`` and ``(4 / s^2) (W W^T / s^2 - I) W`` (Hlav 2019, eq. 8 and 10, put right)."""
    w = drawn((3, 5)).requires_grad_()
    (gradient,) = torch.autograd.grad(soft(w), w)
    torch.testing.assert_close(gradient, 4 * (w @ w.T - eye(w)) @ w)
    (gradient,) = torch.autograd.grad(gain_adjusted(w, 1.1), w)
    torch.testing.assert_close(gradient, 4 / 1.21 * (w @ w.T / 1.21 - eye(w)) @ w)


@pytest.mark.parametrize("penalty", [soft, double_soft, mutual_coherence, srip])
def test_orthogonal_matrices_are_the_minimum(penalty):
    q = orthogonal_batched(torch.empty(3, 6, 6, dtype=torch.float64)).requires_grad_()
    value = penalty(q)
    assert value.abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(value.sum(), q)
    assert torch.isfinite(gradient).all()
    identity = torch.eye(4, dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(penalty(identity), identity)
    assert (gradient == 0).all(), "exactly orthogonal: no direction to go, and no NaN"


def test_half_precision_is_summed_in_float32():
    w = drawn((8, 300), dtype=torch.float32).bfloat16().requires_grad_()
    value = soft(w)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, soft(w.float()))
    value.backward()
    assert w.grad.dtype == torch.bfloat16


def test_vmap():
    w = drawn((6, 3, 5))
    torch.testing.assert_close(torch.func.vmap(soft)(w), soft(w))
    gradients = torch.func.vmap(torch.func.grad(soft))(w)
    torch.testing.assert_close(gradients, 4 * (w @ w.mT - eye(w)) @ w)


PENALTIES = {
    "soft": soft, "gain_adjusted": lambda w: gain_adjusted(w, 1.3), "double_soft": double_soft,
    "mutual_coherence": mutual_coherence, "srip": lambda w: srip(w, start=torch.ones(3, dtype=w.dtype)),
}  # fmt: skip


@pytest.mark.parametrize("name", PENALTIES)
def test_every_transform_gives_the_same_derivatives(name):
    penalty, w, tangent = PENALTIES[name], drawn((3, 5)), drawn((3, 5), 2)
    first = torch.autograd.functional.jacobian(penalty, w)
    second = torch.autograd.functional.hessian(penalty, w)
    func = torch.func
    for transform in (func.grad, func.jacrev, func.jacfwd):
        torch.testing.assert_close(transform(penalty)(w), first)
    for inner in (func.jacrev, func.jacfwd):
        for outer in (func.jacrev, func.jacfwd):
            torch.testing.assert_close(outer(inner(penalty))(w), second)
    torch.testing.assert_close(func.jvp(penalty, (w,), (tangent,))[1], (first * tangent).sum())
    with forward_ad.dual_level():
        dual = penalty(forward_ad.make_dual(w, tangent))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, (first * tangent).sum())
    torch.testing.assert_close(torch.autograd.functional.hessian(penalty, w, vectorize=True), second)


def test_a_start_and_a_gain_for_every_matrix_of_a_vmap():
    w, start, gains = drawn((6, 3, 5)), drawn((6, 3), 2), torch.rand(6, dtype=torch.float64) + 0.5
    found = torch.func.vmap(lambda w, start: srip(w, start=start))(w, start)
    torch.testing.assert_close(found, srip(w, start=start))
    torch.testing.assert_close(torch.func.vmap(gain_adjusted)(w, gains), gain_adjusted(w, gains))
    drawn_apart = torch.func.vmap(srip, randomness="different")(w[:1].expand(6, 3, 5))
    assert drawn_apart.unique().numel() == 6


def test_the_first_of_several_largest_entries_has_the_gradient():
    w = torch.eye(2, dtype=torch.float64).mul(2).requires_grad_()
    for differentiate in (lambda w: torch.autograd.grad(mutual_coherence(w), w)[0], torch.func.grad(mutual_coherence)):
        torch.testing.assert_close(differentiate(w), torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64))


# ------------------------------------------------------------------------------------------------------ retractions


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("retraction", [qr_retraction, polar_retraction])
def test_retractions(retraction, shape):
    w = drawn(shape)
    q = retraction(w, gain=2.0) / 2
    short = q if shape[-2] <= shape[-1] else q.mT
    torch.testing.assert_close(short @ short.mT, eye(short).expand(*shape[:-2], -1, -1))
    torch.testing.assert_close(retraction(q), q)  # what is orthogonal stays
    # W = Q R, of a square matrix too; of a wide one W^T.
    r = q @ w.mT if shape[-2] < shape[-1] else q.mT @ w
    if retraction is qr_retraction:
        assert (r.tril(-1).abs() < 1e-12).all()
        assert (r.diagonal(dim1=-2, dim2=-1) > 0).all()
    else:
        torch.testing.assert_close(r, r.mT)
        assert (torch.linalg.eigvalsh(r) > 0).all()
    nudged = retraction(q + 1e-6 * w)
    # A retraction: to first order the step along the tangent space.
    tangent = (nudged - q) / 1e-6
    small = q.mT @ tangent + tangent.mT @ q if shape[-2] >= shape[-1] else q @ tangent.mT + tangent @ q.mT
    assert small.abs().max() < 1e-4


@pytest.mark.parametrize(
    "retraction",
    [polar_retraction, qr_retraction, lambda w: singular_value_margin(w, 0.0), lambda w: cayley_step(w, w, 0)],
)
def test_autocast_leaves_retractions_alone(retraction):
    w = qr_retraction(drawn((64, 128), dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q = retraction(w)
        penalty = soft(w)
        gradient = torch.autograd.grad(soft(x := (2 * w).requires_grad_()), x)[0]
    assert (q @ q.mT - eye(q)).abs().max() < 1e-5
    assert penalty < 1e-9
    torch.testing.assert_close(gradient, 24 * w, rtol=1e-4, atol=1e-5)


def test_a_matrix_of_nan_has_no_norm():
    w = torch.full((3, 5), float("nan"))
    assert all(penalty(w).isnan() for penalty in (soft, double_soft, mutual_coherence, srip))


def test_an_initial_gain_of_zero_names_its_layer():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    nn.init.zeros_(model[2].weight)
    with pytest.raises(ValueError, match="gain: 'initial' of '2'"):
        Regularizer("gain_adjusted", gain="initial").loss(model)


def test_the_margin_clamps_singular_values():
    w = drawn((5, 3))
    s = torch.linalg.svdvals(w)
    clamped = singular_value_margin(w, 0.2, gain=1.5)
    expected = s.clamp(1.5 * 0.8, 1.5 * 1.2)
    torch.testing.assert_close(torch.linalg.svdvals(clamped), expected)
    torch.testing.assert_close(singular_value_margin(w, 0.0), polar_retraction(w))
    inside = singular_value_margin(w, 0.2)
    torch.testing.assert_close(singular_value_margin(inside, 0.3), inside)


@pytest.mark.parametrize("shape", [(4, 4), (3, 8, 5), (12, 3), (2, 3, 9), (6, 3)])
def test_the_cayley_step(shape):
    """Against the printed formula; orthonormality stays; downhill; to first order ``-lr A W``."""
    w, g = orthogonal_batched(torch.empty(shape, dtype=torch.float64)), drawn(shape)
    stepped = cayley_step(w, g, 0.3)
    x, y = (w, g) if shape[-2] >= shape[-1] else (w.mT, g.mT)
    a = y @ x.mT - x @ y.mT
    identity = torch.eye(a.shape[-1], dtype=torch.float64)
    expected = torch.linalg.inv(identity + 0.15 * a) @ (identity - 0.15 * a) @ x
    torch.testing.assert_close(stepped if shape[-2] >= shape[-1] else stepped.mT, expected)
    torch.testing.assert_close(expected.mT @ expected, x.mT @ x)
    assert ((cayley_step(w, g, 1e-4) - w) * g).sum() < 0


def test_the_proxy_is_torchs():
    for layer, name in ((nn.Linear(6, 4), "weight"), (WNLinear(6, 4), "weight_v"), (nn.RNN(3, 5), "weight_hh_l0")):
        orthogonal_proxy(layer, None if name != "weight_hh_l0" else name)
        w = getattr(layer, name)
        torch.testing.assert_close(w @ w.T, torch.eye(len(w)), rtol=0, atol=1e-5)
        x = torch.randn(7, 3 if isinstance(layer, nn.RNN) else 6)
        y = layer(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
        assert layer.parametrizations[name].original.grad is not None
    with pytest.raises(ValueError, match=r"weight of shape .* is no matrix"):
        orthogonal_proxy(nn.Conv2d(3, 3, 3))
    with pytest.raises(ValueError, match="Linear has no parameter 'w'"):
        orthogonal_proxy(nn.Linear(2, 2), "w")
    with pytest.raises(TypeError, match="name: expected the name of a parameter, got list"):
        orthogonal_proxy(nn.Linear(2, 2), ["weight"])


# ----------------------------------------------------------------------------------------------------------- models


def all_matrices(model):
    """Layer by layer, in plain torch: the effective matrices of every layer, groups and blocks one by one."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, wnfused.WNResidualStage):
            found[name] = [
                b.weight_v[i].flatten(1) * (b.weight_g[i] / b.weight_v[i].flatten(1).norm(dim=1)).unsqueeze(1)
                for b in module.blocks() for i in (0, 1)
            ]  # fmt: skip
        elif isinstance(module, nn.ConvTranspose2d):
            found[name] = [w.transpose(0, 1).flatten(1) for w in module.weight.chunk(module.groups)]
        elif isinstance(module, (nn.Linear, nn.Conv2d)):
            found[name] = [w.flatten(1) for w in module.weight.chunk(getattr(module, "groups", 1))]
    return found


def mixed():
    return nn.Sequential(
        WNConv2d(3, 16, 3, padding=1), wnfused.WNResidualStage(16, 16, 3), nn.Conv2d(16, 16, 3, padding=1, groups=2),
        wnfused.WNResidualStage(16, 8, 2, 2), nn.ConvTranspose2d(8, 8, 2, groups=4), wnfused.WNConvTranspose2d(8, 4, 2),
        nn.Flatten(), nn.LazyLinear(5), WNLinear(5, 5, dim=1),
    )  # fmt: skip


@pytest.mark.parametrize("penalty", ["soft", "double_soft", "mutual_coherence", "gain_adjusted"])
def test_the_loss_of_a_model_is_the_sum_of_its_layers(penalty):
    model = mixed()
    model(torch.randn(2, 3, 4, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0, 0.3)
    options = {"gain": 1.4} if penalty == "gain_adjusted" else {}
    function = {
        "soft": soft, "double_soft": double_soft, "mutual_coherence": mutual_coherence,
        "gain_adjusted": lambda w: gain_adjusted(w, 1.4),
    }[penalty]  # fmt: skip
    regularizer = Regularizer(penalty, strength=0.1, **options)
    parts = {name: sum(function(w) for w in ws) for name, ws in all_matrices(model).items()}
    loss = regularizer.loss(model)
    expected = 0.1 * sum(parts.values())
    torch.testing.assert_close(loss, expected)
    terms = regularizer.terms(model)
    assert terms == pytest.approx({name: value.item() for name, value in parts.items()}, rel=1e-4)
    parameters = [p for n, p in model.named_parameters() if "bias" not in n]
    gradients = torch.autograd.grad(loss, parameters)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_srip_of_a_model_is_seeded():
    model = wnfused.models.cnn(4, 8)
    values = [Regularizer("srip", generator=torch.Generator().manual_seed(2)).loss(model) for _ in range(2)]
    assert values[0] == values[1] > 0


@pytest.mark.parametrize("wide_first", [False, True])
def test_the_loss_of_layers_of_several_dtypes_is_summed_in_the_widest(wide_first):
    narrow, wide = WNLinear(6, 6), WNLinear(8, 8, dtype=torch.float64)
    loss = Regularizer(strength=1.0).loss(nn.Sequential(*((wide, narrow) if wide_first else (narrow, wide))))
    assert loss.dtype == torch.float64
    parts = [Regularizer(strength=1.0).loss(layer).double() for layer in (narrow, wide)]
    torch.testing.assert_close(loss, sum(parts), rtol=1e-12, atol=0)


def test_gains_are_kept_or_left_free():
    """A network with gain sqrt(2) everywhere: soft pulls it down, gain-adjusted holds it, directions do not see it."""
    model = nn.Sequential(*(WNLinear(12, 12, activation="relu") for _ in range(3)))
    assert Regularizer("soft", strength=1.0).loss(model).item() == pytest.approx(36, rel=1e-4)
    assert Regularizer("gain_adjusted", strength=1.0, gain=math.sqrt(2)).loss(model).abs() < 1e-6
    initial = Regularizer("gain_adjusted", strength=1.0, gain="initial")
    assert initial.loss(model).abs() < 1e-6
    directions = Regularizer("soft", strength=1.0, weight="direction")
    assert directions.loss(model).abs() < 1e-6
    with torch.no_grad():
        model[1].weight_g.mul_(2)
    assert initial.loss(model).item() == pytest.approx(9 * 12, rel=1e-4)
    assert directions.loss(model).abs() < 1e-6
    (gradient,) = torch.autograd.grad(initial.loss(model), [model[1].weight_g])
    assert (gradient > 0).all()


def test_initial_gains_are_those_of_each_layer():
    """Of two models with the same names; under whatever name a layer is found; and of no layer that is gone."""
    ours, theirs = (nn.Sequential(WNLinear(6, 6, gamma=gamma)) for gamma in (1.0, 4.0))
    regularizer = Regularizer("gain_adjusted", strength=1.0, gain="initial")
    for model in (ours, theirs, nn.ModuleDict({"wrapped": theirs})):
        assert regularizer.loss(model).abs() < 1e-6
    with torch.no_grad():
        theirs[0].weight_g.mul_(2)
    assert regularizer.loss(nn.ModuleDict({"wrapped": theirs})).item() == pytest.approx(9 * 6, rel=1e-4)
    copies = copy.deepcopy(regularizer), pickle.loads(pickle.dumps(regularizer))
    assert all(other.loss(theirs).abs() < 1e-6 for other in copies)
    del model, theirs
    gc.collect()
    assert list(regularizer._initial) == [ours[0]]


def test_a_filter_chooses_layers():
    model = wnfused.models.wrn(16)
    regularizer = Regularizer(filter=lambda name, module: name != "head")
    assert "head" not in regularizer.terms(model)
    assert "stages.1" in regularizer.terms(model)
    with pytest.raises(ValueError, match="model: has no linear or convolutional layer"):
        Regularizer(filter=lambda name, module: False).loss(model)


@pytest.mark.parametrize("method", ["polar", "qr"])
def test_a_model_is_retracted(method):
    model = nn.Sequential(
        WNConv2d(3, 16, 3), wnfused.WNResidualStage(16, 16, 2), nn.Conv2d(16, 16, 3, groups=2),
        nn.ConvTranspose2d(16, 3, 2), nn.Linear(20, 4),
    )  # fmt: skip
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
        model[0].weight_g.fill_(1.5)
        model[1].weight_g.fill_(1.0)
    assert retract_(model, method, gain=1.5) is model
    for name, ws in all_matrices(model).items():
        gain = 1.0 if name == "1" else 1.5
        for w in ws:
            gram = w @ w.T if len(w) <= w.shape[1] else w.T @ w
            torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), rtol=0, atol=1e-4, msg=name)
    with pytest.raises(ValueError, match="model: '0' is normalised over other rows"):
        retract_(nn.Sequential(wnfused.WNConvTranspose2d(2, 2, 2)))


def test_a_retraction_says_what_it_cannot_do_and_changes_nothing():
    computed = orthogonal_proxy(wnfused.WNLinear(4, 4))
    with pytest.raises(ValueError, match="the weight of '1' is computed by something else"):
        retract_(nn.Sequential(nn.Linear(4, 4), computed))
    pruned = (
        (wnfused.WNLinear(4, 4), "weight_v"),
        (nn.Linear(4, 4), "weight"),
        (wnfused.WNResidualStage(2, 2, 2), "weight_v"),
    )
    for layer, name in pruned:
        prune.l1_unstructured(layer, name, 3)
        with pytest.raises(ValueError, match="the weight of '0' is computed by something else"):
            retract_(nn.Sequential(layer))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 3), nn.Linear(3, 3))
    with torch.no_grad():
        model[2].weight[0, 0] = math.nan
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="the weight of '2' has NaN or inf"):
        retract_(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("retraction", [qr_retraction, polar_retraction])
def test_retractions_can_be_differentiated(retraction):
    torch.autograd.gradcheck(retraction, drawn((3, 3)).requires_grad_())


ORTHOGONAL = {
    "eye": torch.eye(3, dtype=torch.float64), "tall": torch.linalg.qr(drawn((5, 3))).Q,
    "wide": torch.linalg.qr(drawn((5, 3))).Q.mT, "doubled": 2 * torch.linalg.qr(drawn((3, 3))).Q,
    "with others": torch.stack([torch.linalg.qr(drawn((5, 3))).Q, drawn((5, 3), 2)]),
    "two equal": torch.diag(torch.tensor([2.0, 2.0, 0.5], dtype=torch.float64)),
}  # fmt: skip


@pytest.mark.parametrize("name", ORTHOGONAL)
@pytest.mark.parametrize(
    "retraction",
    [polar_retraction, lambda w: polar_retraction(w, gain=-2.0), lambda w: singular_value_margin(w, 0.3, gain=1.1)],
    ids=["polar", "polar with a gain", "margin"],
)
def test_equal_singular_values_have_gradients(retraction, name):
    w = ORTHOGONAL[name].clone().requires_grad_()
    torch.autograd.gradcheck(retraction, w)
    (gradient,) = torch.autograd.grad(retraction(w).square().cumsum(-1).sum(), w)
    by_func = torch.func.grad(lambda w: retraction(w).square().cumsum(-1).sum())(w.detach())
    torch.testing.assert_close(by_func, gradient)


def test_margins_of_zeros_have_gradients():
    w = torch.zeros(3, 2, dtype=torch.float64).requires_grad_()
    torch.autograd.gradcheck(lambda w: singular_value_margin(w, 1.0), w)


def of_a_retraction(retraction):
    return lambda w: (retraction(w) * torch.arange(15.0).view(3, 5)).sin().sum()


@pytest.mark.parametrize("retraction", [polar_retraction, lambda w: singular_value_margin(w, 0.2)])
def test_derivatives_of_retractions_by_every_transform(retraction):
    function, w, func = of_a_retraction(retraction), drawn((3, 5)), torch.func
    torch.autograd.gradgradcheck(retraction, w.clone().requires_grad_())
    first = torch.autograd.functional.jacobian(function, w)
    second = torch.autograd.functional.hessian(function, w)
    for transform in (func.grad, func.jacrev, func.jacfwd):
        torch.testing.assert_close(transform(function)(w), first)
    for inner in (func.jacrev, func.jacfwd):
        for outer in (func.jacrev, func.jacfwd):
            torch.testing.assert_close(outer(inner(function))(w), second)
    x = w.clone().requires_grad_()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], first)


def test_autocast_leaves_the_gradients_of_retractions_alone():
    w = drawn((8, 16), dtype=torch.float32).requires_grad_()
    expected = torch.autograd.grad(polar_retraction(w).cumsum(-1).sum(), w)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(polar_retraction(w).cumsum(-1).sum(), w)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "function",
    [
        qr_retraction, polar_retraction, lambda w: singular_value_margin(w, 0.1), gain_adjusted,
        lambda w, start: srip(w, start=start), lambda w: gain_adjusted(w, torch.tensor(1.3)),
    ],
    ids=["qr", "polar", "margin", "gains", "srip", "one gain"],
)  # fmt: skip
def test_gradients_within_vmap(function):
    w = drawn((4, 3, 5))
    others = {gain_adjusted: (torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64),)}.get(function, ())
    if function.__code__.co_argcount == 2 and not others:
        others = (drawn((4, 3), 2),)
    gradient = torch.func.grad(lambda w, *others: function(w, *others).square().sum())
    expected = torch.stack([gradient(*one) for one in zip(w, *others, strict=True)])
    torch.testing.assert_close(torch.func.vmap(gradient)(w, *others), expected)


def test_numbers_are_checked_within_grad():
    with pytest.raises(ValueError, match="w: has NaN or inf"):
        torch.func.grad(lambda w: polar_retraction(w).sum())(NAN)


def test_a_gain_of_one_number_may_be_elsewhere():
    assert gain_adjusted(torch.ones(4, 2, 3, device="meta"), torch.tensor(1.3)).shape == (4,)


def test_a_model_without_memory():
    model = nn.Sequential(WNLinear(4, 4, device="meta"), nn.Linear(4, 4, device="meta"))
    for method in ("polar", "qr"):
        assert retract_(model, method) is model
    regularizer = Regularizer("gain_adjusted", gain="initial")
    assert regularizer.loss(model).is_meta
    model.to_empty(device="cpu")
    wnfused.init.initialize(model, "orthogonal")
    assert regularizer.loss(model) < 1e-9, "gains are those of the first weights that there are"


def test_layers_without_inputs_have_no_matrix():
    model = nn.Sequential(nn.Linear(0, 3), WNLinear(3, 0), nn.Linear(3, 3))
    assert Regularizer().terms(model) == Regularizer().terms(nn.ModuleDict({"2": model[2]}))
    with pytest.raises(ValueError, match="model: has no linear or convolutional layer"):
        Regularizer().loss(model[:2])


def test_tied_weights_count_once():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    assert Regularizer().loss(model) == Regularizer().loss(first)
    assert Regularizer(filter=lambda name, module: name == "1").terms(model).keys() == {"1"}
    first, second = WNLinear(3, 3), WNLinear(3, 3)
    second.weight_v = first.weight_v
    model = nn.Sequential(first, second)
    assert Regularizer().terms(model).keys() == {"0", "1"}, "with gains of their own"
    assert Regularizer(weight="direction").terms(model).keys() == {"0"}


def test_a_regularised_network_becomes_orthogonal():
    model = nn.Sequential(WNLinear(6, 10), nn.ReLU(), nn.Linear(10, 4))
    regularizer = Regularizer(strength=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(400):
        optimizer.zero_grad()
        regularizer.loss(model).backward()
        optimizer.step()
    torch.testing.assert_close(torch.linalg.svdvals(model[2].weight), torch.ones(4), rtol=0, atol=1e-3)
    assert regularizer.loss(model) < 1e-4


NAN = torch.full((2, 2), math.nan)


def of_nan():
    layer = nn.Linear(2, 2)
    nn.init.constant_(layer.weight, math.nan)
    return layer


@pytest.mark.parametrize("retraction", [qr_retraction, polar_retraction])
def test_retractions_where_numbers_cannot_be_seen(retraction):
    w = drawn((6, 3, 5))
    compiled = torch.compile(retraction, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(w), retraction(w))
    torch.testing.assert_close(torch.func.vmap(retraction)(w), retraction(w))
    assert retraction(w.to("meta")).shape == w.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_another_dtype(dtype):
    w, g = orthogonal_batched(torch.empty(4, 3, dtype=torch.float64)), drawn((4, 3)).to(dtype)
    torch.testing.assert_close(cayley_step(w, g, 0.1), cayley_step(w, g.double(), 0.1))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: soft(torch.ones(3)), ValueError, r"w: shape \[3\] must be \[..., r, c\]"),
        (lambda: soft(torch.ones(2, 2).long()), TypeError, "w: expected a floating-point tensor, got torch.int64"),
        (lambda: gain_adjusted(torch.ones(2, 2), 0.0), ValueError, "gain: 0.0 must be finite and above 0"),
        (
            lambda: gain_adjusted(torch.ones(2, 2), torch.ones(3)),
            ValueError,
            r"gain: shape \[3\] does not fit; use \[\]",
        ),
        (lambda: srip(torch.ones(2, 3), steps=0), ValueError, "steps: 0 must be an int of at least 1"),
        (
            lambda: srip(torch.ones(2, 3), start=torch.ones(3)),
            ValueError,
            r"start: shape \[3\] does not fit; use \[2\]",
        ),
        (lambda: singular_value_margin(torch.ones(2, 2), -1.0), ValueError, "margin: -1.0 must be"),
        (lambda: cayley_step(torch.ones(2, 2), torch.ones(3, 2), 0.1), ValueError, "gradient: shape"),
        (lambda: cayley_step(torch.ones(2, 2), torch.ones(2, 2), math.inf), ValueError, "lr: inf must be finite"),
        (lambda: retract_(3), TypeError, "model: expected an nn.Module, got int"),
        (lambda: srip(torch.ones(2, 3), start=[1]), TypeError, "start: expected a Tensor, got list"),
        (lambda: srip(torch.ones(2, 3), generator=3), TypeError, "generator: 3 must be a torch.Generator or None"),
        (lambda: cayley_step(torch.ones(2, 2), [1], 0.1), TypeError, "gradient: expected a Tensor, got list"),
        (lambda: retract_(WNLinear(2, 2), ["polar"]), ValueError, r"method: unknown \['polar'\]; use 'polar' or 'qr'"),
        (lambda: retract_(WNLinear(2, 2), gain="a"), TypeError, "gain: expected a number, got str"),
        (lambda: retract_(WNLinear(2, 2), filter=["0"]), TypeError, r"filter: expected a function, got \['0'\]"),
        (lambda: retract_(nn.LazyLinear(2)), ValueError, "model: 'weight' has no shape yet; run the model once"),
        (lambda: Regularizer(filter=["0"]), TypeError, r"filter: expected a function, got \['0'\]"),
        (lambda: Regularizer().loss(nn.LazyLinear(2)), ValueError, "model: 'weight' has no shape yet; run the"),
        (lambda: orthogonal_proxy(3), TypeError, "layer: expected an nn.Module, got int"),
        (lambda: qr_retraction([1.0]), TypeError, "w: expected a Tensor, got list"),
        (lambda: Regularizer("hard"), ValueError, "penalty: unknown 'hard'; use one of soft"),
        (lambda: Regularizer(strength=-1.0), ValueError, "strength: -1.0 must be"),
        (lambda: Regularizer("gain_adjusted", gain=True - 1), ValueError, "gain: 0 must be"),
        (lambda: Regularizer(gain=2.0), ValueError, "gain: 2.0 is for penalty='gain_adjusted'"),
        (lambda: Regularizer("gain_adjusted", gain="final"), ValueError, "gain: 'final' must be"),
        (lambda: Regularizer(weight="v"), ValueError, "weight: unknown 'v'"),
        (lambda: Regularizer().loss(3), TypeError, "model: expected an nn.Module, got int"),
        (lambda: gain_adjusted(drawn((2, 3)), torch.tensor(math.inf)), ValueError, "gain: inf must be finite"),
        (lambda: singular_value_margin(drawn((2, 3)), 0.1, gain=-1.0), ValueError, "gain: -1.0 must be"),
        (lambda: qr_retraction(NAN), ValueError, "w: has NaN or inf"),
        (lambda: polar_retraction(NAN), ValueError, "w: has NaN or inf"),
        (lambda: polar_retraction(torch.full((2, 3), math.inf)), ValueError, "w: has NaN or inf"),
        (lambda: singular_value_margin(NAN, 0.1), ValueError, "w: has NaN or inf"),
        (lambda: cayley_step(NAN, torch.ones(2, 2), 0.1), ValueError, "w: has NaN or inf"),
        (lambda: cayley_step(torch.ones(2, 2), NAN, 0.1), ValueError, "gradient: has NaN or inf"),
        (
            lambda: cayley_step(torch.ones(2, 2), torch.ones(2, 2, device="meta"), 0.1),
            ValueError,
            "gradient: is on meta, w on cpu; use one device",
        ),
        (
            lambda: cayley_step(torch.ones(2, 2), torch.ones(2, 2).long(), 0.1),
            TypeError,
            "gradient: expected a floating-point tensor, got torch.int64",
        ),
        (
            lambda: soft(torch.nested.nested_tensor([torch.eye(2)])),
            TypeError,
            "w: expected a dense tensor, got a nested",
        ),
        (lambda: soft(torch.eye(2).to_sparse()), TypeError, "w: expected a dense tensor, got layout torch"),
        (lambda: srip(torch.ones(2, 2), start=NAN[0]), ValueError, "start: has NaN or inf"),
        (lambda: srip(torch.ones(2, 2), start=torch.zeros(2)), ValueError, "start: is 0 for some matrix"),
        (lambda: srip(torch.ones(2, 2), start=torch.ones(2, device="meta")), ValueError, "start: is on meta, w on cpu"),
        (
            lambda: gain_adjusted(torch.ones(2, 2), torch.tensor(1j)),
            TypeError,
            "gain: expected real numbers, got torch.complex64",
        ),
        (
            lambda: gain_adjusted(torch.ones(2, 2), torch.tensor(1.0, device="meta")),
            ValueError,
            "gain: is on meta, w on cpu",
        ),
        (lambda: Regularizer("gain_adjusted", gain=10**400), ValueError, "gain: 10+ must be finite and above 0"),
        (lambda: Regularizer("gain_adjusted", gain=1e-200), ValueError, "gain: 1e-200 must be between 1.5e-154 and"),
        (lambda: Regularizer("gain_adjusted", gain=1e200), ValueError, r"gain: 1e\+200 must be between 1.5e-154 and"),
        (
            lambda: Regularizer("gain_adjusted", gain=1e-30).loss(nn.Linear(2, 2)),
            ValueError,
            r"gain: 1e-30 must be between 1\.1e-19 and 9\.2e\+18, for 1 / gain\^2 in torch\.float32",
        ),
        (lambda: gain_adjusted(drawn((2, 3)), 1e-200), ValueError, "gain: 1e-200 must be between 1.5e-154 and"),
        (lambda: gain_adjusted(drawn((2, 3)), 1e200), ValueError, r"gain: 1e\+200 must be between 1.5e-154 and"),
        (
            lambda: gain_adjusted(torch.ones(2, 3), torch.tensor(1e-30).double()),
            ValueError,
            r"gain: 1\.0.*e-30 must be finite and above 0, and 1 / gain\^2 a number in torch\.float32",
        ),
        (
            lambda: orthogonal_proxy(nn.Linear(2, 2), orthogonal_map="qr"),
            ValueError,
            "orthogonal_map: unknown 'qr'; use",
        ),
        (lambda: orthogonal_proxy(nn.Linear(2, 2), orthogonal_map=3), ValueError, "orthogonal_map: unknown 3; use one"),
        (lambda: orthogonal_proxy(nn.LazyLinear(2)), ValueError, "layer: weight has no shape yet; run the layer once"),
        (lambda: orthogonal_proxy(nn.Linear(2, 2, device="meta")), ValueError, "layer: weight is a meta tensor"),
        (lambda: orthogonal_proxy(of_nan()), ValueError, r"layer\.weight: has NaN or inf"),
        (lambda: retract_(nn.Linear(2, 2), "svd"), ValueError, "method: unknown 'svd'; use 'polar' or 'qr'"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "others"),
    [("qr_retraction", {}), ("polar_retraction", {}), ("singular_value_margin", {"margin": 0.1}), ("soft", {})],
)
def test_matrices_by_keyword(name, others):
    function, w = getattr(wnfused.regularize, name), torch.randn(3, 3)
    torch.testing.assert_close(function(w=w, **others), function(w, **others))


def test_a_regularizer_shows_what_it_was_built_with():
    def hidden(name, module):
        return "hidden" in name

    assert repr(Regularizer()) == "Regularizer('soft', strength=0.0001)"
    given = {"strength": 1e-3, "gain": "initial", "weight": "direction"}
    shown = repr(Regularizer("gain_adjusted", **given))
    assert shown == "Regularizer('gain_adjusted', strength=0.001, gain='initial', weight='direction')"
    assert repr(eval(shown)) == shown
    assert f"filter={hidden!r}" in repr(Regularizer(filter=hidden))
    assert "generator=<torch" in repr(Regularizer("srip", generator=torch.Generator()))
