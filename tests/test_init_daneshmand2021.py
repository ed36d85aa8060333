"""Iterative orthogonalisation: the formula in float64, the theorem as a property, every geometry, short samples."""

import math

import pytest
import torch
import torch.nn.functional as F
from drawn import generator
from torch import nn

import wnfused
from wnfused import WNConv2d, WNLinear
from wnfused.init import find_roles, initialize, initialize_population
from wnfused.init.daneshmand2021 import as_weight, patches_of, representation_of
from wnfused.init.isotropic import isotropic_weight, represent, represent_columns
from wnfused.init.units import units_of


def by_the_formula(h, rows, exponent, polar):
    """``V' S^-p U^T`` over the Frobenius norm of its product with H, by the full SVD."""
    u, s, vt = torch.linalg.svd(h.double(), full_matrices=False)
    v = vt.T[:rows]
    if polar:
        a, _, b = torch.linalg.svd(v, full_matrices=False)
        v = a @ b
    w = v @ torch.diag(s**-exponent) @ u.T
    return w / torch.linalg.matrix_norm(w @ h.double())


def gap(h):
    """Eq. 2 as it stands."""
    h = h.double()
    return torch.linalg.matrix_norm(h.T @ h / h.square().sum() - torch.eye(h.shape[1]) / h.shape[1]).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(16, 48, 16), (16, 16, 16), (20, 60, 8), (8, 40, 24), (30, 20, 12)])
@pytest.mark.parametrize("exponent", [0.5, 1.0])
@pytest.mark.parametrize("kind", ["polar", "raw"])
def test_the_formula(kind, exponent, shape, dtype):
    """``[d, n, d_out]``: square as in the paper, narrow, wide, and with n < d; by Gram matrix and by SVD."""
    d, n, d_out = shape
    h = torch.randn(d, n, generator=generator(), dtype=dtype) * torch.linspace(0.2, 2, d, dtype=dtype)[:, None]
    w = isotropic_weight(represent(h, slice(0, d_out)), d_out, kind=kind, exponent=exponent)
    expected = by_the_formula(h, d_out, exponent, kind == "polar")
    tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(w, expected, rtol=0, atol=tolerance * expected.abs().max().item())
    if exponent == 0.5 and kind == "polar" and d_out >= min(d, n):
        # Printed with ||S^(1/2)||_F, which is the same where V' has orthonormal columns.
        s = torch.linalg.svdvals(h.double())
        assert torch.linalg.svdvals(w @ h.double())[: len(s)].square().tolist() == pytest.approx((s / s.sum()).tolist())


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_the_gap_never_rises(exponent):
    """From a layer's input to its pre-activation, wherever there are as many outputs as directions."""
    for seed in range(40):
        torch.manual_seed(seed)
        n, d = torch.randint(2, 40, (2,)).tolist()
        d_out = min(d, n) + int(torch.randint(0, 5, ()))
        h = torch.randn(d, n) @ torch.diag(torch.rand(n) + 0.01) + torch.rand(()) * torch.randn(d, 1)
        w = isotropic_weight(represent(h, slice(0, min(d_out, n))), d_out, exponent=exponent)
        before, after = gap(h), gap(w @ h.double())
        assert after <= before + 1e-6
        assert torch.linalg.matrix_norm(w @ h.double()).item() == pytest.approx(1)
        if exponent == 1.0:
            assert after == pytest.approx(math.sqrt(max(1 / min(d, n) - 1 / n, 0)), abs=1e-5)


def test_a_raw_slice_can_raise_the_gap_and_its_polar_factor_does_not():
    """Near-isotropic H, d = 32, n = 96: the floor is ``sqrt(1/32 - 1/96) = .144``."""
    q = torch.linalg.qr(torch.randn(96, 32, generator=generator(), dtype=torch.float64))[0].T
    h = q + 0.002 * torch.randn(32, 96, generator=generator(2))
    gaps = {kind: gap(isotropic_weight(represent(h, slice(0, 32)), 32, kind=kind) @ h) for kind in ("raw", "polar")}
    assert gap(h) == pytest.approx(0.1445, abs=5e-4)
    assert gaps["polar"] == pytest.approx(0.1443, abs=2e-4)
    assert gaps["raw"] > 0.18


def test_batches_are_what_their_members_are():
    h = torch.randn(2, 3, 10, 25, generator=generator())
    together = represent(h, slice(0, 12))
    weights = isotropic_weight(together, 12)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(weights[i, j], isotropic_weight(represent(h[i, j], slice(0, 12)), 12))
    parts = represent_columns(h.split(13, dim=-1), slice(0, 12))
    torch.testing.assert_close(isotropic_weight(parts, 12), weights)


def test_members_of_a_batch_may_differ_in_rank():
    h = torch.randn(3, 8, 30, generator=generator())
    h[1, 5:] = 0
    h[2] = h[2, :, :1]
    weights = isotropic_weight(represent(h, slice(0, 8)), 8)
    assert torch.linalg.matrix_rank(weights, rtol=1e-6).tolist() == [8, 5, 1]
    for w, x in zip(weights, h, strict=True):
        assert gap(w @ x.double()) <= gap(x) + 1e-6


GEOMETRIES = [
    WNConv2d(4, 6, 3, padding=1), nn.Conv2d(4, 6, (3, 2), (2, 1), (0, 1), dilation=(1, 2)),
    WNConv2d(4, 6, 3, padding=1, groups=2, padding_mode="circular"), nn.Conv1d(4, 8, 5, 3, padding=2, groups=4),
    nn.Conv2d(4, 4, 5, padding="same", dilation=1), wnfused.WNConv3d(4, 3, 2, (1, 2, 1)), nn.Conv2d(4, 5, 1, 2),
    nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2),
    wnfused.WNConvTranspose1d(4, 3, 4, 3, dilation=2), nn.ConvTranspose3d(4, 2, 2),
]  # fmt: skip


@pytest.mark.parametrize("layer", GEOMETRIES, ids=repr)
def test_patches_are_what_the_weight_multiplies(layer):
    unit = next(iter(units_of(find_roles(nn.Sequential(layer))[0])))
    x = torch.randn(3, 4, *[7] * len(unit.kernel))
    c_in, c_out = unit.channels
    matrix = torch.randn(unit.groups, c_out, c_in * math.prod(unit.kernel))
    with torch.no_grad():
        unit.set_weight_(as_weight(unit, matrix))
        if layer.bias is not None:
            layer.bias.zero_()
    y = layer(x)
    expected = (matrix @ patches_of(unit, x)).reshape(-1, 3, *y.shape[2:]).transpose(0, 1)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("exponent", [0.5, 1.0])
@pytest.mark.parametrize("norm", ["weight", "none"])
def test_an_mlp_by_a_loop_in_float64(norm, exponent):
    """Batch of three times the width; first layer and head Xavier's."""
    model = wnfused.models.mlp(5, 20, in_features=30, norm=norm)
    sample = torch.randn(60, 30, generator=generator(3))
    report = initialize(model, "daneshmand2021", sample=sample, exponent=exponent, generator=generator())
    assert not report.notes
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for edge in (layers[0], layers[-1]):
        bound = math.sqrt(2) * math.sqrt(6 / (edge.in_features + edge.out_features))
        assert 0.8 * bound < edge.weight.abs().max() <= bound * (1 + 1e-6)
    h = sample.double()
    for i, layer in enumerate(layers[:-1]):
        weight = layer.weight.detach().double()
        if i:
            expected = by_the_formula(h.T, 20, exponent, polar=True)
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
            assert gap((h @ weight.T).T) <= gap(h.T)
        assert (layer.bias == 0).all()
        h = torch.relu(h @ weight.T)


@pytest.mark.parametrize("norm", ["weight", "none"])
def test_residual_networks(norm):
    """Every pre-activation has Frobenius norm 1, those that close a branch ``1 / sqrt(B_k)``; stages inside one op."""
    model = wnfused.models.wrn(22, 2, in_channels=1, norm=norm)
    sample = torch.randn(64, 1, 8, 8, generator=generator(3))
    initialize(model, "daneshmand2021", sample=sample, generator=generator())
    if norm == "weight":
        model.stages = nn.Sequential(*(stage.unstack() for stage in model.stages))
    sizes = {}

    def observe(name):
        def before(module, arguments):
            y = F.conv2d(arguments[0], module.weight.detach(), None, module.stride, module.padding)
            sizes[name] = y.norm().item()

        return before

    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(observe(name))
    model(sample)
    assert len(sizes) == 22
    for name, size in sizes.items():
        assert size == pytest.approx(3**-0.5 if name.endswith("conv2") else 1.0, rel=1e-3), name


def test_among_batch_norms_outputs_have_mean_square_one():
    model = wnfused.models.wrn(22, 2, in_channels=1, norm="batch")
    sample = torch.randn(64, 1, 8, 8, generator=generator(3))
    initialize(model, "daneshmand2021", sample=sample, generator=generator())
    sizes = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda m, i, y, name=name: sizes.update({name: y.detach().square().mean().sqrt().item()})
            )
    model(sample)
    for name, size in sizes.items():
        assert size == pytest.approx(3**-0.5 if name.endswith("conv2") else 1.0, rel=1e-3), name


def test_groups_are_one_output():
    model = nn.Sequential(nn.Conv2d(2, 8, 1), nn.Conv2d(8, 8, 3, groups=4, bias=False), nn.Flatten(), nn.Linear(128, 2))
    sample = torch.randn(64, 2, 6, 6)
    report = initialize(model, "daneshmand2021", sample=sample)
    assert "rank" in report.entries[1].role
    assert model[1](model[0](sample)).norm().item() == pytest.approx(1, rel=1e-4)


def test_convolutions_use_their_leading_directions():
    """Of a convolution with as many outputs as directions are used, the gap against those directions never rises."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3, bias=False), nn.Flatten(), nn.Linear(96, 2))
    sample = torch.randn(64, 3, 8, 8)
    initialize(model, "daneshmand2021", sample=sample)
    x = torch.relu(model[0](sample))
    h = F.unfold(x, 3).transpose(0, 1).flatten(1).double()
    _, s, vt = torch.linalg.svd(h, full_matrices=False)
    y = model[2](x).transpose(0, 1).flatten(1)
    expected = (s[:6] / s[:6].sum()).sqrt()
    torch.testing.assert_close(torch.linalg.svdvals(y.double()), expected, rtol=1e-4, atol=1e-5)
    assert gap(y.detach()) <= gap(torch.diag(s[:6]) @ vt[:6]) + 1e-6


def test_square_layers_alone():
    model = nn.Sequential(*(nn.Conv2d(a, b, 3) for a, b in ((3, 4), (4, 4), (4, 6), (6, 6))))
    report = initialize(model, "daneshmand2021", sample=torch.randn(64, 3, 10, 10), layers="square")
    assert ["Xavier" in entry.role for entry in report] == [True, False, True, True]  # the last is the head


class Parallel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.q, self.k, self.out = (WNLinear(a, b) for a, b in ((6, 8), (8, 8), (8, 8), (8, 2)))

    def forward(self, x):
        h = torch.tanh(self.embed(x))
        return self.out(self.q(h) * self.k(h))


def test_layers_that_share_an_input_differ():
    model = Parallel()
    sample = torch.randn(64, 6)
    initialize(model, "daneshmand2021", sample=sample)
    assert (model.q.weight - model.k.weight).abs().max() > 0.01
    h = torch.tanh(model.embed(sample)).T
    for layer in (model.q, model.k):
        assert gap((layer.weight @ h).detach()) <= gap(h.detach())


def test_short_samples():
    def network():
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))

    sample = torch.randn(10, 6, generator=generator())
    model = network()
    report = initialize(model, "daneshmand2021", sample=sample, generator=generator())
    assert report.notes == ("2: the sample gives its input rank 10 of 16: pseudo-inverse, V' drawn at random",)
    h = torch.relu(model[0](sample)).T
    assert (model[2].weight.norm(dim=1) > 0).all()
    assert gap((model[2].weight @ h).detach()) <= gap(h.detach())
    with pytest.raises(ValueError, match="'2': the sample gives its input rank 10 of 16; use a larger one"):
        initialize(network(), "daneshmand2021", sample=sample, deficient="error")
    with pytest.raises(ValueError, match="10 columns are too few for slice='raw' and 16 outputs"):
        initialize(network(), "daneshmand2021", sample=sample, slice="raw")
    # Many samples of low rank.
    flat = torch.randn(64, 2, generator=generator()) @ torch.randn(2, 16, generator=generator())
    layers = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16), nn.Linear(16, 2))
    report = initialize(layers, "daneshmand2021", sample=flat)
    assert report.notes == ("1: the sample gives its input rank 2 of 16: pseudo-inverse",)
    assert all(torch.isfinite(p).all() for p in layers.parameters())
    dead = initialize(network(), "daneshmand2021", sample=torch.zeros(64, 6))
    assert "2: the sample gives its input rank 0 of 16: stays Xavier's" in dead.notes


@pytest.mark.parametrize("norm", ["weight", "none"])
def test_a_population_is_what_its_members_are(norm, monkeypatch):
    """Each layer of all members is solved for by one call."""
    calls = []

    def counted(unit, inputs, start=0):
        calls.append((unit.name, len(inputs)))
        return representation_of(unit, inputs, start)

    def members():
        torch.manual_seed(0)
        models = [wnfused.models.wrn(16, in_channels=1, norm=norm) for _ in range(4)]
        return models, [generator(seed) for seed in range(4)]

    sample = torch.randn(64, 1, 6, 6, generator=generator())
    alone, generators = members()
    for model, source in zip(alone, generators, strict=True):
        initialize(model, "daneshmand2021", sample=sample, generator=source)
    together, generators = members()
    monkeypatch.setattr("wnfused.init.daneshmand2021.representation_of", counted)
    reports = initialize_population(together, sample=sample, generators=generators)
    assert len(calls) == len(set(calls)) == 14
    assert {n for _, n in calls} == {4}
    assert len(reports) == 4
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a(sample), b(sample), rtol=1e-3, atol=1e-6)
    assert not torch.equal(together[0](sample), together[1](sample))


@pytest.mark.parametrize("scheme", ["he", "daneshmand2021"])
def test_a_population_follows_torchs_seed(scheme):
    found = []
    for generators in (None, [None] * 6, [None] * 6):
        torch.manual_seed(3)
        models = [wnfused.models.mlp(3, 8, in_features=6) for _ in range(6)]
        initialize_population(models, scheme, sample=torch.randn(64, 6), generators=generators)
        found.append([torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    assert not torch.equal(found[0][0], found[0][1])


def test_populations_by_other_schemes_and_their_errors():
    def members(width=8):
        return [wnfused.models.mlp(2, width, in_features=6) for _ in range(3)]

    models = members()
    reports = initialize_population(models, "salimans2016", sample=torch.randn(64, 6))
    assert [len(report) for report in reports] == [3, 3, 3]
    with pytest.raises(ValueError, match="models: differ in their parameters"):
        initialize_population([*members(), *members(4)], "he")
    with pytest.raises(ValueError, match="models: is empty"):
        initialize_population([], "he")
    with pytest.raises(ValueError, match="generators: 1 for 3 models"):
        initialize_population(members(), "he", generators=[None])
    with pytest.raises(ValueError, match=r"'layers.1': the sample gives its input rank 4 of 8"):
        initialize_population(members(), sample=torch.randn(4, 6), deficient="error")


def test_lazy_layers_take_their_shape_from_the_sample():
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"model: '0.weight' has no shape yet; run the model once, or give a sample"):
        initialize(model, "he")
    assert len(initialize(model, "daneshmand2021", sample=torch.randn(64, 5))) == 3


def test_lazy_layers_of_a_population_take_theirs_too():
    def lazy(width=8):
        return nn.Sequential(nn.LazyLinear(width), nn.ReLU(), nn.Linear(width, 2))

    sample = torch.randn(64, 5)
    assert [len(report) for report in initialize_population([lazy(), lazy()], sample=sample)] == [2, 2]
    lazies = [nn.Sequential(nn.LazyLinear(n)) for n in (8, 9)]
    with pytest.raises(ValueError, match="models: differ in their parameters"):
        initialize_population(lazies, sample=sample)


class Skips(nn.Module):
    def __init__(self, skips, rows=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.skips, self.rows = skips, rows

    def forward(self, x):
        x = self.layers[0](x).relu()
        if not self.skips:
            x = self.layers[1](x[: self.rows]).relu()
        return self.layers[2](x)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (
            [Skips(False), Skips(True)],
            r"models: \[0\] has inputs for a layer for which \[1\] has none; use",
        ),
        ([Skips(False), Skips(False, 32)], r"models: \[1\] gives a layer inputs of shape \[32, 6\] and torch.float32"),
    ],
)
def test_members_that_go_other_ways_are_refused(models, message):
    """Nobody waits for a member that will not come."""
    before = [p.detach().clone() for model in models for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        initialize_population(models, sample=torch.randn(64, 6))
    assert all(map(torch.equal, before, (p for model in models for p in model.parameters())))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slice": "left"}, "slice: unknown 'left'; use 'polar' or 'raw'"),
        ({"exponent": 2.0}, "exponent: 2.0 must be 0.5 or 1"),
        ({"layers": "some"}, "layers: unknown 'some'"),
        ({"deficient": "hope"}, "deficient: unknown 'hope'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        initialize(WNLinear(2, 2), "daneshmand2021", sample=torch.ones(2, 2), **options)
