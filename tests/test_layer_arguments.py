"""Arguments that do not fit, of layers and of the functions behind them: errors that name argument and value."""

import contextlib

import numpy as np
import pytest
import torch

import wnfused
from wnfused import WNConv2d, WNConvTranspose2d, WNLinear, WNResidualStage, functional
from wnfused.models.resnet import BatchNormBlock
from wnfused.nn import (
    FixupBlock,
    PlainResidualBlock,
    ScalarBias,
    WNLazyConv2d,
    WNLazyConvTranspose2d,
    WNLazyLinear,
)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: wnfused.nn.fixup_scalars([]), TypeError, "model: expected an nn.Module, got list"),
        (lambda: WNLinear(3, 2, activation="gelu"), ValueError, "activation: unknown 'gelu'; use None, 'relu'"),
        (lambda: WNLinear(3, 2, init="xavier"), ValueError, "init: unknown 'xavier'; use 'orthogonal' or 'he'"),
        (lambda: WNLinear(3, 2, gamma=float("nan")), ValueError, "gamma: nan must be finite"),
        (lambda: WNLinear(3, 2, gamma=-1.0), ValueError, "gamma: -1.0 must be finite and at least 0"),
        (lambda: WNLinear(3, 2, gamma=1e80), ValueError, r"gamma: 1e\+80 must be below 2\*\*128"),
        (lambda: WNLinear(3, 2, gamma="2"), TypeError, "gamma: expected a number, got str"),
        (lambda: WNLinear(3, 2, dim=2), ValueError, r"dim: 2 .* a weight of shape \[2, 3\]; use -2 to 1, or None$"),
        (lambda: WNLinear(3, 2, dim="0"), TypeError, "dim: '0' must be an int or None"),
        (
            lambda: WNLinear(3, 2, activation="leaky_relu", negative_slope=-0.1),
            ValueError,
            "negative_slope: -0.1 must be finite and at least 0",
        ),
        (lambda: WNConv2d(3, 4, 3, groups=2), ValueError, "groups: 2 must divide 3 input and 4 output channels"),
        (lambda: WNConvTranspose2d(3, 4, 3, padding="same"), ValueError, "padding: 'same' must be an int or 2 ints"),
        (lambda: WNLinear(3, 2)(torch.randn(4, 3), "x"), TypeError, "residual: expected a Tensor, got str"),
        (lambda: WNLinear(3, 2)(torch.randn(4, 5)), ValueError, r"x: shape \[4, 5\] does not end in in_features = 3"),
        (lambda: WNConv2d(3, 2, 3)(torch.randn(4, 5, 6, 6)), ValueError, r"x: shape .* use \[N, 3, H, W\]"),
        (lambda: WNConv2d(3, 2, 3)(torch.randn(6, 6)), ValueError, r"x: shape \[6, 6\] does not fit"),
        (lambda: WNLinear(3, 2)(torch.randn(4, 3).double()), TypeError, "x: dtype torch.float64 does not go with v"),
        (lambda: WNLinear(3, 2)(torch.ones(4, 3, dtype=torch.long)), TypeError, "x: expected a floating-point tensor"),
        (lambda: WNLinear(3, 2)([1.0]), TypeError, "x: expected a Tensor, got list"),
        (lambda: WNLinear(3, 2)(torch.randn(4, 3, device="meta")), ValueError, "x: on device meta, but v"),
        (lambda: WNLinear(3, 2, gamma=torch.tensor([1.0, 2.0])), TypeError, r"gamma: expected a number, .* \[2\]"),
        (lambda: WNLinear(3, 2, negative_slope="x"), TypeError, "negative_slope: expected a number, got str"),
        (
            lambda: functional.conv2d(torch.ones(3, 4, 4), torch.ones(2, 3, 1, 1), torch.ones(2), residual=1.0),
            TypeError,
            "residual: expected a Tensor, got float",
        ),
        (
            lambda: functional.conv_transpose2d(
                torch.ones(1, 3, 4, 4), torch.ones(3, 2, 3, 3), torch.ones(3), stride=2, output_padding=3
            ),
            ValueError,
            r"output_padding: \[3, 3\] must be below stride \[2, 2\] or dilation \[1, 1\]",
        ),
        (
            lambda: functional.linear(torch.ones(1, 3), torch.ones(2, 3), torch.ones(2), activation="none"),
            ValueError,
            "activation: unknown 'none'; use None, 'relu'",
        ),
        (lambda: WNLinear(3, 2, dim=True), TypeError, "dim: True must be an int or None"),
        (lambda: WNLinear(3, 2, bias="no"), TypeError, "bias: 'no' must be True or False"),
        (lambda: WNLazyLinear(2, bias="no"), TypeError, "bias: 'no' must be True or False"),
        (
            lambda: WNLinear(3, 2, dtype=torch.complex64),
            TypeError,
            "dtype: torch.complex64 must be one of",
        ),
        (lambda: WNConv2d(3, 2, 3, dtype=torch.float8_e4m3fn), TypeError, "dtype: torch.float8_e4m3fn must be one of"),
        (lambda: WNResidualStage(4, 4, 2, dtype=torch.complex64), TypeError, "dtype: torch.complex64 must be one of"),
        (lambda: FixupBlock(2, 2, dtype="x"), TypeError, "dtype: 'x' must be one of torch.float32"),
        (lambda: ScalarBias(dtype=torch.long), TypeError, "dtype: torch.int64 must be one of torch.float32"),
        (lambda: PlainResidualBlock(2, 2, dtype="x"), TypeError, "dtype: 'x' must be one of torch.float32"),
        (lambda: BatchNormBlock(2, 0), ValueError, "out_channels: 0 must be an int of at least 1"),
        (lambda: BatchNormBlock(2, 2, skip_scale="x"), TypeError, "skip_scale: expected a number, got str"),
        (lambda: WNLinear(3, 2, gamma=True), TypeError, "gamma: expected a number, got True"),
        (lambda: WNLinear(3, 2, bias=torch.zeros(2)), TypeError, r"bias: tensor\(\[0., 0.\]\) must be True or False"),
        (lambda: WNLinear(3.0, 2), ValueError, "in_features: 3.0 must be an int of at least 0"),
        (lambda: WNLinear(3, -2), ValueError, "out_features: -2 must be an int of at least 0"),
        (lambda: WNLazyLinear("2"), ValueError, "out_features: '2' must be an int of at least 0"),
        (lambda: WNLinear(3, 10**30), ValueError, "out_features: 10{30} must be below 2"),
        (lambda: WNResidualStage(4, 4, 2, recompute=10**30), ValueError, "recompute: 10{30} must be below 2"),
        (lambda: WNResidualStage(4, 4, 2, skip_scale=True), TypeError, "skip_scale: expected a number, got True"),
        (lambda: WNConv2d(3, 0, 3)(torch.randn(1, 3, 5, 5)), ValueError, r"v: shape \[0, 3, 3, 3\] has no entry"),
        (lambda: WNConv2d(0, 3, 3)(torch.randn(1, 0, 5, 5)), ValueError, r"v: shape \[3, 0, 3, 3\] has no entry"),
        (lambda: WNConvTranspose2d(3, 0, 3)(torch.randn(1, 3, 5, 5)), ValueError, r"v: shape \[3, 0, 3, 3\] has no"),
        (
            lambda: WNResidualStage(4, 4, 2)(torch.randn(1, 4, 0, 6)),
            ValueError,
            r"x: shape \[1, 4, 0, 6\] has no",
        ),
        (lambda: WNResidualStage(4, 4, 2)(torch.randn(1, 3, 5, 5)), ValueError, r"x: .* has 3 channels, v has 4"),
        (lambda: WNLinear(3, 2)(torch.randn(4, 3), torch.randn(4, 3)), ValueError, r"residual: \[4, 3\].*use \[4, 2\]"),
    ],
)
def test_bad_arguments_name_argument_value_and_what_is_right(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("kind", [WNConv2d, WNConvTranspose2d, WNLazyConv2d, WNLazyConvTranspose2d])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel_size": 0}, "kernel_size: 0 must be an int or 2 ints, each at least 1"),
        ({"kernel_size": (3,)}, r"kernel_size: \(3,\) must be an int or 2 ints, each at least 1"),
        ({"kernel_size": "33"}, "kernel_size: '33' must be an int or 2 ints, each at least 1"),
        ({"kernel_size": True}, "kernel_size: True must be an int or 2 ints, each at least 1"),
        ({"kernel_size": None}, "kernel_size: None must be an int or 2 ints, each at least 1"),
        ({"kernel_size": torch.tensor(3.0)}, r"kernel_size: tensor\(3.\) must be an int or 2 ints, each at least 1"),
        ({"stride": 0}, "stride: 0 must be an int or 2 ints, each at least 1"),
        ({"stride": True}, "stride: True must be an int or 2 ints, each at least 1"),
        ({"stride": (1, 2, 1)}, r"stride: \(1, 2, 1\) must be an int or 2 ints, each at least 1"),
        ({"stride": 10**30}, "stride: 10{30} must be below 2"),
        ({"padding": (1, -1)}, r"padding: \(1, -1\) must be an int or 2 ints, each at least 0"),
        ({"padding": 0.5}, "padding: 0.5 must be an int or 2 ints, each at least 0"),
        ({"padding": "1"}, "padding: '1' must be"),
        ({"dilation": 0}, "dilation: 0 must be an int or 2 ints, each at least 1"),
        # torch takes it, lets the kernel's reach overflow and returns values.
        ({"dilation": 2**62}, r"dilation: \d+ must be below 2\*\*31"),
        ({"dilation": "1"}, "dilation: '1' must be an int or 2 ints, each at least 1"),
        ({"groups": True}, "groups: True must be an int of at least 1"),
        ({"groups": 1.0}, "groups: 1.0 must be an int of at least 1"),
        ({"out_channels": None}, "out_channels: None must be an int of at least 0"),
        ({"padding_mode": ["zeros"]}, r"padding_mode: \['zeros'\] must be"),
    ],
)
def test_bad_geometry_is_named_where_a_convolution_is_made(kind, arguments, message):
    given = {"out_channels": 4, "kernel_size": 3, **arguments}
    with pytest.raises(ValueError, match=message):
        kind(**given) if "Lazy" in kind.__name__ else kind(3, **given)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (WNConv2d, {"padding": "same", "stride": 2}, r"padding: 'same' needs stride 1, got stride \[2, 2\]"),
        (WNConv2d, {"padding": 0.5, "padding_mode": "reflect"}, "padding: 0.5 must be an int or 2 ints$"),
        (WNConvTranspose2d, {"padding_mode": "reflect"}, "padding_mode: 'reflect' must be 'zeros'"),
        (WNConvTranspose2d, {"output_padding": -1}, "output_padding: -1 must be an int or 2 ints, each at least 0"),
    ],
)
def test_bad_geometry_of_one_kind(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(3, 4, 3, **arguments)


@pytest.mark.parametrize("dim", [0, -1])
def test_dims_of_numpy_are_taken(dim):
    layer, x = WNLinear(4, 3, dim=np.int64(dim)), torch.randn(2, 4)
    assert type(layer.dim) is int
    v, g = layer.weight_v, layer.weight_g
    assert torch.equal(functional.linear(x, v, g, layer.bias, dim=np.int64(dim)), layer(x))
    for weight in (functional.weight_norm(v, g, np.int64(dim)), *functional.weight_norm_many([v], [g], np.int64(dim))):
        torch.testing.assert_close(weight, layer.weight)


WHAT_TORCH_RUNS_WITH = [
    {"kernel_size": np.int64(3), "stride": np.int32(2), "groups": np.int64(1)},
    {"kernel_size": torch.Size([3, 2]), "dilation": [2, 1]},
    {"kernel_size": torch.tensor([2, 3]), "in_channels": torch.tensor(3), "out_channels": np.int64(4)},
    {"kernel_size": range(2, 4), "stride": np.array([2, 1])},
    {"stride": (2,), "padding": (1,), "dilation": [2]},
]
AND_IN_CONVOLUTIONS_ALONE = [
    {"padding": "same"},
    {"padding": "valid", "stride": 2},
    {"padding": -1, "padding_mode": "reflect"},
    {"padding": 2, "padding_mode": "circular"},
]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("Conv2d", given) for given in WHAT_TORCH_RUNS_WITH + AND_IN_CONVOLUTIONS_ALONE]
    + [("ConvTranspose2d", given) for given in WHAT_TORCH_RUNS_WITH],
)
def test_what_torchs_layers_run_with_is_taken(kind, arguments):
    """In a batch and in a single image: the two go different ways to the kernel."""
    given = {"in_channels": 3, "out_channels": 4, "kernel_size": 3, **arguments}
    layer, plain = getattr(wnfused, f"WN{kind}")(**given), getattr(torch.nn, kind)(**given)
    x = torch.randn(2, 3, 9, 8)
    with torch.no_grad():
        layer.weight, layer.bias = plain.weight, plain.bias
    torch.testing.assert_close(layer(x), plain(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(x[0]), plain(x[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"g": torch.ones(3)}, r"g: shape \[3\] does not fit v of \[4, 2, 3, 3\]; use \[4, 1, 1, 1\] or \[4\]"),
        ({"bias": torch.ones(3)}, r"bias: shape \[3\] does not fit; use \[4\]"),
        ({"v": torch.ones(4, 2, 3)}, r"v: shape \[4, 2, 3\] must have 4 dims"),
        ({"stride": 0}, "stride: 0 must be an int or 2 ints, each at least 1"),
        ({"stride": 1.5}, "stride: 1.5 must be an int or 2 ints, each at least 1"),
        ({"stride": "a"}, "stride: 'a' must be an int or 2 ints, each at least 1"),
        ({"padding": -1}, "padding: -1 must be"),
        ({"padding": (0.5, 1)}, r"padding: \(0.5, 1\) must be an int or 2 ints, each at least 0"),
        ({"padding": "full"}, "padding: 'full' must be 'same', 'valid' or ints"),
        ({"padding": "same", "stride": 2}, "padding: 'same' needs stride 1"),
        ({"padding": "same", "stride": (1, 1), "dilation": ([1], 1)}, r"dilation: \(\[1\], 1\) must be an int or 2"),
        ({"padding": "same", "stride": (1, 1), "dilation": (1.0, 1.0)}, r"dilation: \(1.0, 1.0\) must be an int or 2"),
        ({"groups": 3}, "groups: 3 must be at least 1 and divide"),
        ({"groups": "a"}, "groups: 'a' must be at least 1 and divide"),
        ({"dim": 4}, r"dim: 4 is out of range for v of shape \[4, 2, 3, 3\]; use -4 to 3, or None$"),
        ({"residual": torch.ones(1)}, r"residual: \[1\]"),
    ],
)
def test_bad_arguments_of_the_function(arguments, message):
    given = {"x": torch.randn(1, 2, 5, 5), "v": torch.randn(4, 2, 3, 3), "g": torch.ones(4), **arguments}
    with pytest.raises(ValueError, match=message):
        wnfused.functional.conv2d(**given)


@pytest.mark.parametrize(
    ("v", "dim", "message"),
    [
        (torch.ones(3, 4), -3, r"dim: -3 is out of range for v of shape \[3, 4\]; use -2 to 1, or None$"),
        (torch.ones(()), 0, r"dim: 0 is out of range for v of shape \[\]; use None$"),
    ],
)
def test_a_dim_that_v_does_not_have(v, dim, message):
    with pytest.raises(ValueError, match=message):
        wnfused.functional.weight_norm(v, torch.ones(3), dim)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: x.to_sparse(), r"x: expected a dense tensor, got layout torch.sparse_coo; use .to_dense\(\)"),
        (lambda x: x.to_mkldnn(), r"x: expected a dense tensor, got layout torch._mkldnn; use .to_dense\(\)"),
        (lambda x: torch.nested.nested_tensor([x, x]), r"x: expected a dense tensor, got a nested one; use"),
        (
            lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
            r"x: expected a dense tensor, got a nested one; use",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_inputs_that_are_not_dense(make, message):
    with pytest.raises(TypeError, match=message):
        wnfused.WNLinear(8, 4)(make(torch.randn(3, 8)))


SPARSE_CALLS = {
    "linear": (functional.linear, ((2, 3), (4, 3), (4,), (4,))),
    "conv2d": (functional.conv2d, ((2, 3, 5, 5), (4, 3, 3, 3), (4,), (4,))),
    "conv_transpose2d": (functional.conv_transpose2d, ((2, 3, 5, 5), (3, 4, 3, 3), (3,), (4,))),
    "residual_stage": (functional.residual_stage, ((2, 3, 5, 5), (1, 2, 3, 3, 3, 3), (1, 2, 3), (1, 2, 3))),
}


@pytest.mark.parametrize("which", ["v", "g", "bias"])
@pytest.mark.parametrize("name", SPARSE_CALLS)
def test_parameters_that_are_not_dense(name, which):
    function, shapes = SPARSE_CALLS[name]
    inputs = dict(zip(("x", "v", "g", "bias"), (torch.ones(shape) for shape in shapes), strict=True))
    inputs[which] = inputs[which].to_sparse()
    with pytest.raises(TypeError, match=rf"^{which}: expected a dense tensor, got layout torch\.sparse_coo"):
        function(*inputs.values())


def test_what_a_layer_has_in_the_place_of_parametrizations():
    layer = wnfused.WNLinear(8, 4)
    with pytest.raises(AttributeError, match=r"parametrizations\.weight: there is none; this layer has weight_v and"):
        layer.parametrizations.weight.original0  # noqa: B018  the attribute is what is asked for


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"negative_slope": None}, TypeError, "negative_slope: expected a number, got NoneType"),
        ({"activation": ["relu"]}, ValueError, r"activation: unknown \['relu'\]; use None, 'relu' or 'leaky_relu'"),
        ({"activation": np.array(["relu", "x"])}, ValueError, r"activation: unknown array"),
        ({"activation": "leaky_relu", "negative_slope": "x"}, TypeError, "negative_slope: expected a number, got str"),
        ({"activation": "relu", "negative_slope": None}, TypeError, "negative_slope: expected a number, got NoneType"),
        ({"dim": True}, TypeError, "dim: True must be an int or None"),
    ],
)
def test_functions_name_what_is_no_number_and_no_name(backend, options, error, message):
    pair, gain = ((1, 1), (0, 0)), torch.ones(3)
    image, kernels = torch.randn(1, 3, 4, 4), torch.randn(3, 3, 3, 3)
    with wnfused.use_backend(backend) if backend else contextlib.nullcontext():
        for call in (
            lambda: functional.linear(torch.randn(2, 3), torch.randn(3, 3), gain, **options),
            lambda: functional.conv2d(image, kernels, gain, None, *pair, (1, 1), **options),
            lambda: functional.conv_transpose2d(image, kernels, gain, None, *pair, (0, 0), 1, (1, 1), **options),
        ):
            with pytest.raises(error, match=message):
                call()


def test_a_stage_names_a_factor_that_is_no_number():
    parameters = torch.randn(2, 2, 4, 4, 3, 3), torch.ones(2, 2, 4), torch.ones(2, 2, 4)
    with pytest.raises(TypeError, match="skip_scale: expected a number, got str"):
        functional.residual_stage(torch.randn(1, 4, 5, 5), *parameters, skip_scale="a")


@pytest.mark.parametrize("dim", ["x", False, 0.0, 1.0])
def test_a_dim_that_is_no_int_is_named(dim):
    v, g = torch.randn(3, 3), torch.ones(3)
    for call in (
        lambda: WNLinear(3, 3, dim=dim),
        lambda: functional.weight_norm(v, g, dim),
        lambda: functional.weight_norm_many([v], [g], dim),
        lambda: functional.weight_norm_many([], [], dim),
        lambda: functional.row_scales_many([], [], dim),
    ):
        with pytest.raises(TypeError, match=f"dim: {dim!r} must be an int or None"):
            call()


def test_gains_are_compared_with_their_directions():
    v, g = torch.randn(3, 3), torch.ones(3, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"gs\[0\]: dtype torch.float64 does not go with vs\[0\] of torch.float32"):
        functional.weight_norm_many([v], [g])


IN_TUPLES = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
EXTENTS = [
    {"stride": (1,)}, {"stride": (2,), "padding": (1,), "dilation": (1,)}, {"stride": np.int64(2)},
    {"stride": (np.int64(2),) * 2, "padding": (1, 1), "dilation": (1, 1)}, {"stride": torch.tensor(2)},
    {"groups": np.int64(2)}, {"padding": [1, 0]},
]  # fmt: skip


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
def test_extents_in_every_form_that_torch_takes(extents):
    x, v = torch.randn(2, 4, 6, 6), torch.randn(4, 4 // int(extents.get("groups", 1)), 3, 3)
    g = v.flatten(1).norm(dim=1)
    bias = torch.randn(4)
    torch.testing.assert_close(
        functional.conv2d(x, v, g, bias, **extents), torch.nn.functional.conv2d(x, v, bias, **extents),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    if "groups" not in extents:
        torch.testing.assert_close(
            functional.conv_transpose2d(x, v, g, bias, output_padding=(0, 0), **extents),
            torch.nn.functional.conv_transpose2d(x, v, bias, output_padding=(0, 0), **extents), rtol=1e-4, atol=1e-4,
        )  # fmt: skip


def test_layers_of_torch_with_one_number_for_all_dims_are_converted():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 4, 3, stride=(2,), padding=(1,)), torch.nn.ConvTranspose2d(4, 4, 3, stride=(2,))
    )
    x = torch.randn(2, 4, 8, 8)
    expected = model(x)
    torch.testing.assert_close(wnfused.convert(model, plain=True)(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        (functional.linear, {"dim": False}, TypeError, "dim: False must be an int or None"),
        (functional.linear, {"dim": 0.0}, TypeError, "dim: 0.0 must be an int or None"),
        (
            functional.conv2d,
            {"dim": False, "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)},
            TypeError,
            "dim: ",
        ),
        (functional.conv2d, {"groups": True}, ValueError, "groups: True must be at least 1"),
        (functional.conv2d, {"stride": True}, ValueError, "stride: True must be an int or 2 ints, each at least 1"),
    ],
)
def test_truth_values_are_no_numbers(function, options, error, message):
    shape = (4, 3) if function is functional.linear else (4, 3, 1, 1)
    with pytest.raises(error, match=message):
        function(torch.ones(2, *shape[1:]), torch.ones(shape), torch.ones(4), **options)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.randn(2, 5, 8, 8), ValueError, r"x: shape \[2, 5, 8, 8\] does not fit; use \[N, 3, H, W\]"),
        (torch.randn(8, 8), ValueError, r"x: shape \[8, 8\] does not fit; use \[N, 3, H, W\]"),
        (torch.ones(2, 3, 8, 8, dtype=torch.int64), TypeError, "x: expected a floating-point tensor, got torch.int64"),
        ([1], TypeError, "x: expected a Tensor, got list"),
    ],
)
def test_layers_that_pad_themselves_name_the_input_they_were_given(x, error, message):
    with pytest.raises(error, match=message):
        WNConv2d(3, 4, 3, padding=1, padding_mode="circular")(x)


@pytest.mark.parametrize(
    ("mode", "padding", "shape", "least"),
    [
        ("reflect", 3, (1, 3, 3, 3), [4, 4]),
        ("reflect", (0, 3), (3, 3, 3), [1, 4]),
        ("reflect", "same", (2, 3, 4, 1), [2, 2]),
        ("reflect", -2, (1, 3, 3, 5), [5, 5]),
        ("circular", 4, (1, 3, 3, 4), [4, 4]),
        ("circular", (1, 2), (3, 0, 2), [1, 2]),
        ("replicate", 2, (1, 3, 0, 4), [1, 1]),
    ],
)
def test_maps_too_small_for_their_padding_mode_are_named(mode, padding, shape, least):
    layer = WNConv2d(3, 4, 3, padding=padding, padding_mode=mode)
    sizes = list(shape[-2:])
    right = f"x: spatial size {sizes} must be at least {least}, dim by dim, for padding .* with padding_mode '{mode}'"
    with pytest.raises(ValueError, match=right.replace("[", r"\[").replace("]", r"\]")):
        layer(torch.randn(shape))
    if padding != -2:  # cropped, these leave less than the kernel
        fitting = [*shape[:-2], *(max(3, n) for n in least)]
        assert layer(torch.randn(fitting)).isfinite().all()
