"""Each init scheme that draws by shape against its formula, computed here on its own; and what holds for all."""

import math

import pytest
import torch
from drawn import generator
from init_weights import effective
from torch import nn

import wnfused
from wnfused import WNConv2d, WNLinear
from wnfused.init import initialize, initialize_population, orthogonal_batched, reset_layer_, reset_stage_

torch_weight_norm = torch.nn.utils.parametrizations.weight_norm


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


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("make", [
    lambda *a, **k: torch_weight_norm(nn.Conv1d(*a, **k), dim=2),
    lambda *a, **k: torch.nn.utils.weight_norm(nn.Conv1d(*a, **k), dim=2),
    lambda *a, **k: wnfused.WNConv1d(*a, **k, dim=-1),
])  # fmt: skip
def test_delta_orthogonal_under_a_norm_over_taps(make):
    """Rows of zero taps have directions, which torch's norms need, and no gain."""
    model, x = nn.Sequential(make(4, 5, 3, padding=1, padding_mode="circular")), torch.randn(2, 4, 6)
    for p in model.parameters():
        p.data.zero_()  # what was there before does not matter
    for _ in range(2):
        initialize(model, "xiao2018", generator=generator())
        y = model(x)
        torch.testing.assert_close(y.flatten(1).norm(dim=1), x.flatten(1).norm(dim=1))
    gradients = torch.autograd.grad(y.square().sum(), list(model.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


# ---------------------------------------------------------------------------------------------------- every scheme


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


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("salimans2016", {}, "sample: scheme 'salimans2016' looks at data; give a batch of inputs"),
        ("mishkin2016", {}, "sample: scheme 'mishkin2016' looks at data"),
        ("mishkin2016", {"sample": torch.empty(0, 3)}, r"sample: shape \[0, 3\] has no input in it"),
        ("mishkin2016", {"tolerance": 0.0, "sample": torch.ones(2, 3)}, "tolerance: 0.0 must be finite and above 0"),
        ("mishkin2016", {"steps": 0, "sample": torch.ones(2, 3)}, "steps: 0 must be an int of at least 1"),
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


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: initialize(m, ["he"]), ValueError, r"scheme: unknown \['he'\]; use one of 'arpit2019'"),
        (lambda m: initialize(m, generator=0), TypeError, "generator: 0 must be a torch.Generator or None"),
        (lambda m: initialize(m, "hanin2018", factor="a"), TypeError, "factor: expected a number, got str"),
        (lambda m: initialize(m, gammas=["0"]), TypeError, "gammas: expected a mapping from layer names, got list"),
        (lambda m: initialize(m, gammas=0), TypeError, "gammas: expected a mapping from layer names, got int"),
        (
            lambda m: initialize(m, roles=torch.ones(2)),
            TypeError,
            "roles: expected a mapping from layer names, got Ten",
        ),
        (
            lambda m: initialize(m, sample="x"),
            TypeError,
            "sample: expected a batch of inputs or a tuple of them, got str",
        ),
        (
            lambda m: initialize(m, "daneshmand2021", sample=torch.ones(64, 3), exponent=torch.ones(2)),
            TypeError,
            r"exponent: expected a number, got Tensor of shape \[2\]",
        ),
        (lambda m: initialize_population([m, m], "he"), ValueError, "models: hold one model more than once"),
        (lambda m: initialize(m, roles={"0": 3}), TypeError, r"roles\['0'\]: expected a mapping, got int"),
        (
            lambda m: initialize(m, roles={"0": {"activation_gamma": -2.0}}),
            ValueError,
            r"roles\['0'\]\['activation_gamma'\]: -2.0 must be finite and at least 0",
        ),
        (
            lambda m: initialize(m, roles={"0": {"activation_gamma": "2"}}),
            TypeError,
            r"roles\['0'\]\['activation_gamma'\]: expected a number, got str",
        ),
        (
            lambda m: initialize(m, "hanin2018", roles={"0": {"closes_branch": True, "block": -5}}),
            ValueError,
            r"roles\['0'\]\['block'\]: -5 must be an int of at least 0",
        ),
        (lambda m: initialize(m, roles={"0": {"head": "no"}}), TypeError, r"\['head'\]: 'no' must be True or False"),
        (lambda m: initialize(m.to("meta")), ValueError, "model: holds meta tensors; give it memory first"),
        (lambda m: initialize(m.to("meta"), "he"), ValueError, "model: holds meta tensors; give it memory first"),
        (lambda m: initialize_population(m), TypeError, "models: expected a sequence of models, got Sequential"),
        (
            lambda m: initialize_population([m], "he", generators=[0]),
            TypeError,
            r"generators\[0\]: 0 must be a torch.Generator or None",
        ),
        (lambda m: reset_layer_(nn.Linear(2, 2)), TypeError, "layer: expected a weight-normalised layer, got Linear"),
        (lambda m: reset_layer_(m[0], gamma=-1), ValueError, "gamma: -1 must be finite and at least 0"),
        (lambda m: reset_layer_(m[0], kind="zeros"), ValueError, "kind: unknown 'zeros'; use 'orthogonal' or 'he'"),
        (lambda m: reset_stage_(m[0]), TypeError, "stage: expected a WNResidualStage, got WNLinear"),
        (
            lambda m: reset_stage_(wnfused.WNResidualStage(2, 2, 2), gammas=(1.0,)),
            ValueError,
            r"gammas: \(1.0,\) must be two numbers",
        ),
        (lambda m: orthogonal_batched(torch.ones(2, 2), generator=3), TypeError, "generator: 3 must be a torch.Gener"),
    ],
)
def test_arguments_of_another_kind(call, error, message):
    with pytest.raises(error, match=message):
        call(nn.Sequential(WNLinear(3, 2)))


@pytest.mark.parametrize("scheme", wnfused.init.schemes())
def test_the_trainer_takes_every_scheme(scheme):
    from wnfused.train.build import build
    from wnfused.train.config import TrainConfig
    from wnfused.train.data import load

    config = TrainConfig(depth=10, data="synthetic", init=scheme)
    data = load("synthetic", 0)
    first, again = (build(config, data).state_dict() for _ in range(2))
    assert all(torch.equal(value, again[name]) for name, value in first.items())
