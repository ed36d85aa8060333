"""The layers: defaults of Arpit et al., what torch's own layers compute, checkpoints."""

import copy
import inspect
import io
import math
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrizations, parametrize, prune

import wnfused
from wnfused import WNConv2d, WNLinear

RANKS = {
    "conv1d": (wnfused.WNConv1d, nn.Conv1d, (2, 4, 9)),
    "conv2d": (wnfused.WNConv2d, nn.Conv2d, (2, 4, 9, 8)),
    "conv3d": (wnfused.WNConv3d, nn.Conv3d, (2, 4, 5, 6, 5)),
    "transpose1d": (wnfused.WNConvTranspose1d, nn.ConvTranspose1d, (2, 4, 9)),
    "transpose2d": (wnfused.WNConvTranspose2d, nn.ConvTranspose2d, (2, 4, 5, 6)),
    "transpose3d": (wnfused.WNConvTranspose3d, nn.ConvTranspose3d, (2, 4, 3, 4, 3)),
}


@pytest.mark.parametrize("name", RANKS)
def test_every_convolution_tells_of_its_own_dims(name):
    layer, plain, shape = RANKS[name]
    text, spatial = inspect.getdoc(layer), len(shape) - 2
    assert f"`nn.{plain.__name__}`" in text
    assert f"[N, C_in, {', '.join('DHW'[-spatial:])}]" in text
    assert f"``weight_g [{'C_in' if 'Transpose' in plain.__name__ else 'C_out'}{', 1' * (spatial + 1)}]``" in text
    assert set(re.findall(r"\dd\b", text)) == {f"{spatial}d"}
    assert all(f"\n{part}:" in text for part in ("Args", "Parameters", "Raises", "Source"))


# ------------------------------------------------------------------------------------------ default initialisation


@pytest.mark.parametrize(
    ("layer", "gain"),
    [
        (lambda: WNLinear(8, 32), math.sqrt(8 / 32)),
        (lambda: WNLinear(8, 32, activation="relu"), math.sqrt(2 * 8 / 32)),
        (lambda: WNLinear(8, 32, activation="leaky_relu", negative_slope=0.5), math.sqrt(1.6 * 8 / 32)),
        (lambda: WNLinear(8, 32, gamma=0.25), math.sqrt(0.25 * 8 / 32)),
        (lambda: WNConv2d(3, 16, 3, activation="relu"), math.sqrt(2 * 27 / (9 * 16))),
        (lambda: WNConv2d(4, 16, 3, groups=2), math.sqrt(4 / 16)),
        (lambda: WNConv2d(16, 4, (1, 5), gamma=2, init="he"), math.sqrt(2 * 16 / 4)),
    ],
)
def test_default_gain_and_bias(layer, gain):
    layer = layer()
    torch.testing.assert_close(layer.weight_g, torch.full_like(layer.weight_g, gain))
    assert (layer.bias == 0).all()
    norms = layer.weight.detach().flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, torch.full_like(norms, gain))


def test_orthogonal_directions_and_he_directions():
    wide, tall = WNConv2d(4, 8, 3).weight_v.flatten(1), WNConv2d(2, 32, 3).weight_v.flatten(1)
    torch.testing.assert_close(wide @ wide.T, torch.eye(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(tall.T @ tall, torch.eye(18), atol=1e-5, rtol=0)
    he = WNLinear(400, 400, init="he").weight_v
    assert abs(he.std().item() / math.sqrt(2 / 400) - 1) < 0.02


def test_parameters_have_torchs_names_and_shapes():
    layer = WNConv2d(4, 6, (3, 5), groups=2)
    twin = nn.utils.weight_norm(nn.Conv2d(4, 6, (3, 5), groups=2))
    assert {n: p.shape for n, p in layer.named_parameters()} == {n: p.shape for n, p in twin.named_parameters()}
    assert isinstance(layer, nn.Conv2d)
    assert isinstance(WNLinear(2, 3), nn.Linear)
    for without in (False, 0, None):  # as torch's layers take it
        assert WNLinear(2, 3, bias=without).bias is None
    assert list(WNLinear(3, 4, dim=1).weight_g.shape) == [1, 3]
    assert list(WNLinear(3, 4, dim=None).weight_g.shape) == []


def test_dtype_and_device_arguments():
    layer = WNConv2d(2, 3, 3, device="cpu", dtype=torch.float64)
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    half = WNLinear(8, 4, dtype=torch.bfloat16)
    assert half(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    meta = WNConv2d(2, 3, 3, device="meta").to_empty(device="cpu")
    meta.reset_parameters()
    assert torch.isfinite(meta(torch.randn(1, 2, 5, 5))).all()


def test_layers_without_values():
    """``FakeTensorMode`` builds a model to ask for its shapes."""
    with warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("error")
        model = torch.nn.Sequential(
            WNConv2d(3, 4, 3), wnfused.WNConvTranspose2d(4, 4, 3, dim=1), wnfused.WNResidualStage(4, 8, 2),
            torch.nn.Flatten(), WNLinear(8 * 64, 5),
        )  # fmt: skip
        y = model(torch.randn(2, 3, 8, 8))
        y.sum().backward()
        assert y.shape == (2, 5)
        assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
        with pytest.raises(ValueError, match="model: holds meta tensors"):
            wnfused.init.initialize(model)


def test_reset_parameters_draws_again():
    layer = WNLinear(4, 4)
    before = layer.weight_v.clone()
    layer.bias.data.fill_(3)
    layer.reset_parameters()
    assert not torch.equal(before, layer.weight_v)
    assert (layer.bias == 0).all()


# -------------------------------------------------------------------------------------------------- torch's arguments


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [1, (2, 1), "same", "valid"])
def test_padding_as_torch_has_it(padding_mode, padding):
    ours = WNConv2d(3, 4, 3, padding=padding, padding_mode=padding_mode, activation="relu")
    theirs = nn.Conv2d(3, 4, 3, padding=padding, padding_mode=padding_mode)
    theirs.load_state_dict({"weight": ours.weight.detach().clone(), "bias": ours.bias})
    for shape in ((2, 3, 6, 7), (3, 6, 7)):
        x = torch.randn(shape)
        torch.testing.assert_close(ours(x), F.relu(theirs(x)))


def test_channels_last_is_kept():
    layer = WNConv2d(8, 8, 3, padding=1, activation="relu").to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    y = layer(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    y.sum().backward()
    assert layer.weight_v.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_inputs_that_start_inside_their_memory(dtype):
    """Slices of a batch, and parameters and gradients that are slices of one buffer."""
    layer, batch = WNLinear(64, 48, activation="relu").to(dtype), torch.randn(192, 64).to(dtype)
    flat = torch.randn(7 + 48 * 64).to(dtype)
    for x in batch.split(64):
        torch.testing.assert_close(layer(x), layer(x.clone()))
        v, g = flat[7:].view(48, 64), layer.weight_g
        inputs = [x.clone().requires_grad_(), v.clone().requires_grad_(), g.detach().clone().requires_grad_()]
        dy = torch.randn(128, 48).to(dtype)[64:]
        wanted = torch.autograd.grad(wnfused.functional.linear(*inputs), inputs, dy.clone())
        sliced = [x.detach().requires_grad_(), v.detach().requires_grad_(), inputs[2]]
        found = torch.autograd.grad(wnfused.functional.linear(*sliced), sliced, dy)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rank", RANKS)
def test_outputs_can_be_written_in_place(rank):
    kind, _, shape = RANKS[rank]
    for dtype in (torch.float32, torch.float64):
        layer, x = kind(4, 4, 3, padding=1).to(dtype), torch.randn(shape).to(dtype)
        F.relu_(layer(x)).sum().backward()
        linear = WNLinear(shape[-1], 3, dim=1).to(dtype)
        linear(x).add_(1).sum().backward()
        assert torch.isfinite(linear.weight_v.grad).all()


def test_residual_rides_in_the_op():
    layer = WNConv2d(4, 4, 3, padding=1, activation="relu")
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(layer(x, x), F.relu(F.conv2d(x, layer.weight, layer.bias, padding=1) + x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_dtype_of_torchs_own_layer(dtype):
    ours, theirs = WNConv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    x = torch.randn(1, 3, 6, 6)
    with torch.autocast("cpu", dtype):
        assert ours(x).dtype == theirs(x).dtype == dtype
        loss = ours(x).float().sum()
        assert ours.double()(x.double()).dtype == torch.float64
    ours.float()
    loss.backward()
    assert WNLinear(2, 2)(torch.randn(1, 2)).dtype == torch.float32


@pytest.mark.parametrize("wrap", [None, nn.utils.weight_norm, parametrizations.weight_norm])
@pytest.mark.parametrize(
    "keywords", [{}, {"stride": 2, "padding": 1}, {"groups": 2, "dilation": 2, "bias": False, "padding": 2}]
)
@pytest.mark.parametrize("rank", RANKS)
def test_every_rank_computes_what_torchs_layer_does(rank, keywords, wrap):
    kind, torch_kind, shape = RANKS[rank]
    theirs, x = torch_kind(4, 6, 3, **keywords), torch.randn(shape)
    expected = theirs(x)
    ours = kind(4, 6, 3, activation=None, **keywords)
    ours.load_state_dict((theirs if wrap is None else wrap(theirs)).state_dict(), strict=True)
    torch.testing.assert_close(ours(x), expected)
    torch.testing.assert_close(ours(x[0]), expected[0])
    converted = wnfused.convert(theirs, plain=True)
    assert type(converted) is kind
    torch.testing.assert_close(converted(x), expected)
    with wnfused.frozen(converted), torch.no_grad():
        torch.testing.assert_close(converted(x), expected)
    folded = wnfused.fold(converted)
    assert type(folded) is torch_kind
    torch.testing.assert_close(folded(x), expected)


def test_transposed_layers_take_output_size_and_start_at_their_own_gain():
    layer = wnfused.WNConvTranspose2d(4, 3, 4, 2, 1, gamma=2)
    torch.testing.assert_close(layer.weight_g, torch.full((4, 1, 1, 1), math.sqrt(2 * 4)))
    x = torch.randn(1, 4, 5, 5)
    assert list(layer(x).shape) == [1, 3, 10, 10]
    assert list(layer(x, output_size=[11, 10]).shape) == [1, 3, 11, 10]
    wide = wnfused.WNConvTranspose1d(192, 192, 16, 8, 4)
    y = wide(torch.randn(1, 192, 64))[..., 16:-16]
    assert abs(y.square().mean().item() - 1) < 0.2


@pytest.mark.parametrize(("ours", "theirs"), [(kind[0], kind[1]) for kind in RANKS.values()] + [(WNLinear, nn.Linear)])
def test_signatures_are_torchs_and_the_options(ours, theirs):
    found, torchs = (list(inspect.signature(kind).parameters.values()) for kind in (ours, theirs))
    options = found[len(torchs) :]
    assert [(p.name, p.default, p.kind) for p in torchs] == [(p.name, p.default, p.kind) for p in found[: len(torchs)]]
    assert {p.name: p.default for p in options} == {
        "activation": None, "negative_slope": 0.01, "gamma": None, "init": "orthogonal", "dim": 0,
    }  # fmt: skip
    assert {p.kind for p in options} == {inspect.Parameter.KEYWORD_ONLY}


# ---------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("used", [False, True])
def test_pickle_deepcopy_and_save(used):
    model = nn.Sequential(WNConv2d(3, 4, 3, activation="relu"), nn.Flatten(), WNLinear(64, 2))
    x = torch.randn(2, 3, 6, 6)
    if used:
        model(x).sum().backward()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        torch.testing.assert_close(twin(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("wrap", [None, nn.utils.weight_norm, parametrizations.weight_norm])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_state_dicts_of_all_three_forms_load(wrap, kind):
    torch_layer = nn.Linear(5, 4) if kind == "linear" else nn.Conv2d(5, 4, 3)
    x = torch.randn(2, 5) if kind == "linear" else torch.randn(2, 5, 4, 4)
    expected = torch_layer(x)
    if wrap is not None:
        wrap(torch_layer)
    ours = nn.Sequential(WNLinear(5, 4) if kind == "linear" else WNConv2d(5, 4, 3))
    state = {f"0.{name}": value.clone() for name, value in torch_layer.state_dict().items()}
    kept = dict(state)
    assert not ours.load_state_dict(state, strict=True).missing_keys
    assert set(state) == set(kept)
    torch.testing.assert_close(ours(x), expected)


def test_a_state_dict_of_the_wrong_shape_is_torchs_own_error():
    with pytest.raises(RuntimeError, match="size mismatch"):
        WNLinear(5, 4).load_state_dict({"weight": torch.zeros(3, 5), "bias": torch.zeros(4)})


class _Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("name", ["weight_v", "weight_g", "bias"])
@pytest.mark.parametrize(
    ("layer", "x"), [(WNLinear(3, 2), torch.randn(4, 3)), (WNConv2d(3, 2, 1), torch.randn(1, 3, 2, 2))]
)
def test_a_parameter_that_is_computed_from_another_counts(layer, x, name):
    layer, doubled = copy.deepcopy(layer), copy.deepcopy(layer)
    nn.init.normal_(layer.bias)
    doubled.load_state_dict(layer.state_dict())
    parametrize.register_parametrization(layer, name, _Doubled())
    with torch.no_grad():
        getattr(doubled, name).mul_(2)
    torch.testing.assert_close(layer(x), doubled(x))


def test_a_parameter_pruned_away_counts():
    layer = WNLinear(3, 2)
    prune.random_unstructured(layer, "weight_v", 3)
    v = layer.weight_v
    assert (v == 0).sum() == 3
    x = torch.randn(4, 3)
    torch.testing.assert_close(layer(x), F.linear(x, wnfused.functional.weight_norm(v, layer.weight_g), layer.bias))


@pytest.mark.parametrize("name", ["weight_v", "bias"])
def test_what_is_computed_cannot_be_reset(name):
    layer = WNLinear(3, 2)
    prune.random_unstructured(layer, name, 1)
    before = copy.deepcopy(layer.state_dict())
    for reset in (layer.reset_parameters, lambda: wnfused.init.reset_layer_(layer)):
        with pytest.raises(RuntimeError, match=f"{name}: cannot be reset, something else computes it"):
            reset()
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
    with pytest.raises(ValueError, match="layer: has no shape yet; run it once"):
        wnfused.init.reset_layer_(wnfused.nn.WNLazyLinear(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layer: layer([1.0], output_size=[5, 5]), "x: expected a Tensor, got list"),
        (
            lambda layer: layer(torch.ones(1, 3, 4, 4), output_size=7.5),
            "output_size: expected a list of ints, got float",
        ),
        (lambda layer: layer(torch.ones(1, 3, 4, 4), output_size=["a", 7]), r"a list of ints, got \['a', 7\]"),
    ],
)
def test_the_size_of_a_transposed_map_is_ints(call, message):
    with pytest.raises(TypeError, match=message):
        call(wnfused.WNConvTranspose2d(3, 4, 3))


def test_a_complex_weight_is_refused():
    layer = wnfused.WNLinear(3, 2)
    with pytest.raises(TypeError, match=r"weight: expected a real tensor, got torch\.complex64"):
        layer.weight = torch.ones(2, 3, dtype=torch.complex64)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_product_of_its_own_that_somebody_put_on_a_convolution_is_run(dims):
    """As torch's layers run it: padding around one dim of two, say, is done so."""
    kind = {1: wnfused.WNConv1d, 2: WNConv2d, 3: wnfused.WNConv3d}[dims]
    layer, x = kind(3, 4, 3, padding=1, activation="relu"), torch.randn(2, 3, *[6] * dims)
    around = copy.deepcopy(layer)
    around.padding_mode, around._reversed_padding_repeated_twice = "circular", [1, 1] * dims
    pointwise = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}[dims]

    def product(x, weight, bias):
        return pointwise(nn.functional.pad(x, [1, 1] * dims, mode="circular"), weight, bias)

    layer._conv_forward = product
    residual = torch.randn_like(around(x))
    torch.testing.assert_close(layer(x), around(x))
    torch.testing.assert_close(layer(x, residual=residual), around(x, residual=residual))
    with wnfused.frozen(layer):
        torch.testing.assert_close(layer(x), around(x))
    layer(x).sum().backward()
    around(x).sum().backward()
    torch.testing.assert_close(layer.weight_v.grad, around.weight_v.grad, rtol=1e-4, atol=1e-4)
    del layer._conv_forward
    assert not torch.allclose(layer(x), around(x))


def test_a_product_of_a_subclass_is_run():
    class Doubled(WNConv2d):
        def _conv_forward(self, input, weight, bias):
            return 2 * super()._conv_forward(input, weight, bias)

    layer, plain = Doubled(3, 4, 3, activation="relu"), WNConv2d(3, 4, 3, activation="relu")
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(layer(x), 2 * plain(x))
    with wnfused.frozen(layer), torch.no_grad():
        torch.testing.assert_close(layer(x), 2 * plain(x))
    wnfused.init.initialize(layer, "salimans2016", sample=x)
    spread = layer._conv_forward(x, layer.weight, layer.bias).std((0, 2, 3))
    torch.testing.assert_close(spread, torch.ones(4), rtol=0.1, atol=0)
