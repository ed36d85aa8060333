"""Lazy layers: as torch's, the first input says how many channels there are."""

import copy
import inspect

import pytest
import torch
from torch import nn

import wnfused
from wnfused.nn import (
    WNLazyConv1d,
    WNLazyConv2d,
    WNLazyConv3d,
    WNLazyConvTranspose1d,
    WNLazyConvTranspose2d,
    WNLazyConvTranspose3d,
    WNLazyLinear,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CONVOLUTIONS = {
    WNLazyConv1d: (nn.LazyConv1d, wnfused.WNConv1d, (2, 4, 9)),
    WNLazyConv2d: (nn.LazyConv2d, wnfused.WNConv2d, (2, 4, 5, 5)),
    WNLazyConv3d: (nn.LazyConv3d, wnfused.WNConv3d, (2, 4, 4, 4, 4)),
    WNLazyConvTranspose1d: (nn.LazyConvTranspose1d, wnfused.WNConvTranspose1d, (2, 4, 5)),
    WNLazyConvTranspose2d: (nn.LazyConvTranspose2d, wnfused.WNConvTranspose2d, (2, 4, 3, 3)),
    WNLazyConvTranspose3d: (nn.LazyConvTranspose3d, wnfused.WNConvTranspose3d, (2, 4, 2, 2, 2)),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_the_first_input_settles_the_shape(kind, dim):
    torch_lazy, full, shape = CONVOLUTIONS[kind]
    lazy, x = kind(6, 3, padding=1, groups=2, activation="relu", dim=dim), torch.randn(shape)
    assert lazy.has_uninitialized_params()
    y = lazy(x)
    assert type(lazy) is full
    eager = full(4, 6, 3, padding=1, groups=2, activation="relu", dim=dim)
    assert {n: p.shape for n, p in lazy.named_parameters()} == {n: p.shape for n, p in eager.named_parameters()}
    assert list(lazy.state_dict()) == list(eager.state_dict())
    torch.testing.assert_close(lazy.weight_g, eager.weight_g)
    eager.load_state_dict(lazy.state_dict())
    assert torch.equal(y, eager(x))
    assert repr(lazy) == repr(eager)
    theirs = torch_lazy(6, 3, padding=1, groups=2)
    assert theirs(x).shape == y.shape


def test_linear_with_and_without_bias():
    for bias in (True, False, None):
        lazy = WNLazyLinear(3, bias, dtype=torch.float64)
        assert lazy(torch.randn(2, 5, dtype=torch.float64)).shape == (2, 3)
        assert type(lazy) is wnfused.WNLinear
        assert (lazy.in_features, lazy.bias is not None) == (5, bool(bias))
        assert {p.dtype for p in lazy.parameters()} == {torch.float64}


@pytest.mark.parametrize("form", ["ours", "plain", "old"])
def test_checkpoints_settle_the_shape_too(form):
    source = wnfused.WNConv2d(4, 6, 3)
    state = source.state_dict() if form == "ours" else wnfused.state_dict_to_torch(source, form)
    lazy, x = WNLazyConv2d(6, 3), torch.randn(1, 4, 5, 5)
    copy.deepcopy(lazy).load_state_dict(lazy.state_dict())
    lazy.load_state_dict(state, strict=True)
    assert not lazy.has_uninitialized_params()
    torch.testing.assert_close(lazy(x), source(x))
    assert lazy.in_channels == 4


def test_signatures_leave_out_the_first_argument():
    found, full = (list(inspect.signature(kind).parameters) for kind in (WNLazyConv2d, wnfused.WNConv2d))
    assert found == full[1:]


class Plain(WNLazyLinear):
    pass


class Named(Plain):
    def __init__(self, name, out_features, **options):
        super().__init__(out_features, **options)
        self.name = name


def test_subclasses_become_what_their_parents_become():
    for layer in (Plain(3, activation="relu"), Named("a", 3, activation="relu"), copy.deepcopy(Plain(3))):
        assert layer(torch.randn(2, 5)).shape == (2, 3)
        assert type(layer) is wnfused.WNLinear
    assert inspect.signature(Plain) == inspect.signature(WNLazyLinear)
    assert list(inspect.signature(Named).parameters) == ["name", "out_features", "options"]

    class Convolution(WNLazyConv2d):
        """Defined in a function."""

    assert Convolution(3, 3, padding=1)(torch.randn(1, 2, 4, 4)).shape == (1, 3, 4, 4)


def test_uninitialised_layers_are_left_alone_and_bad_groups_named():
    lazy = WNLazyLinear(3)
    assert wnfused.fold(lazy) is lazy
    with pytest.raises(ValueError, match="groups: 3 must divide 4 input and 6 output channels"):
        WNLazyConv2d(6, 3, groups=3)(torch.randn(1, 4, 5, 5))
    with pytest.raises(TypeError, match="missing a required argument"):
        WNLazyConv2d(6)


@pytest.mark.parametrize(
    ("make", "x", "error", "message"),
    [
        (lambda: WNLazyLinear(3), None, TypeError, "x: expected a Tensor, got NoneType"),
        (lambda: WNLazyLinear(3), torch.ones(()), ValueError, r"x: shape \[\] does not fit; use \[..., in_features\]"),
        (lambda: WNLazyConv2d(6, 3), [1.0], TypeError, "x: expected a Tensor, got list"),
        (
            lambda: WNLazyConv2d(6, 3),
            torch.ones(2, 4, 5, 5, dtype=torch.int),
            TypeError,
            "x: expected a floating-point",
        ),
        (
            lambda: WNLazyConv2d(6, 3),
            torch.ones(5, 5),
            ValueError,
            r"x: shape \[5, 5\] does not fit; use \[N, in_channels, H, W\], or the same without N",
        ),
        (
            lambda: WNLazyConvTranspose1d(6, 3),
            torch.ones(2, 4, 5, 5),
            ValueError,
            r"x: shape \[2, 4, 5, 5\] does not fit; use \[N, in_channels, W\]",
        ),
    ],
)
def test_a_wrong_first_input_is_named_and_leaves_the_layer_without_a_shape(make, x, error, message):
    lazy = make()
    with pytest.raises(error, match=message):
        lazy(x)
    assert lazy.has_uninitialized_params()


def test_the_weight_before_the_first_input():
    lazy = WNLazyConv2d(6, 3)
    assert hasattr(lazy, "weight")
    assert isinstance(lazy.weight, type(nn.LazyConv2d(6, 3).weight))
    with pytest.raises(
        RuntimeError, match="weight: cannot be written before the layer has a shape; run the layer once"
    ):
        lazy.weight = nn.Parameter(torch.ones(6, 4, 3, 3))
    lazy(torch.randn(1, 4, 5, 5))
    assert lazy.weight.shape == (6, 4, 3, 3)
