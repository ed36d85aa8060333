"""Init schemes that look at data, layer after layer: Salimans & Kingma's and LSUV, and the walk they take."""

import math

import pytest
import torch
import torch.nn.functional as F
from drawn import generator
from init_weights import effective
from torch import nn

import wnfused
from wnfused import WNConv2d, WNLinear
from wnfused.init import initialize

torch_weight_norm = torch.nn.utils.parametrizations.weight_norm


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


# ------------------------------------------------------------------------------------- a sample that does not fit


def unfit(shape=(64, 6), **entry):
    sample = torch.randn(shape, generator=generator())
    for value in entry.values():
        sample[3, 1] = value
    return sample


@pytest.mark.parametrize("scheme", ["salimans2016", "mishkin2016", "daneshmand2021"])
@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (unfit(nan=math.nan), "^sample: holds NaN or inf$"),
        (unfit(inf=-math.inf), "^sample: holds NaN or inf$"),
        (unfit((64, 5)), "^sample: the model does not run on it: .* does not end in in_features = 6"),
        (unfit((1, 6)), "^sample: the model does not run on it: Expected more than 1 value per channel"),
        (torch.empty(64, 6, device="meta"), "^sample: is a meta tensor"),
        (unfit().to_sparse(), r"^sample: is torch\.sparse_coo; use to_dense\(\)$"),
    ],
)
def test_what_does_not_fit_changes_nothing(scheme, sample, message):
    model = nn.Sequential(WNLinear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), WNLinear(8, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=message) as raised:
        initialize(model, scheme, sample=sample)
    assert ("does not run" in message) == (raised.value.__cause__ is not None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(("scheme", "enough"), [("salimans2016", 2), ("mishkin2016", 1), ("daneshmand2021", 16)])
@pytest.mark.parametrize("count", [1, 2, 8, 63])
def test_a_small_sample_is_taken(scheme, enough, count):
    """Its statistics are those of few inputs; what they leave a layer short of is in the report."""
    model = wnfused.models.mlp(3, 16, in_features=6)
    report = initialize(model, scheme, sample=unfit((count, 6)), generator=generator())
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert bool(report.notes) == (count < enough)


@pytest.mark.parametrize("scheme", ["he", "salimans2016"])
def test_taking_shapes_moves_no_statistics(scheme):
    model = nn.Sequential(
        wnfused.nn.WNLazyLinear(4), nn.LazyBatchNorm1d(), nn.BatchNorm1d(4), nn.Dropout(), nn.LazyLinear(2)
    )
    initialize(model, scheme, sample=3 * torch.randn(64, 3) + 1, generator=generator())
    for norm in (model[1], model[2]):
        assert norm.training
        assert norm.num_batches_tracked == 0
        assert norm.running_mean.eq(0).all()
        assert norm.running_var.eq(1).all()


def test_a_backend_that_is_missing_is_no_fault_of_the_sample():
    class Missing(nn.Module):
        def forward(self, x):
            raise wnfused.BackendUnavailableError("triton: no such device")

    with pytest.raises(wnfused.BackendUnavailableError):
        initialize(nn.Sequential(nn.Linear(2, 2), Missing()), "mishkin2016", sample=torch.ones(64, 2))
