"""Arguments that do not fit, of layers and of the functions behind them: errors that name argument and value."""

import pytest
import torch

import wnfused
from wnfused import WNConv2d, WNConvTranspose2d, WNLinear


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: WNLinear(3, 2, activation="gelu"), ValueError, "activation: unknown 'gelu'; use None, 'relu'"),
        (lambda: WNLinear(3, 2, init="xavier"), ValueError, "init: unknown 'xavier'; use 'orthogonal' or 'he'"),
        (lambda: WNLinear(3, 2, gamma=float("nan")), ValueError, "gamma: nan must be finite"),
        (lambda: WNLinear(3, 2, gamma=-1.0), ValueError, "gamma: -1.0 must be finite and at least 0"),
        (lambda: WNLinear(3, 2, gamma="2"), TypeError, "gamma: expected a number, got str"),
        (lambda: WNLinear(3, 2, dim=2), ValueError, "dim: 2 is out of range"),
        (lambda: WNLinear(3, 2, dim="0"), TypeError, "dim: expected an int or None, got str"),
        (
            lambda: WNLinear(3, 2, activation="leaky_relu", negative_slope=-0.1),
            ValueError,
            "negative_slope: -0.1 must be finite and at least 0",
        ),
        (lambda: WNConv2d(3, 4, 3, groups=2), ValueError, "divisible by groups"),
        (lambda: WNConvTranspose2d(3, 4, 3, padding="same"), ValueError, "padding: 'same' must be an int or ints"),
        (lambda: WNLinear(3, 2)(torch.randn(4, 3), "x"), TypeError, "residual: expected a Tensor, got str"),
        (lambda: WNLinear(3, 2)(torch.randn(4, 5)), ValueError, r"x: shape \[4, 5\] does not end in in_features = 3"),
        (lambda: WNConv2d(3, 2, 3)(torch.randn(4, 5, 6, 6)), ValueError, r"x: shape .* use \[N, 3, H, W\]"),
        (lambda: WNConv2d(3, 2, 3)(torch.randn(6, 6)), ValueError, r"x: shape \[6, 6\] does not fit"),
        (lambda: WNLinear(3, 2)(torch.randn(4, 3).double()), TypeError, "v: dtype torch.float32 does not go with x"),
        (lambda: WNLinear(3, 2)(torch.ones(4, 3, dtype=torch.long)), TypeError, "x: expected a floating-point tensor"),
        (lambda: WNLinear(3, 2)([1.0]), TypeError, "x: expected a Tensor, got list"),
        (lambda: WNLinear(3, 2)(torch.randn(4, 3, device="meta")), ValueError, "v: on device cpu, but x is on meta"),
        (lambda: WNLinear(3, 2)(torch.randn(4, 3), torch.randn(4, 3)), ValueError, r"residual: \[4, 3\].*use \[4, 2\]"),
    ],
)
def test_bad_arguments_name_argument_value_and_what_is_right(call, error, message):
    with pytest.raises(error, match=message):
        call()


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
        ({"groups": 3}, "groups: 3 must be at least 1 and divide"),
        ({"groups": "a"}, "groups: 'a' must be at least 1 and divide"),
        ({"dim": 4}, "dim: 4 is out of range"),
        ({"residual": torch.ones(1)}, r"residual: \[1\]"),
    ],
)
def test_bad_arguments_of_the_function(arguments, message):
    given = {"x": torch.randn(1, 2, 5, 5), "v": torch.randn(4, 2, 3, 3), "g": torch.ones(4), **arguments}
    with pytest.raises(ValueError, match=message):
        wnfused.functional.conv2d(**given)


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


def test_what_a_layer_has_in_the_place_of_parametrizations():
    layer = wnfused.WNLinear(8, 4)
    with pytest.raises(AttributeError, match=r"parametrizations\.weight: there is none; this layer has weight_v and"):
        layer.parametrizations.weight.original0  # noqa: B018  the attribute is what is asked for
