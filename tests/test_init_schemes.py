"""Each init scheme against its formula, computed here on its own."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wnfused
from wnfused import WNConv2d, WNLinear
from wnfused.init import initialize
from wnfused.nn import FixupBlock, PlainResidualBlock


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def effective(layer):
    """The weight that a layer computes with, flat by rows."""
    return layer.weight.detach().flatten(1)


def pre_activations(model, x, which=(nn.Linear, nn.Conv2d)):
    """Every layer's output before its activation and residual, by torch's own functions; stages block by block."""
    found = {}

    def observe(name):
        def before(module, arguments):
            weight, bias = module.weight.detach(), module.bias
            if isinstance(module, nn.Linear):
                found[name] = F.linear(arguments[0], weight, bias)
            else:
                found[name] = F.conv2d(arguments[0], weight, bias, module.stride, module.padding)

        return before

    for name, module in model.named_modules():
        if isinstance(module, which):
            module.register_forward_pre_hook(observe(name))
    model(x)
    return found


def closing(model):
    return [role for role in wnfused.init.find_roles(model) if role.closes_branch]


# ------------------------------------------------------------------------------------------- he, xavier, orthogonal


@pytest.mark.parametrize("norm", ["weight", "none"])
@pytest.mark.parametrize("distribution", ["normal", "uniform"])
@pytest.mark.parametrize("scheme", ["he", "xavier"])
def test_he_and_xavier_have_their_variance(scheme, distribution, norm):
    model = wnfused.models.cnn(4, 64, norm=norm)
    initialize(model, scheme, gain=1.5, distribution=distribution, generator=generator())
    for layer in model.modules():
        if not isinstance(layer, (nn.Linear, nn.Conv2d)):
            continue
        out, fan_in = effective(layer).shape
        fan_out = out * (9 if isinstance(layer, nn.Conv2d) else 1)
        variance = 1.5**2 * (2 / fan_in if scheme == "he" else 2 / (fan_in + fan_out))
        weight = effective(layer)
        tolerance = 6 * math.sqrt(2 / weight.numel())
        assert abs(weight.square().mean() / variance - 1) < tolerance
        kurtosis = weight.pow(4).mean() / weight.square().mean() ** 2
        assert abs(kurtosis - (3 if distribution == "normal" else 1.8)) < 30 / math.sqrt(weight.numel())
        assert (layer.bias == 0).all()
        if isinstance(layer, (WNConv2d, WNLinear)):
            torch.testing.assert_close(layer.weight_g.flatten(), layer.weight_v.flatten(1).norm(dim=1))


@pytest.mark.parametrize("norm", ["weight", "none"])
def test_orthogonal_times_gain(norm):
    model = wnfused.models.mlp(3, 24, in_features=30, norm=norm)
    initialize(model, "orthogonal", gain=1.25)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            weight = effective(layer)
            torch.testing.assert_close(weight @ weight.T, 1.25**2 * torch.eye(len(weight)), rtol=0, atol=1e-5)


# -------------------------------------------------------------------------------------------------- arpit, hanin


def test_a_network_without_normalisation_starts_as_the_same_function():
    weight, none = (wnfused.models.wrn(16, 2, in_channels=1, norm=norm) for norm in ("weight", "none"))
    initialize(weight)
    initialize(none)
    blocks = [block for stage in weight.stages for block in stage.unstack()]
    for block, plain in zip(blocks, (b for stage in none.stages for b in stage), strict=True):
        for part in ("conv1", "conv2", "shortcut"):
            if isinstance(getattr(plain, part), nn.Conv2d):
                norms = effective(getattr(plain, part)).norm(dim=1)
                torch.testing.assert_close(norms, effective(getattr(block, part)).norm(dim=1))
    assert effective(none.head).abs().max() <= 1 / math.sqrt(128)


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize("factor", [0.9, 0.5])
def test_hanin_fades_block_by_block(stack, factor):
    model = wnfused.models.wrn(28, stack=stack)
    initialize(model, "hanin2018", factor=factor)
    for stage in model.stages:
        blocks = stage.unstack() if stack else stage
        assert len(blocks) == 4
        for b, block in enumerate(blocks, start=1):
            torch.testing.assert_close(
                effective(block.conv2).norm(dim=1),
                torch.full([stage[0].conv2.out_channels if not stack else stage.out_channels], factor**b),
            )
            fans = block.conv1.in_channels / block.conv1.out_channels
            torch.testing.assert_close(
                block.conv1.weight_g.flatten(), torch.full([block.conv1.out_channels], math.sqrt(2 * fans))
            )
            assert (block.conv1.bias == 0).all()


# --------------------------------------------------------------------------------------------- data-dependent ones


def mlp_sample():
    return torch.randn(128, 20, generator=generator(7)) * torch.linspace(0.1, 3, 20) + 0.5


@pytest.mark.parametrize("norm", ["weight", "none"])
def test_salimans_by_a_loop_in_float64(norm):
    model = wnfused.models.mlp(3, 16, in_features=20, norm=norm)
    initialize(model, "salimans2016", sample=mlp_sample(), generator=generator())
    h = mlp_sample().double()
    for layer in (m for m in model.layers.modules() if isinstance(m, nn.Linear)):
        weight = effective(layer).double()
        direction = weight / weight.norm(dim=1, keepdim=True)
        y = h @ direction.T
        mu, sigma = y.mean(0), y.std(0, correction=0)
        torch.testing.assert_close(weight.norm(dim=1), 1 / sigma, rtol=1e-5, atol=0)
        torch.testing.assert_close(layer.bias.double(), -mu / sigma, rtol=1e-4, atol=1e-5)
        h = torch.relu((y - mu) / sigma)
        # Orthonormal to begin with.
        gram = direction @ direction.T if len(direction) <= direction.shape[1] else None
        if gram is not None:
            torch.testing.assert_close(gram, torch.eye(len(gram), dtype=torch.float64), rtol=0, atol=1e-5)
    assert model.head.weight.abs().max() <= 1 / math.sqrt(16)


@pytest.mark.parametrize("norm", ["weight", "none"])
def test_salimans_standardises_every_layer_of_a_residual_network(norm):
    """Inside stages too, where one op runs all blocks; and the output is that of the network as it stands."""
    model = wnfused.models.wrn(22, 2, in_channels=1, norm=norm)
    sample = torch.randn(64, 1, 8, 8, generator=generator(3))
    report = initialize(model, "salimans2016", sample=sample, generator=generator())
    assert not report.notes
    expected = model(sample)
    if norm == "weight":
        model.stages = nn.Sequential(*(stage.unstack() for stage in model.stages))
        torch.testing.assert_close(model(sample), expected, rtol=1e-4, atol=1e-4)
    for name, y in pre_activations(model, sample, nn.Conv2d).items():
        flat = y.detach().movedim(1, 0).flatten(1)
        assert flat.mean(1).abs().max() < 1e-3, name
        assert (flat.std(1, correction=0) - 1).abs().max() < 1e-3, name
    assert len(report) == 22 - 1 + 1 + 1  # layers as the paper counts them, and stage 1's shortcut


def test_salimans_without_biases_and_with_constant_units():
    model = nn.Sequential(WNLinear(6, 8, bias=False), nn.ReLU(), WNLinear(8, 3))
    sample = torch.randn(64, 6)
    initialize(model, "salimans2016", sample=sample)
    assert (model[0](sample).std(0, correction=0) - 1).abs().max() < 1e-4
    report = initialize(model, "salimans2016", sample=torch.ones(64, 6))
    assert "0: 8 units are constant" in report.notes[0]
    assert all(torch.isfinite(p).all() for p in model.parameters())


torch_weight_norm = torch.nn.utils.parametrizations.weight_norm


@pytest.mark.parametrize("layer", [
    wnfused.WNConv1d(4, 6, 3, groups=2), wnfused.WNConv3d(2, 4, 2), wnfused.WNConvTranspose2d(4, 6, 3, 2, groups=2),
    WNConv2d(2, 4, 3, padding=1, padding_mode="circular", dim=1), WNConv2d(2, 4, 3, dim=None),
    nn.ConvTranspose1d(4, 6, 4, 2), torch_weight_norm(nn.Conv2d(2, 4, 3)), torch_weight_norm(nn.Linear(5, 4), dim=1),
    torch_weight_norm(nn.ConvTranspose2d(4, 6, 3)),
])  # fmt: skip
def test_salimans_on_every_kind_of_layer(layer):
    spatial = 0 if isinstance(layer, nn.Linear) else len(layer.kernel_size)
    sample = torch.randn(64, 5 if spatial == 0 else layer.in_channels, *[7] * spatial)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(layer(sample)[0].numel(), 2))
    initialize(model, "salimans2016", sample=sample)
    y = layer(sample).movedim(1, 0).flatten(1)
    assert y.mean(1).abs().max() < 1e-3
    assert (y.std(1, correction=0) - 1).abs().max() < 1e-3


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("scheme", wnfused.init.schemes())
def test_torchs_own_weight_norms_start_like_ours(scheme):
    """By parametrisation and by the old hook; the same seed gives the same function."""
    sample = torch.randn(64, 1, 6, 6, generator=generator(2))

    def network(conv):
        return nn.Sequential(conv(1, 6), nn.ReLU(), conv(6, 6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))

    outputs = []
    for conv in (
        lambda i, o: WNConv2d(i, o, 3),
        lambda i, o: torch_weight_norm(nn.Conv2d(i, o, 3)),
        lambda i, o: torch.nn.utils.weight_norm(nn.Conv2d(i, o, 3)),
    ):
        model = network(conv)
        initialize(model, scheme, sample=sample, generator=generator())
        outputs.append(model(sample))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs[2], outputs[0], rtol=1e-4, atol=1e-5)


def test_weights_that_something_else_computes_are_named():
    model = nn.Sequential(torch.nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2))
    before = model[0].weight.detach().clone()
    report = initialize(model, "he")
    assert report.notes == ("left alone, their weights are computed by something else: 0",)
    assert torch.equal(model[0].weight, before)


def test_the_walk_leaves_no_trace():
    """Modes, running statistics and hooks are as before; dropout is off while it lasts."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.9), nn.ReLU(), WNLinear(8, 4))
    model[1].eval()
    sample = torch.randn(64, 8)
    initialize(model, "salimans2016", sample=sample, generator=generator())
    assert model[0].training
    assert not model[1].training
    assert (model[1].running_mean == 0).all()
    assert not any(module._forward_pre_hooks for module in model.modules())
    stage = wnfused.models.wrn(16).stages[0]
    initialize(stage, "salimans2016", sample=torch.randn(64, 16, 4, 4))
    assert "forward" not in stage.__dict__


@pytest.mark.parametrize("norm", ["weight", "batch", "none"])
def test_lsuv_gives_every_layer_unit_variance(norm):
    model = wnfused.models.wrn(22, 2, in_channels=1, norm=norm)
    sample = torch.randn(64, 1, 8, 8, generator=generator(3))
    report = initialize(model, "mishkin2016", sample=sample, generator=generator())
    assert not report.notes
    if norm == "weight":
        model.stages = nn.Sequential(*(stage.unstack() for stage in model.stages))
    ys = pre_activations(model, sample)
    assert len(ys) == 22 + 1
    for name, y in ys.items():
        assert abs(y.var(correction=0) - 1) < 0.1, name
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d):
            weight = effective(layer)
            scaled = weight / weight.norm() * math.sqrt(min(weight.shape))
            gram = scaled @ scaled.T if len(weight) <= weight.shape[1] else scaled.T @ scaled
            torch.testing.assert_close(gram, torch.eye(len(gram)), rtol=0, atol=1e-4, msg=name)
            assert layer.bias is None or (layer.bias == 0).all()


def test_lsuv_reports_what_it_could_not_reach():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    report = initialize(model, "mishkin2016", sample=torch.zeros(64, 4))
    assert "0: its output's variance on the sample is 0, not 1" in report.notes
    exact = initialize(model, "mishkin2016", sample=torch.randn(64, 4), tolerance=1e-4)
    assert not exact.notes


# ------------------------------------------------------------------------------------------- zhang, half scaling


@pytest.mark.parametrize("norm", ["weight", "none"])
def test_zhang_starts_shallow_and_learns_to_be_deep(norm):
    model = wnfused.models.wrn(40, in_channels=1, norm=norm, stack=False)
    report = initialize(model, "zhang2019", generator=generator())
    assert any("no scalar multipliers" in note for note in report.notes)
    branches = 18
    x = torch.randn(8, 1, 8, 8)
    assert (model(x) == 0).all()
    shallow = model.stem(x)
    for stage in model.stages:
        shallow = stage[0].shortcut(shallow)
    torch.testing.assert_close(model.stages(model.stem(x)), shallow)
    for stage in model.stages:
        for block in stage:
            fan_in = block.conv1.weight[0].numel()
            std = math.sqrt(2 / fan_in) * branches**-0.5
            assert abs(effective(block.conv1).std() / std - 1) < 6 / math.sqrt(2 * block.conv1.weight.numel())
            assert (effective(block.conv2) == 0).all()
            if norm == "weight":
                assert (block.conv2.weight_v != 0).any()
    # One step on the head lets gradients into the branches: into the gains, not into the directions.
    with torch.no_grad():
        model.head.weight.normal_()
    F.cross_entropy(model(x), torch.arange(8)).backward()
    last = model.stages[1][2].conv2
    if norm == "weight":
        assert (last.weight_v.grad == 0).all()
        assert (last.weight_g.grad != 0).all()
    else:
        assert (last.weight.grad != 0).any()


def test_zhang_inside_stages_agrees():
    model = wnfused.models.wrn(40, in_channels=1)
    initialize(model, "zhang2019")
    stage = model.stages[2]
    assert (stage.weight_g[:, 1] == 0).all()
    expected = math.sqrt(2) * 18**-0.5
    assert abs(stage.weight_g[:, 0].square().mean().sqrt() / expected - 1) < 0.02
    assert abs(stage.transition.conv1.weight_g.square().mean().sqrt() / expected - 1) < 0.05


class Bottleneck(nn.Module):
    """Three layers in the branch: the first two times ``L^(-1/4)``."""

    def __init__(self, c):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 1)

    def forward(self, x):
        return F.relu(x + self.c(F.relu(self.b(F.relu(self.a(x))))))


def test_zhang_counts_the_layers_of_a_branch():
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        *(Bottleneck(32) for _ in range(16)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    )
    initialize(model, "zhang2019", generator=generator())
    assert (model[-1].weight == 0).all()
    assert abs(model[0].weight.std() / math.sqrt(2 / 27) - 1) < 0.1
    for block in model[1:17]:
        assert (block.c.weight == 0).all()
        for conv in (block.a, block.b):
            expected = math.sqrt(2 / conv.weight[0].numel()) * 16**-0.25
            assert abs(conv.weight.std() / expected - 1) < 6 / math.sqrt(2 * conv.weight.numel())


def test_the_fixup_block():
    block = FixupBlock(4, 6, 2, num_branches=4)
    x = torch.randn(3, 4, 8, 8)
    torch.testing.assert_close(block(x), torch.relu(block.shortcut(x)))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_()
    shifted = x + block.bias1
    y = torch.relu(F.conv2d(shifted, block.conv1.weight, stride=2, padding=1) + block.bias2) + block.bias3
    y = block.scale * F.conv2d(y, block.conv2.weight, padding=1)
    torch.testing.assert_close(
        block(x), torch.relu(y + F.conv2d(shifted, block.shortcut.weight, stride=2) + block.bias4)
    )
    model = nn.Sequential(nn.Conv2d(4, 6, 3), FixupBlock(6, 6), FixupBlock(6, 6), nn.Flatten(), nn.Linear(6, 2))
    with torch.no_grad():
        model[1].scale.zero_()
    report = initialize(model, "zhang2019", generator=generator())
    assert not report.notes
    assert model[1].scale.item() == 1
    assert {r.name: (r.closes_branch, r.num_blocks, r.block) for r in wnfused.init.find_roles(model) if r.branch} == {
        "1.conv1": (False, 2, 1), "1.conv2": (True, 2, 1), "2.conv1": (False, 2, 2), "2.conv2": (True, 2, 2),
    }  # fmt: skip
    with pytest.raises(ValueError, match="stride: 0 must be an int of at least 1"):
        FixupBlock(2, 2, 0)


@pytest.mark.parametrize("norm", ["weight", "batch", "none"])
def test_half_scaling_changes_the_forward_pass(norm):
    model = wnfused.models.wrn(16, in_channels=1, norm=norm)
    report = initialize(model, "half_scaling", generator=generator())
    blocks = [m for m in model.modules() if hasattr(m, "skip_scale")]
    assert len(blocks) >= 3
    assert all(block.skip_scale == math.sqrt(0.5) for block in blocks)
    assert any("sum times sqrt(1/2)" in entry.role for entry in report)
    if norm == "none":
        h = torch.randn(2, 16, 8, 8)
        block = model.stages[0][1]
        expected = math.sqrt(0.5) * (h + block.conv2(torch.relu(block.conv1(h))))
        torch.testing.assert_close(block(h), expected)
    if norm == "weight":
        h = torch.randn(2, 16, 8, 8)
        expected = h
        for block in model.stages[0].blocks():
            weights = [
                block.weight_v[i] * (block.weight_g[i] / block.weight_v[i].flatten(1).norm(dim=1)).reshape(-1, 1, 1, 1)
                for i in (0, 1)
            ]
            inner = torch.relu(F.conv2d(expected, weights[0], padding=1))
            expected = math.sqrt(0.5) * (expected + F.conv2d(inner, weights[1], padding=1))
        torch.testing.assert_close(model.stages[0](h), expected, rtol=1e-4, atol=1e-4)


def test_other_schemes_put_the_forward_pass_back():
    model = wnfused.models.wrn(16, in_channels=1)
    model.stages[1].skip_scale = 0.9
    blocks = [m for m in model.modules() if hasattr(m, "skip_scale")]
    before = [block.skip_scale for block in blocks]
    for _ in range(2):
        initialize(model, "half_scaling")
    initialize(model, "he")
    assert [block.skip_scale for block in blocks] == before


def test_half_scaling_refuses_what_it_cannot_scale():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Bottleneck(8))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"the residual branch that '1.c' closes has no skip_scale"):
        initialize(model, "half_scaling")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    block = PlainResidualBlock(4, 4)
    initialize(block, "half_scaling")
    assert block.skip_scale == math.sqrt(0.5)


# ------------------------------------------------------------------------------------------------ delta-orthogonal


@pytest.mark.parametrize("layer", [
    WNConv2d(4, 7, 3, padding=1, padding_mode="circular", bias=False),
    nn.Conv1d(6, 6, 5, padding=2, padding_mode="circular"),
    nn.Conv2d(4, 8, 3, padding=1, groups=2, padding_mode="circular"), nn.Conv3d(2, 3, (1, 3, 3), padding=(0, 1, 1)),
    wnfused.WNConvTranspose2d(4, 6, 3, padding=1, groups=2), nn.Linear(5, 9),
])  # fmt: skip
def test_delta_orthogonal_is_an_isometry(layer):
    report = initialize(nn.Sequential(layer), "xiao2018", gain=2.0)
    assert not report.notes
    spatial = 0 if isinstance(layer, nn.Linear) else len(layer.kernel_size)
    x = torch.randn(3, 5 if spatial == 0 else layer.in_channels, *[6] * spatial)
    torch.testing.assert_close(layer(x).flatten(1).norm(dim=1), 2 * x.flatten(1).norm(dim=1))
    if spatial:
        taps = layer.weight.detach().flatten(2)
        centre = taps.shape[2] // 2
        assert (taps[:, :, [i for i in range(taps.shape[2]) if i != centre]] == 0).all()


def test_delta_orthogonal_in_stages_and_where_it_cannot_be():
    model = wnfused.models.wrn(16, in_channels=1)
    assert not initialize(model, "xiao2018").notes
    centre = model.stages[2].weight_v[..., 1, 1]
    torch.testing.assert_close(centre.mT @ centre, torch.eye(64).expand_as(centre), rtol=0, atol=1e-5)
    assert not torch.equal(centre[0, 0], centre[0, 1])
    narrow = nn.Sequential(nn.Conv2d(8, 4, 3), nn.Conv2d(4, 4, 2))
    report = initialize(narrow, "xiao2018")
    assert "0: orthogonal, not delta-orthogonal: it has 4 output channels for 8 input channels" in report.notes
    assert any("its kernel [2, 2] has no centre" in note for note in report.notes)
    with pytest.raises(ValueError, match=r"'0' cannot be delta-orthogonal: it has 4 output channels for 8"):
        initialize(narrow, "xiao2018", otherwise="error")


# ------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("salimans2016", {}, "sample: scheme 'salimans2016' looks at data; give a batch of inputs"),
        ("mishkin2016", {}, "sample: scheme 'mishkin2016' looks at data"),
        ("mishkin2016", {"sample": torch.empty(0, 3)}, r"sample: shape \[0, 3\] has no input in it"),
        ("mishkin2016", {"tolerance": 0.0, "sample": torch.ones(2, 3)}, "tolerance: 0.0 must be finite and above 0"),
        ("mishkin2016", {"steps": 0, "sample": torch.ones(2, 3)}, "steps: 0 must be at least 1"),
        ("hanin2018", {"factor": 1.5}, "factor: 1.5 must be above 0 and at most 1"),
        ("he", {"gain": 0.0}, "gain: 0.0 must be finite and above 0"),
        ("xavier", {"distribution": "beta"}, "distribution: unknown 'beta'; use 'normal' or 'uniform'"),
        ("xiao2018", {"otherwise": "skip"}, "otherwise: unknown 'skip'"),
        ("salimans2016", {"v": "x", "sample": torch.ones(2, 3)}, "v: unknown 'x'"),
    ],
)
def test_bad_options(scheme, options, message):
    with pytest.raises(ValueError, match=message):
        initialize(nn.Sequential(WNLinear(3, 2)), scheme, **options)


@pytest.mark.parametrize("scheme", wnfused.init.schemes())
def test_the_trainer_takes_every_scheme(scheme):
    from wnfused.train.build import build
    from wnfused.train.config import TrainConfig
    from wnfused.train.data import load

    config = TrainConfig(depth=10, data="synthetic", init=scheme)
    data = load("synthetic", 0)
    first, again = (build(config, data).state_dict() for _ in range(2))
    assert all(torch.equal(value, again[name]) for name, value in first.items())
