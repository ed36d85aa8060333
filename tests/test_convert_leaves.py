"""What ``convert`` cannot replace stays as it is and is named with the reason."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import wnfused
from wnfused import WNConv2d, WNConv3d, WNLinear

pytestmark = pytest.mark.usefixtures("one_thread")

old, new = nn.utils.weight_norm, parametrizations.weight_norm


def left_alone(model, caplog, **keywords):
    """Converts; the log's names and reasons of what stayed."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "wnfused.convert"):
        wnfused.convert(model, **keywords)
    return [record.getMessage() for record in caplog.records]


def test_a_weight_tied_to_an_embedding_stays_as_it_is(caplog):
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7), "other": nn.Linear(4, 4)})
    model["head"].weight = model["embed"].weight
    assert left_alone(model, caplog, plain=True) == [
        "head: left alone, its weight is tied to that of embed, which stays"
    ]
    assert type(model["head"]) is nn.Linear
    assert type(model["other"]) is WNLinear


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w


def with_option_name():
    layer = nn.Linear(4, 4)
    layer.gamma = 3
    return layer


def with_own_forward():
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x
    return layer


def two_parametrisations():
    layer = new(nn.Linear(4, 4))
    return parametrize.register_parametrization(layer, "weight", Doubled())


def parametrised_bias():
    return parametrize.register_parametrization(new(nn.Linear(4, 4)), "bias", Doubled())


def compiled_alone():
    layer = new(nn.Linear(4, 4))
    layer.compile(backend="eager")
    return layer


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: old(nn.GRU(3, 4), "weight_hh_l0"), "no layer here replaces GRU"),
        (lambda: new(nn.LSTM(3, 4), "weight_ih_l0"), "no layer here replaces LSTM"),
        (lambda: old(nn.Embedding(3, 4)), "no layer here replaces Embedding"),
        (lambda: new(nn.Bilinear(3, 4, 5)), "no layer here replaces Bilinear"),
        (lambda: old(nn.Linear(4, 4), "bias", dim=None), "its weight norm is on 'bias'"),
        (two_parametrisations, "its weight is parametrised by _WeightNorm, Doubled"),
        (parametrised_bias, "its bias is parametrised"),
        (with_option_name, "its own attribute 'gamma' means something else here"),
        (with_own_forward, "its own attribute 'forward' means something else here"),
        (compiled_alone, "it was compiled by itself; convert first, compile then"),
        (lambda: nn.LazyLinear(4), "it is lazy: run the model once, then convert"),
        (lambda: nn.Linear(4, 4, dtype=torch.complex64), "its parameters are torch.complex64"),
    ],
)
def test_what_cannot_be_replaced_is_named_with_the_reason(module, reason, caplog):
    model = nn.Sequential(nn.Linear(4, 4), module())
    stays = model[1]
    assert left_alone(model, caplog, plain=True) == [f"1: left alone, {reason}"]
    assert model[1] is stays
    assert type(model[0]) is WNLinear
    assert left_alone(stays, caplog, plain=True) == [f"the model: left alone, {reason}"]


def test_a_subclass_that_only_has_a_constructor_is_replaced():
    class Same(nn.Conv2d):
        """3x3 with padding."""

        def __init__(self, channels):
            super().__init__(channels, channels, 3, padding=1)

    class Reset(nn.Conv2d):
        """As Parallel WaveGAN has them: what a constructor calls."""

        def reset_parameters(self):
            nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
            nn.init.zeros_(self.bias)

    class Ours(WNConv2d):
        def __init__(self, channels):
            super().__init__(channels, channels, 1)

    model, x = nn.Sequential(old(Same(4)), Same(4), old(Reset(4, 4, 1)), Ours(4)), torch.randn(1, 4, 5, 5)
    expected = model(x)
    wnfused.convert(model, plain=True)
    assert [type(m) for m in model] == [WNConv2d, WNConv2d, WNConv2d, Ours]
    torch.testing.assert_close(model(x), expected)
    wnfused.fold(model)
    assert [type(m) for m in model] == [nn.Conv2d] * 4
    torch.testing.assert_close(model(x), expected)


def test_a_subclass_with_a_product_of_its_own_is_not_folded(caplog):
    class Doubled(WNConv2d):
        def _conv_forward(self, input, weight, bias):
            return 2 * super()._conv_forward(input, weight, bias)

    model = nn.Sequential(Doubled(4, 4, 1))
    wnfused.fold(model)
    assert type(model[0]) is Doubled
    assert "0: left alone, Doubled has its own _conv_forward\n" in caplog.text


class Strided(nn.Conv3d):
    """As torchvision's video networks have them."""

    def __init__(self, channels, stride=1):
        super().__init__(channels, channels, 3, stride, padding=1)

    @staticmethod
    def get_downsample_stride(stride):
        return stride, stride, stride


def test_static_methods_of_a_subclass_go_with_the_layer():
    model, x = nn.Sequential(old(Strided(4)), Strided(4, 2)), torch.randn(1, 4, 2, 5, 5)
    expected = model(x)
    wnfused.convert(model, plain=True)
    for layers in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert [type(m) for m in layers] == [WNConv3d] * 2
        assert layers[1].get_downsample_stride(2) == (2, 2, 2)
        torch.testing.assert_close(layers(x), expected)
    wnfused.fold(model)
    assert [type(m) for m in model] == [nn.Conv3d] * 2
    assert model[0].get_downsample_stride(3) == (3, 3, 3)
    torch.testing.assert_close(model(x), expected)


class Halved(nn.Linear):
    @staticmethod
    def forward(x):
        return x / 2


class Made(nn.Linear):
    @classmethod
    def of(cls, features):
        return cls(features, features)


class Nameless(nn.Linear):
    step = staticmethod(lambda x: x + 1)


class Named(nn.Linear):
    @staticmethod
    def gamma(x):
        return x


class Keys(nn.Linear):
    @staticmethod
    def adopt_keys(x):
        return x


class Helper:
    def helper(self):
        return 3


class Mixed(nn.Linear, Helper):
    pass


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Halved, "Halved is a subclass of Linear with its own forward"),
        (Made, "Made is a subclass of Linear with its own of"),
        (Nameless, "Nameless is a subclass of Linear with its own step"),
        (Mixed, "Mixed is a subclass of Linear with its own helper"),
        (Named, "its own attribute 'gamma' means something else here"),
        (Keys, "its own attribute 'adopt_keys' means something else here"),
    ],
)
def test_what_a_subclass_adds_is_not_lost(kind, reason, caplog):
    for layer in (kind(4, 4), old(kind(4, 4)), new(kind(4, 4))):
        assert left_alone(layer, caplog, plain=True) == [f"the model: left alone, {reason}"]


def test_a_mixin_of_static_methods_goes_with_the_layer():
    layer = wnfused.convert(new(Counted(4, 4)))
    assert type(layer) is WNLinear
    assert pickle.loads(pickle.dumps(layer)).count() == 7


class Counting:
    @staticmethod
    def count():
        return 7


class Counted(nn.Linear, Counting):
    pass


@pytest.mark.parametrize(
    ("model", "keywords", "said"),
    [
        (nn.Sequential(nn.Linear(4, 4)), {}, True),
        (nn.Linear(4, 4), {}, True),
        (nn.Sequential(nn.Linear(4, 4)), {"filter": lambda name, module: True}, False),
        (nn.Sequential(nn.Linear(4, 4)), {"plain": True}, False),
        (nn.Sequential(WNLinear(4, 4), nn.Linear(4, 4)), {}, False),
        (nn.Sequential(nn.ReLU()), {}, False),
    ],
)
def test_that_there_is_nothing_to_convert_is_said(model, keywords, said, caplog):
    messages = left_alone(model, caplog, **keywords)
    assert (
        messages
        == ["nothing to convert: no layer is under torch's weight norm; plain=True takes layers without"] * said
    )


def test_layers_left_for_one_reason_are_named_together(caplog):
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(*[Scaled(2, 2) for _ in range(3)], nn.Linear(2, 2))
    reason = "left alone, Scaled is a subclass of Linear with its own forward"
    assert left_alone(model, caplog, plain=True) == [f"0, 1, 2: {reason}"]


def test_that_no_layer_is_known_is_said(caplog):
    unknown = "nothing to convert: no layer is one of torch's linear or convolutional ones"
    for model in (nn.LSTM(4, 4), nn.Sequential(nn.ReLU())):
        assert left_alone(model, caplog, plain=True) == [unknown]
        caplog.clear()
    assert left_alone(WNLinear(4, 4), caplog, plain=True) == []


@pytest.mark.parametrize("name", ["plain", "fuse_activation"])
@pytest.mark.parametrize("value", [None, 1, "no"])
def test_flags_are_flags(name, value):
    with pytest.raises(TypeError, match=f"{name}: {value!r} must be True or False"):
        wnfused.convert(nn.Linear(2, 2), **{name: value})


def test_fold_leaves_what_computes_its_directions(caplog):
    model = nn.Sequential(WNLinear(4, 4), WNLinear(4, 4))
    parametrize.register_parametrization(model[0], "weight_v", Doubled())
    expected = model(torch.ones(2, 4))
    with caplog.at_level(logging.WARNING, "wnfused.fold"):
        wnfused.fold(model)
    assert [record.getMessage() for record in caplog.records] == ["0: left alone, its weight_v is parametrised"]
    assert type(model[1]) is nn.Linear
    torch.testing.assert_close(model(torch.ones(2, 4)), expected)
