"""The look that ``convert`` and ``fold`` take into a model's ``forward``: activations, residuals, no trace left."""

import copy
import logging
import pickle
import random
from collections import ChainMap, UserDict, UserList
from types import SimpleNamespace
from typing import ClassVar

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import wnfused
from wnfused import WNConv2d

pytestmark = pytest.mark.usefixtures("one_thread")

old, new = nn.utils.weight_norm, parametrizations.weight_norm


class SideEffects(nn.Module):
    """A ``forward`` that remembers, counts, draws and branches."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(old(nn.Linear(4, 4)), nn.ReLU())
        self.calls, self.last, self.seen = 0, None, []
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.steps = self.steps + 1
        self.last = x
        self.seen.append(x)
        return self.body(x) + 0 * random.random() + 0 * torch.rand(())


def test_looking_for_activations_leaves_no_trace():
    model = SideEffects()
    before = torch.get_rng_state(), random.getstate()
    wnfused.convert(model)
    assert (model.calls, model.last, model.seen, model.steps.item()) == (0, None, [], 0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert model.body[0].activation == "relu"
    pickle.dumps(model)


class KeepsElsewhere(nn.Module):
    """Remembers in an object beside it, draws from numpy, and is watched by hooks on what holds its layers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(new(nn.Linear(4, 4)), nn.ReLU())
        self.memory, self.seen = SimpleNamespace(last=None), []
        self.body.register_forward_hook(lambda module, inputs, output: self.seen.append(output))
        self.body.register_forward_pre_hook(lambda module, inputs: OUTSIDE.append(inputs))

    def forward(self, x):
        self.memory.last = x
        return self.body(x) * numpy.random.rand()  # noqa: NPY002  # the state that users share


OUTSIDE = []


def test_the_look_is_not_seen_from_outside():
    model = KeepsElsewhere()
    before = numpy.random.get_state()[2]  # noqa: NPY002
    wnfused.convert(model)
    assert model.body[0].activation == "relu"
    assert (model.memory.last, model.seen, OUTSIDE) == (None, [], [])
    assert numpy.random.get_state()[2] == before  # noqa: NPY002
    model(torch.randn(2, 4))
    assert len(model.seen) == len(OUTSIDE) == 1


def test_a_model_that_cannot_be_traced_is_converted_without_fusing(caplog):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(old(nn.Linear(4, 4)), nn.ReLU())

        def forward(self, x):
            return self.body(x) if x.sum() > 0 else -self.body(x)

    model, x = Branching(), torch.randn(2, 4)
    expected = model(x)
    with caplog.at_level(logging.INFO, "wnfused.convert"):
        wnfused.convert(model)
    assert "activations are not fused: the model does not trace" in caplog.text
    assert "body.0: now WNLinear" in caplog.text
    assert model.body[0].activation is None
    torch.testing.assert_close(model(x), expected)


def test_fold_keeps_layers_that_are_called_with_a_residual():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = WNConv2d(4, 4, 3, padding=1, activation="relu"), WNConv2d(4, 4, 3, padding=1)
            self.c = wnfused.WNConvTranspose2d(4, 4, 1, activation="relu")

        def forward(self, x):
            return self.c(self.b(self.a(x), residual=x), None, x)

    model, x = Block(), torch.randn(2, 4, 5, 5)
    expected = model(x)
    weight = model.b.weight.detach().clone()
    folded = wnfused.fold(copy.deepcopy(model))
    torch.testing.assert_close(folded(x), expected)
    assert type(folded.a) is nn.Conv2d
    assert isinstance(folded.b, nn.Conv2d)
    torch.testing.assert_close(folded.b.weight.detach(), weight.as_subclass(torch.Tensor))
    back = wnfused.convert(folded, plain=True)
    assert [type(m) for m in back.children()] == [WNConv2d, WNConv2d, wnfused.WNConvTranspose2d]
    torch.testing.assert_close(back(x), expected)


class Memory(nn.Module):
    """A ``forward`` that writes to its buffers and parameters, in every way there is."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(old(nn.Linear(4, 4)), nn.ReLU())
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("codes", torch.ones(3, 4))
        self.register_buffer("noise", torch.ones(4))
        self.average = nn.Parameter(torch.ones(4), requires_grad=False)
        self.assigned = nn.Parameter(torch.ones(4), requires_grad=False)
        self.table = torch.ones(2, 2)

    def forward(self, x):
        self.calls += 1
        self.codes[1:].mul_(0.5)
        self.codes.data.mul_(0.9)
        self.noise.normal_()
        self.average.data.lerp_(torch.zeros(4), 0.5)
        self.assigned.data = self.assigned.data * 2
        torch.add(self.table, 1, out=self.table)
        return self.body(x)


@pytest.mark.parametrize("look", [wnfused.convert, lambda m: wnfused.fold(wnfused.convert(m)), wnfused.init.initialize])
def test_what_a_forward_writes_to_is_put_back(look):
    model = Memory()
    before = {name: t.clone() for name, t in model.state_dict().items() if not name.startswith("body")}
    where = model.assigned.data_ptr()
    look(model)
    assert {name for name in before if not torch.equal(before[name], model.state_dict()[name])} == set()
    assert model.table.tolist() == [[1, 1], [1, 1]]
    assert model.assigned.data_ptr() == where


class HoldsOtherKinds(nn.Module):
    """Draws from sources of its own, and writes to an array and to containers that Python implements in Python."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(old(nn.Linear(4, 4)), nn.ReLU())
        self.array, self.fixed = numpy.zeros(3), numpy.broadcast_to(1.0, 3)
        self.cache, self.log, self.chain = UserDict(), UserList(), ChainMap({}, {})
        self.cache["layer"] = self.body[0]
        self.random, self.system = random.Random(1), random.SystemRandom()
        self.generator, self.bits = numpy.random.default_rng(1), numpy.random.PCG64(1)
        self.legacy = numpy.random.RandomState(1)

    def forward(self, x):
        self.array += self.fixed
        self.cache["x"] = self.chain["x"] = x
        self.log.append(x)
        self.random.random()
        self.system.random()
        self.generator.random()
        self.bits.random_raw()
        self.legacy.rand()
        return self.body(x)

    def state(self):
        held = self.array.tolist(), [*self.cache], [*self.log], [*self.chain]
        states = self.random.getstate(), self.generator.bit_generator.state, self.bits.state
        return str((held, states, self.legacy.get_state()[2]))


@pytest.mark.parametrize("look", [wnfused.convert, wnfused.init.initialize])
def test_other_kinds_that_a_forward_changes_are_put_back(look):
    model = HoldsOtherKinds()
    before = model.state()
    look(model)
    assert model.state() == before
    assert model.cache["layer"] is model.body[0]


class Grows(nn.Module):
    """Writes through a view that repeats its entries, and into a table that grows."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(old(nn.Linear(4, 4)), nn.ReLU())
        self.register_buffer("once", torch.ones(1, 4))
        self.register_buffer("table", torch.ones(2))

    def forward(self, x):
        self.once.expand(3, 4)[:, torch.tensor([0])] = 2.0
        torch.add(torch.ones(5), 1, out=self.table.resize_(0))
        return self.body(x)


@pytest.mark.filterwarnings("ignore:Use of index_put_ on expanded tensors")
def test_tensors_that_grow_or_repeat_are_put_back():
    model = wnfused.convert(Grows())
    assert model.body[0].activation == "relu"
    assert (model.once.tolist(), model.table.tolist()) == ([[1] * 4], [1, 1])


def scripted():
    """Its first module is one of TorchScript, its last has a hook."""
    inside = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model = nn.Sequential(inside, nn.Linear(4, 4), nn.ReLU(), nn.Dropout()).eval()
    model.seen = []
    model[3].register_forward_hook(lambda *_: model.seen.append(1))
    return model


@pytest.mark.parametrize("look", [wnfused.convert, lambda m: wnfused.fold(wnfused.convert(m)), wnfused.init.initialize])
def test_what_is_in_torchscript_stays_as_it_is(look):
    model, x = scripted(), torch.randn(2, 4)
    inside = {name: t.clone() for name, t in model[0].state_dict().items() if look is not wnfused.init.initialize}
    look(model)
    assert isinstance(model(x), torch.Tensor)
    assert model.seen == [1]
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(model[0].state_dict()[name], value) for name, value in inside.items())
    assert wnfused.convert(model, plain=True)[1].activation == "relu"


class ReadOnly(dict):
    """Cannot be emptied."""

    def clear(self):
        raise RuntimeError("read only")


@pytest.mark.parametrize("look", [wnfused.convert, wnfused.init.initialize])
def test_what_cannot_be_put_back_is_said_and_all_else_is(look):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(old(nn.Linear(4, 4)), nn.ReLU())
            self.kept, self.last = ReadOnly(), []

        def forward(self, x):
            self.kept["x"] = x
            self.last.append(x)
            return self.body(x)

    model = Keeps().eval()
    with pytest.raises(RuntimeError, match="cannot undo it: read only"):
        look(model)
    assert model.last == []
    assert not any(module.training for module in model.modules())


class InTraining(nn.Module):
    """The activation follows in training only, as in a network that gives its features in evaluation."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(new(nn.Linear(8, 8)), nn.ReLU())
        self.aside = nn.Sequential(new(nn.Linear(8, 8)), nn.ReLU())
        self.always = nn.Sequential(new(nn.Linear(8, 8)), nn.ReLU())

    def forward(self, x):
        y = self.always(x)
        return self.body(y) + self.aside(y) if self.training else self.body[0](y)


class Elsewhere:
    """Where the forwards below keep what they computed once."""

    position = None
    table: ClassVar[dict[str, torch.Tensor]] = {}


OF_THE_FILE: list[torch.Tensor] = []
POSITION = None


def of_a_closure():
    kept = {}
    number = None

    class Enclosed(Caching):
        def position(self, x):
            nonlocal number
            number = x.new_ones(x.shape[-1]) if number is None else number
            return kept.setdefault("position", number)

    return Enclosed


class Caching(nn.Module):
    cached = None
    by_name: ClassVar[dict[str, torch.Tensor]] = {}

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.ReLU())

    def forward(self, x):
        return self.net(x + self.position(x))


class InTheClass(Caching):
    def position(self, x):
        if Caching.cached is None:
            Caching.cached = x.new_ones(x.shape[-1])
        return self.by_name.setdefault("position", Caching.cached)


class InAnotherClass(Caching):
    def position(self, x):
        if Elsewhere.position is None:
            Elsewhere.position = x.new_ones(x.shape[-1])
        return Elsewhere.table.setdefault("position", Elsewhere.position)


class InTheFile(Caching):
    def position(self, x):
        global POSITION
        if POSITION is None:
            POSITION = x.new_ones(x.shape[-1])
        if not OF_THE_FILE:
            OF_THE_FILE.append(POSITION)
        return OF_THE_FILE[0]


@pytest.mark.parametrize(
    "make", [InTheClass, InAnotherClass, InTheFile, of_a_closure()], ids=lambda kind: kind.__name__
)
def test_what_a_forward_keeps_beside_the_model_is_no_part_of_the_look(make):
    x = torch.randn(2, 3)
    model = make()
    for look in (wnfused.convert, wnfused.init.initialize, wnfused.fold):
        look(model)
    layer = model.net[0]
    torch.testing.assert_close(model(x), torch.relu(nn.functional.linear(x + 1, layer.weight, layer.bias)))


@pytest.mark.parametrize("mode", [True, False])
def test_an_activation_must_follow_in_training_and_in_evaluation(mode):
    model, x = InTraining().train(mode), torch.randn(2, 8)
    wanted = {training: copy.deepcopy(model).train(training)(x) for training in (True, False)}
    wnfused.convert(model)
    assert model.training == model.body[0].training == mode
    for training, y in wanted.items():
        torch.testing.assert_close(model.train(training)(x), y)
    fused = {name: getattr(model, name)[0].activation for name in ("body", "aside", "always")}
    assert fused == {"body": None, "aside": "relu", "always": "relu"}


class BranchingIn(nn.Module):
    """Traces in one mode alone."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.body = nn.Sequential(new(nn.Linear(8, 8)), nn.ReLU())

    def forward(self, x):
        if self.training == self.mode and x.sum() > 0:
            return self.body[0](x)
        return self.body(x)


@pytest.mark.parametrize("mode", [True, False])
def test_a_mode_that_does_not_trace_fuses_nothing(mode):
    model, x = BranchingIn(mode), torch.ones(2, 8)
    wanted = {training: copy.deepcopy(model).train(training)(x) for training in (True, False)}
    wnfused.convert(model)
    assert model.body[0].activation is None
    for training, y in wanted.items():
        torch.testing.assert_close(model.train(training)(x), y)


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.3)], ids=["relu", "leaky"])
def test_an_activation_whose_layer_was_replaced_runs_again(activation):
    """A new stem or head is often put in after conversion; a layer that is moved or wrapped still applies it."""
    model, x = nn.Sequential(new(nn.Linear(4, 4)), activation, new(nn.Linear(4, 4))), torch.randn(8, 4)
    wanted = model(x).detach()
    wnfused.convert(model)
    wrapped, moved, other = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    wrapped[0] = Wrapper(wrapped[0])
    moved.insert(0, nn.Identity())
    for same in (model, wrapped, moved):
        torch.testing.assert_close(same(x), wanted)
    other[0] = nn.Linear(4, 4)
    y = other(x)
    torch.testing.assert_close(y, other[2](activation(other[0](x))))
    torch.testing.assert_close(torch.compile(other, backend="eager", fullgraph=True)(x), y)
    torch.testing.assert_close(wnfused.fold(other)(x), y)


class Adapted(Wrapper):
    """A low-rank adapter."""

    def __init__(self, inner):
        super().__init__(inner)
        self.factors = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False))

    def forward(self, x):
        return self.inner(x) + self.factors(x)


@pytest.mark.parametrize("fuse", [True, False])
def test_an_adapter_around_a_layer_that_applies_an_activation_is_warned_of(fuse, caplog):
    model, x = nn.Sequential(new(nn.Linear(4, 4)), nn.ReLU(), new(nn.Linear(4, 4))), torch.randn(8, 4)
    wnfused.convert(model, fuse_activation=fuse)
    transparent = copy.deepcopy(model)
    transparent[0] = Wrapper(transparent[0])
    transparent(x)
    assert not caplog.records
    model[0] = Adapted(model[0])
    y = model(x)
    model(x)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == fuse
    assert all("Adapted around WNLinear" in text and "fuse_activation=False" in text for text in warnings)
    if not fuse:
        torch.testing.assert_close(y, model[2](model[0](x).relu()))


def test_activations_look_for_their_layers_only_where_those_were_moved(monkeypatch):
    """A search takes as long as the sequence, and every activation of it would make one."""
    model, x = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(4, 4), nn.ReLU()))), torch.randn(2, 4)
    wnfused.convert(model, plain=True)
    expected, searched, is_within = model(x), [], wnfused.convert.__globals__["_is_within"]
    monkeypatch.setitem(
        wnfused.convert.__globals__,
        "_is_within",
        lambda layer, stage: searched.append(stage) or is_within(layer, stage),
    )
    torch.testing.assert_close(model(x), expected)
    assert not searched
    model[2] = Wrapper(model[2])
    torch.testing.assert_close(model(x), expected)
    assert searched == [model[2]]
    model.insert(0, nn.Identity())  # every key is another one now
    torch.testing.assert_close(model(x), expected)
    model[1] = nn.Identity()
    torch.testing.assert_close(model(x), model[2:](x.relu()))


def test_a_plain_layer_of_zeros_trains_after_conversion():
    model = nn.Sequential(nn.Linear(8, 4), nn.Conv1d(4, 2, 1))
    for layer in model:
        nn.init.zeros_(layer.weight)
    weights = [layer.weight for layer in model]
    wnfused.convert(model, plain=True)
    for layer, weight in zip(model, weights, strict=True):
        assert layer.weight_v is weight
        assert not layer.weight.any()
        layer.weight.sum().backward()
        assert layer.weight_g.grad.abs().min() > 0


def test_fold_warns_where_it_cannot_see_residuals(caplog):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = wnfused.WNLinear(4, 4)

        def forward(self, x):
            return self.layer(x, x) if x.sum() > 0 else self.layer(x)

    with caplog.at_level(logging.WARNING, "wnfused.fold"):
        wnfused.fold(Branching())
    assert "whether one is could not be seen" in caplog.text
    assert "the model does not trace" in caplog.text


def test_fold_does_not_warn_of_residuals_that_torch_layers_never_took(caplog):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else x

    model = wnfused.convert(Branching(), plain=True)
    with caplog.at_level(logging.WARNING, "wnfused.fold"):
        again = wnfused.convert(wnfused.fold(copy.deepcopy(model)), plain=True)
        assert set(vars(wnfused.fold(again).layer)) == set(vars(nn.Linear(4, 4)))
    assert not caplog.text


def test_fold_leaves_what_has_no_shape(caplog):
    model = nn.Sequential(wnfused.nn.WNLazyLinear(4), wnfused.WNLinear(4, 4))
    wnfused.fold(model)
    assert "0: left alone, it has no shape yet; run the model once, then fold" in caplog.text
    assert type(model[1]) is nn.Linear
    model(torch.randn(2, 3))
    assert type(wnfused.fold(model)[0]) is nn.Linear


def add_(y, x):
    y += x
    return y


@pytest.mark.parametrize(
    "write",
    [
        add_,
        lambda y, x: y.mul_(2),
        lambda y, x: nn.functional.dropout(y, 0.5, inplace=True),
        lambda y, x: nn.functional.relu_(y),
        nn.ReLU(inplace=True),
    ],
    ids=["+=", "mul_", "dropout", "relu_", "module"],
)
def test_a_leaky_activation_whose_result_is_written_to_stays(write):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(new(nn.Linear(4, 4)), nn.LeakyReLU(0.1))
            self.write = write

        def forward(self, x):
            y = self.body(x)
            return self.write(y) if isinstance(self.write, nn.Module) else self.write(y, x)

    model, x = Block(), torch.randn(3, 4)
    torch.manual_seed(0)
    wanted = torch.autograd.grad(model(x).sum(), [model.body[0].bias])
    converted = wnfused.convert(model)
    assert type(converted.body[1]) is nn.LeakyReLU
    torch.manual_seed(0)
    torch.testing.assert_close(torch.autograd.grad(converted(x).sum(), [converted.body[0].bias]), wanted)


@pytest.mark.parametrize(
    "between",
    [
        nn.Flatten,
        nn.Identity,
        lambda: nn.Dropout(0.0),
        lambda: nn.Unflatten(1, (2, 2)),
        lambda: nn.Sequential(nn.Identity()),
    ],
)
def test_a_leaky_activation_whose_view_is_written_to_stays(between):
    model, x = (
        nn.Sequential(new(nn.Linear(3, 4)), nn.LeakyReLU(0.1), between(), nn.ELU(inplace=True)),
        torch.randn(5, 3),
    )
    wanted = model(x)
    wnfused.convert(model)
    assert model[0].activation is None
    torch.testing.assert_close(model(x), wanted)
    model(x).sum().backward()


def test_a_sum_that_is_not_in_place_leaves_a_leaky_activation_fused():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(new(nn.Linear(4, 4)), nn.LeakyReLU(0.1))

        def forward(self, x):
            y = self.body(x) + x
            y += x
            return y

    assert wnfused.convert(Block()).body[0].activation == "leaky_relu"


def test_a_slope_that_no_layer_takes_is_not_fused():
    converted = wnfused.convert(nn.Sequential(new(nn.Linear(4, 4)), nn.LeakyReLU(float("inf"))))
    assert converted[0].activation is None
    converted(torch.ones(1, 4))


@pytest.mark.parametrize(
    "wrap",
    [
        torch.optim.swa_utils.AveragedModel,
        nn.DataParallel,
        lambda layer: torch.compile(layer, backend="eager"),
        lambda layer: torch.optim.swa_utils.AveragedModel(torch.compile(layer, backend="eager")),
    ],
)
@pytest.mark.parametrize("norm", [new, None], ids=["normalised", "plain"])
def test_a_single_layer_behind_a_wrapper(caplog, wrap, norm):
    """There is no way through it that could change, and the wrapper is no layer."""
    layer = nn.Linear(3, 3) if norm is None else norm(nn.Linear(3, 3))
    model, x = wrap(layer), torch.randn(4, 3)
    expected = layer(x)
    converted = wnfused.convert(model, plain=norm is None)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert any(isinstance(module, wnfused.WNLinear) for module in converted.modules())
    torch.testing.assert_close(converted(x), expected)


def test_weights_without_a_finite_norm_stay(caplog):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
    with torch.no_grad():
        model[0].weight.mul_(1e20)
    expected = model(x)
    wnfused.convert(model, plain=True)
    assert type(model[0]) is nn.Linear
    assert isinstance(model[2], wnfused.WNLinear)
    assert "0: left alone, its weight has rows whose norm is infinite in float32" in caplog.text
    torch.testing.assert_close(model(x), expected)
