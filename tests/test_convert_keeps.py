"""What a model has besides its weights goes through ``convert`` and ``fold`` unharmed."""

import copy
import dataclasses
import functools
import logging
import pickle
import weakref
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import wnfused
from wnfused import WNLinear
from wnfused.convert import FusedActivation

pytestmark = pytest.mark.usefixtures("one_thread")

old, new = nn.utils.weight_norm, parametrizations.weight_norm


@pytest.mark.parametrize("wrap", [lambda layer: layer, old, new])
def test_attributes_buffers_children_and_further_parameters_stay(wrap):
    layer = wrap(nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular"))
    layer.tag = {"stage": 2}
    layer.register_buffer("mean", torch.ones(3))
    layer.register_buffer("scratch", torch.ones(2), persistent=False)
    layer.register_parameter("temperature", nn.Parameter(torch.tensor(2.0)))
    layer.probe = nn.Identity()
    x = torch.randn(2, 3, 9)
    expected = layer(x)
    model = nn.Sequential(layer)
    for change in (lambda: wnfused.convert(model, plain=True), lambda: wnfused.fold(model)):
        change()
        assert model[0] is not layer
        assert model[0].tag is layer.tag
        assert model[0].temperature is layer.temperature
        assert model[0].probe is layer.probe
        assert {"mean", "temperature"} <= set(model[0].state_dict())
        assert "scratch" not in model[0].state_dict()
        torch.testing.assert_close(model[0].scratch, torch.ones(2))
        torch.testing.assert_close(model(x), expected)
    assert type(model[0]) is nn.Conv1d


def test_hooks_on_checkpoints_go_on_with_the_new_layer():
    model, seen = nn.Sequential(nn.Linear(3, 3)), []
    model[0].register_state_dict_post_hook(lambda module, *_: seen.append(("saved", module)))
    model[0].register_load_state_dict_pre_hook(lambda module, *_: seen.append(("loading", module)))
    model[0].register_load_state_dict_post_hook(lambda module, *_: seen.append(("loaded", module)))
    for change in (lambda: wnfused.convert(model, plain=True), lambda: wnfused.fold(model)):
        seen.clear()
        change()
        model.load_state_dict(model.state_dict())
        assert seen == [(what, model[0]) for what in ("saved", "loading", "loaded")]


def test_hooks_of_a_stage_survive_its_folding():
    model, seen = nn.Sequential(wnfused.WNResidualStage(4, 4, 2)), []
    handle = model[0].register_forward_hook(lambda module, *_: seen.append(type(module)))
    wnfused.fold(model)
    model(torch.randn(1, 4, 3, 3))
    handle.remove()
    model(torch.randn(1, 4, 3, 3))
    assert seen == [nn.Sequential]


def test_hooks_within_a_stage_and_what_else_it_holds_survive_its_folding():
    stage, seen = wnfused.WNResidualStage(4, 6, 3, 2), []
    stage.register_buffer("mean", torch.ones(6))
    stage.tag, stage.transition.note = "second", "first block"
    parts = (stage.transition, stage.transition.conv1)
    handles = [part.register_forward_hook(lambda m, *_: seen.append(type(m))) for part in parts]
    model, x = nn.Sequential(stage), torch.randn(1, 4, 6, 6)
    expected = model(x)
    seen.clear()
    wnfused.fold(model)
    torch.testing.assert_close(model(x), expected)
    assert seen == [nn.Conv2d, wnfused.nn.PlainResidualBlock]
    for handle in handles:
        handle.remove()
    model(x)
    assert len(seen) == 2
    assert len(model[0]) == 3
    assert (model[0].tag, model[0][0].note) == ("second", "first block")
    assert "0.mean" in model.state_dict()
    assert not hasattr(model[0], "num_blocks")


def test_blocks_that_share_a_layer_or_its_weight_share_them_folded():
    first, second, third = (wnfused.WNResidualBlock(4, 4) for _ in range(3))
    second.conv1 = first.conv1
    third.conv2.weight_v, third.conv2.weight_g = first.conv2.weight_v, first.conv2.weight_g
    model, x = nn.Sequential(first, second, third), torch.randn(1, 4, 6, 6)
    expected = model(x)
    wnfused.fold(model)
    torch.testing.assert_close(model(x), expected)
    assert model[0].conv1 is model[1].conv1
    assert model[0].conv2.weight is model[2].conv2.weight


@pytest.mark.parametrize(("layer", "activation"), [("conv1", "leaky_relu"), ("conv1", None), ("conv2", "relu")])
@pytest.mark.parametrize("in_stage", [False, True])
def test_a_block_that_was_given_other_activations_is_left_alone(layer, activation, in_stage, caplog):
    """A plain block has its ReLU, and the sum behind its last convolution."""
    part = wnfused.WNResidualStage(4, 6, 2) if in_stage else wnfused.WNResidualBlock(4, 6)
    getattr(part.transition if in_stage else part, layer).activation = activation
    model, x = nn.Sequential(part), torch.randn(1, 4, 6, 6)
    expected = model(x)
    wnfused.fold(model)
    assert model[0] is part
    assert "0: left alone, a block was given other activations than its ReLU" in caplog.text
    torch.testing.assert_close(model(x), expected)


def test_a_stage_that_was_given_another_child_is_left_alone(caplog):
    model = nn.Sequential(wnfused.WNResidualStage(4, 4, 2))
    model[0].probe = nn.Linear(2, 2)
    wnfused.fold(model)
    assert type(model[0]) is wnfused.WNResidualStage
    assert "0: left alone, it has other children: probe" in caplog.text


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    model, x = Tied(), torch.randn(3, 4)
    expected = model(x)
    wnfused.convert(model, plain=True)
    assert model.first.weight_v is model.second.weight_v
    assert model.first.weight_g is model.second.weight_g
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.testing.assert_close(model(x), expected)
    model(x).square().sum().backward()
    optimiser.step()
    torch.testing.assert_close(model.first.weight.detach(), model.second.weight.detach())
    expected = model(x)
    wnfused.fold(model)
    assert model.first.weight is model.second.weight
    torch.testing.assert_close(model(x), expected)


def test_modules_in_plain_containers_are_replaced_there_too():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = old(nn.Linear(4, 4)), new(nn.Linear(4, 4))
            self.order = [self.a, self.b]
            self.by_name = {"a": self.a, "pair": (self.b, "b")}

        def forward(self, x):
            for layer in self.order:
                x = layer(x)
            return self.by_name["pair"][0](x)

    model, x = Listed(), torch.randn(2, 4)
    expected = model(x)
    wnfused.convert(model)
    assert model.order == [model.a, model.b]
    assert model.by_name == {"a": model.a, "pair": (model.b, "b")}
    torch.testing.assert_close(model(x), expected)
    assert type(wnfused.fold(model).order[0]) is nn.Linear
    torch.testing.assert_close(model(x), expected)


def test_containers_of_other_kinds_and_circles():
    model = nn.Sequential(nn.Linear(4, 4))
    layer = model[0]
    model.ordered, model.unique, model.circle = OrderedDict(a=layer), {layer}, [layer]
    model.circle.append(model.circle)
    wnfused.convert(model, plain=True)
    assert model.ordered["a"] is model.circle[0] is model[0]
    assert model.unique == {model[0]}
    assert model.circle[1] is model.circle


def test_models_converted_and_folded_in_inference_mode_can_be_trained():
    model = nn.Sequential(nn.Linear(4, 4), WNLinear(4, 4))
    with torch.inference_mode():
        wnfused.convert(model, plain=True)
    model(torch.randn(2, 4)).sum().backward()
    with torch.inference_mode():
        wnfused.fold(model)
    model(torch.randn(2, 4)).sum().backward()
    assert model[0].weight.grad is not None


def test_copies_convert_and_load():
    """torch's hook on checkpoints is known by its function's name, which the wrapper around it forgets in a copy."""
    model, x = nn.Sequential(new(nn.Linear(4, 3))), torch.randn(2, 4)
    ours = wnfused.convert(copy.deepcopy(model))
    for state in (model.state_dict(), copy.deepcopy(ours.state_dict())):
        with torch.no_grad():
            ours[0].weight_g.zero_()
        ours.load_state_dict(state, strict=True)
        torch.testing.assert_close(ours(x), model(x))
    wnfused.fold(ours).load_state_dict(nn.Linear(4, 3).state_dict(prefix="0."), strict=True)


@pytest.mark.parametrize("wrap", [old, new])
def test_who_holds_the_old_layer_finds_it_working(wrap):
    layer = wrap(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    ours = wnfused.convert(nn.Sequential(layer))
    with torch.no_grad():
        ours[0].weight_g.mul_(2)
    torch.testing.assert_close(layer(x), ours(x))


def test_flags_dtypes_and_devices_stay():
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        model = nn.Sequential(old(nn.Linear(4, 3).to(dtype)), nn.Linear(3, 2).to(dtype)).eval()
        model[0].weight_g.requires_grad_(False)
        model[1].weight.requires_grad_(False)
        x = torch.randn(5, 4).to(dtype)
        expected = model(x)
        wnfused.convert(model, plain=True)
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert not model[0].weight_g.requires_grad
        assert not model[1].weight_g.requires_grad
        assert not model[0].training
        torch.testing.assert_close(model(x), expected)
        wnfused.fold(model)
        assert model[0].weight.requires_grad
        assert not model[1].weight.requires_grad
        torch.testing.assert_close(model(x), expected)


def test_a_model_on_the_meta_device_is_filled_afterwards():
    source = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3), new(nn.Linear(3, 2)))
    wnfused.convert(model, plain=True)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    x = torch.randn(2, 4)
    model.load_state_dict(source.state_dict(), assign=True)
    torch.testing.assert_close(model(x), source(x))
    other = wnfused.convert(nn.Sequential(nn.Linear(4, 3, device="meta")), plain=True).to_empty(device="cpu")
    other.load_state_dict({"0.weight": source[0].weight, "0.bias": source[0].bias})
    torch.testing.assert_close(other(x), source[0](x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layer", [lambda: nn.Linear(37, 11), lambda: nn.Conv2d(5, 7, 3), lambda: nn.Conv1d(1, 1, 1)])
def test_the_way_out_and_back_in_is_exact(layer, dtype):
    """``g = ||v||`` is the norm that the op takes: the scale is 1, and the weight comes back to the last bit."""
    plain = layer().to(dtype)
    weight = plain.weight.detach().clone()
    ours = wnfused.convert(plain, plain=True)
    assert torch.equal(ours.weight.detach().as_subclass(torch.Tensor), weight)
    folded = wnfused.fold(ours)
    assert torch.equal(folded.weight, weight)
    assert torch.equal(wnfused.fold(wnfused.convert(copy.deepcopy(folded), plain=True)).weight, weight)


def test_a_deepcopy_after_a_forward_converts():
    """torch's old hook cannot be deep-copied with a graph on its weight; without one it can."""
    model = nn.Sequential(old(nn.Linear(4, 3)), nn.ReLU())
    x = torch.randn(2, 4)
    with torch.no_grad():
        expected = model(x)
        twin = copy.deepcopy(model)
    torch.testing.assert_close(wnfused.convert(twin)(x), expected)
    again = pickle.loads(pickle.dumps(twin))
    torch.testing.assert_close(again(x), expected)
    assert isinstance(again[1], FusedActivation)
    torch.testing.assert_close(wnfused.fold(again)(x), expected)
    assert [type(m) for m in again] == [nn.Linear, nn.ReLU]


def test_layers_read_by_functional_calls_go_on():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.attention = new(nn.Linear(8, 8)), nn.MultiheadAttention(8, 2, batch_first=True)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x):
            y = F.linear(x, self.layer.weight, self.layer.bias)
            y = y + F.linear(x, self.layer.weight.t())
            return self.encoder(self.attention(y, y, y)[0])

    model, x = Functional(), torch.randn(2, 5, 8)
    for training in (True, False):
        twin = copy.deepcopy(model).train(training)
        expected = twin(x)
        wnfused.convert(twin, plain=True)
        assert type(twin.encoder.linear1) is WNLinear
        torch.testing.assert_close(twin(x), expected)
        with torch.inference_mode():
            torch.testing.assert_close(twin(x), expected)
        twin(x).sum().backward()
        assert twin.layer.weight_g.grad is not None


def test_one_layer_twice_in_a_sequence():
    shared = nn.Linear(4, 4)
    model, x = nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU()), torch.randn(2, 4)
    expected = model(x)
    wnfused.convert(model, plain=True)
    assert model[0] is model[2]
    assert model[0].activation is None, "its first use and its second are two uses"
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(wnfused.fold(model)(x), expected)
    assert model[0] is model[2]


# --------------------------------------------------------------------------------------------------------- wrappers


def test_wrapped_models():
    model, x = nn.Sequential(old(nn.Linear(4, 4)), nn.ReLU()), torch.randn(2, 4)
    expected = model(x)
    parallel = nn.DataParallel(model)
    assert wnfused.convert(parallel) is parallel
    assert type(parallel.module[0]) is WNLinear
    torch.testing.assert_close(parallel(x), expected)


@pytest.mark.parametrize("part", ["whole", "the two", "layer", "activation"])
def test_activations_are_fused_in_what_is_compiled(part):
    layer, x = old(nn.Linear(4, 4)), torch.randn(9, 4)
    parts = [nn.Sequential(layer, nn.ReLU()), nn.Tanh()] if part == "the two" else [layer, nn.ReLU(), nn.Tanh()]
    model = nn.Sequential(*parts)
    expected = model(x)
    if part == "whole":
        model = torch.compile(model, backend="eager")
    else:
        which = int(part == "activation")
        model[which] = torch.compile(model[which], backend="eager")
    torch.testing.assert_close(model(x), expected)
    wnfused.convert(model)
    torch.testing.assert_close(model(x), expected)
    (new,) = [module for module in model.modules() if isinstance(module, WNLinear)]
    assert new.activation == ("relu" if part in ("whole", "the two") else None), "neighbours in one nn.Sequential"
    torch._dynamo.reset()


@pytest.mark.parametrize("bare", [False, True])
def test_compiled_models_compute_with_the_new_layers(bare):
    layer = old(nn.Linear(4, 4))
    model, x = torch.compile(layer if bare else nn.Sequential(layer), backend="eager"), torch.randn(2, 4)
    expected = model(x)
    wnfused.convert(model)
    torch.testing.assert_close(model(x), expected)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight_g"):
                parameter.zero_()
    torch.testing.assert_close(model(x), layer.bias.expand(2, 4))
    wnfused.fold(model)
    torch.testing.assert_close(model(x), layer.bias.expand(2, 4))


class Branches(NamedTuple):
    first: nn.Module
    second: nn.Module


class HoldsThemBeside(nn.Module):
    """Calls its layers by containers that torch does not know."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.pair, self.queue = Branches(self.a, self.b), deque([self.b])

    def forward(self, x):
        return self.queue[0](self.pair.first(x))


def test_named_tuples_and_queues_hold_the_new_layers():
    model = wnfused.convert(HoldsThemBeside(), plain=True)
    assert isinstance(model.pair, Branches)
    assert model.pair.first is model.a
    assert model.queue[0] is model.pair.second is model.b
    model(torch.ones(1, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    first: nn.Module
    others: list


class Holder:
    def __init__(self, layer):
        self.layers = {"all": [layer]}

    def run(self, x):
        return self.layers["all"][0](x)


HOLDERS = {
    "partial": lambda layer: (functools.partial(lambda f, x: f(x), layer), lambda held, x: held(x)),
    "keywords": lambda layer: (functools.partial(lambda x, *, f: f(x), f=layer), lambda held, x: held(x)),
    "dataclass": lambda layer: (Slots(layer, [layer]), lambda held, x: held.others[0](x)),
    "namespace": lambda layer: (SimpleNamespace(layer=(layer,)), lambda held, x: held.layer[0](x)),
    "object": lambda layer: (Holder(layer), lambda held, x: held.run(x)),
    "method": lambda layer: (Holder(layer).run, lambda held, x: held(x)),
    "frozenset": lambda layer: (frozenset([layer]), lambda held, x: next(iter(held))(x)),
    "forward": lambda layer: (layer.forward, lambda held, x: held(x)),
    "closure": lambda layer: (lambda x: layer(x), lambda held, x: held(x)),
}


class HoldsItsLayerTwice(nn.Module):
    def __init__(self, holder):
        super().__init__()
        self.body = nn.Sequential(new(nn.Linear(4, 4)), nn.ReLU())
        self.held, self.call = HOLDERS[holder](self.body[0])

    def forward(self, x):
        return self.body[1](self.call(self.held, x))


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_layer_is_replaced_wherever_it_is_held_or_not_fused(holder, caplog):
    model, x = HoldsItsLayerTwice(holder), torch.randn(5, 4)
    expected = model(x)
    wnfused.convert(model)
    torch.testing.assert_close(model(x), expected)
    reached = holder not in ("forward", "closure")
    assert model.body[0].activation == ("relu" if reached else None)
    if holder == "dataclass":
        assert model.held.first is model.body[0]
    if holder == "forward":
        assert model.held.__self__ is model.body[0]
    assert type(model.body[1]) is (FusedActivation if reached else nn.ReLU)
    assert ("body.0: the layer that it replaced is still called" in caplog.text) == (holder == "closure")
    torch.testing.assert_close(wnfused.fold(model)(x), expected)


def test_attributes_that_cannot_be_hashed_or_written_to():
    """A weak proxy passes for the module that it stands for: Lightning gives its module one to the trainer."""
    for surgery in (wnfused.convert, wnfused.fold):
        model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)))
        object.__setattr__(model, "owner", weakref.proxy(model))
        gone = nn.Linear(1, 1)
        object.__setattr__(model, "gone", weakref.proxy(gone))
        del gone
        model.options = torch.fx.immutable_collections.immutable_dict(
            a=1, b=torch.fx.immutable_collections.immutable_list([2])
        )
        surgery(wnfused.convert(model))
        assert model.options == {"a": 1, "b": [2]}


@pytest.mark.parametrize("kind", ["forward", "bias", "weight_v"])
def test_fold_leaves_layers_that_were_changed(caplog, kind):
    layer = wnfused.WNLinear(3, 3)
    if kind == "forward":
        inner = layer.forward
        layer.forward = lambda x: 2 * inner(x)
    else:
        prune.l1_unstructured(layer, kind, 0.5)
    model, x = nn.Sequential(layer), torch.randn(2, 3)
    expected = model(x)
    with caplog.at_level(logging.WARNING, "wnfused.fold"):
        assert wnfused.fold(model)[0] is layer
    assert "0: left alone, its bias" in caplog.text or kind in caplog.text
    torch.testing.assert_close(model(x), expected)


class Doubled(nn.Module):
    def forward(self, v):
        return 2 * v


@pytest.mark.parametrize(
    ("module", "path", "name"),
    [
        (lambda: wnfused.WNResidualStage(2, 2, 2), "", "weight_v"),
        (lambda: wnfused.WNResidualStage(2, 2, 2), "", "bias"),
        (lambda: wnfused.WNResidualStage(2, 3, 2), "transition.conv2", "weight_g"),
        (lambda: wnfused.WNResidualBlock(2, 2), "conv1", "weight_v"),
    ],
)
@pytest.mark.parametrize("kind", ["is no parameter: is it pruned?", "is parametrised"])
def test_fold_leaves_blocks_and_stages_that_were_changed(caplog, module, path, name, kind):
    model, x = nn.Sequential(module(), nn.ReLU(), wnfused.WNLinear(2, 2)), torch.randn(2, 2, 2, 2)
    part = model[0].get_submodule(path)
    if "pruned" in kind:
        prune.l1_unstructured(part, name, 0.5)
    else:
        parametrize.register_parametrization(part, name, Doubled())
    expected, left = model(x), model[0]
    with caplog.at_level(logging.WARNING, "wnfused.fold"):
        wnfused.fold(model)
    what = f"{path}.{name}".removeprefix(".")
    assert [record.getMessage() for record in caplog.records] == [f"0: left alone, its {what} {kind}"]
    assert model[0] is left
    assert type(model[2]) is nn.Linear
    torch.testing.assert_close(model(x), expected)


def test_rows_of_zeros_whatever_device_is_the_default():
    layer = nn.Linear(3, 2)
    nn.init.zeros_(layer.weight)
    with torch.device("meta"):
        converted = wnfused.convert(layer, plain=True)
    assert converted.weight_v.device.type == "cpu"
    assert converted.weight_v.norm(dim=1).min() > 0
