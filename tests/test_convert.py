"""In and out again: the function stays the same, whatever form the weights come in."""

import collections
import copy
import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import wnfused
from wnfused import WNConv2d, WNLinear
from wnfused.convert import FusedActivation

pytestmark = pytest.mark.usefixtures("one_thread")

FORMS = {"plain": None, "old": nn.utils.weight_norm, "new": parametrizations.weight_norm}


def network(form):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect", groups=2),
        nn.LeakyReLU(0.2), nn.Conv2d(8, 4, 1, bias=False), nn.Flatten(), nn.Linear(36, 5), nn.ReLU(inplace=True),
        nn.Linear(5, 2),
    )  # fmt: skip
    if FORMS[form] is not None:
        for i in (0, 2, 4, 6, 8):
            FORMS[form](model[i])
    return model


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_convert_and_fold_keep_the_function(form, fuse):
    model, x = network(form), torch.randn(2, 3, 8, 8)
    expected = model(x)
    parameters = {id(p) for p in model.parameters()}
    kinds = [type(m) for m in network("plain")]
    found = wnfused.convert(model, plain=form == "plain", fuse_activation=fuse)
    assert found is model
    assert all(isinstance(model[i], WNConv2d) for i in (0, 2, 4))
    assert all(isinstance(model[i], WNLinear) for i in (6, 8))
    assert isinstance(model[1], FusedActivation) == fuse
    assert model[2].activation == ("leaky_relu" if fuse else None)
    torch.testing.assert_close(model(x), expected)
    model[3].eval()
    if form != "plain":
        assert {id(p) for p in model.parameters()} == parameters
    folded = wnfused.fold(model)
    torch.testing.assert_close(folded(x), expected)
    assert [type(m) for m in folded] == kinds
    assert [m.training for m in folded] == [i != 3 for i in range(len(kinds))]
    assert wnfused.fold(folded) is folded


@pytest.mark.parametrize("form", FORMS)
def test_state_dicts_load_into_a_converted_model(form):
    state = {name: value.clone() for name, value in network(form).state_dict().items()}
    x = torch.randn(2, 3, 8, 8)
    expected = network(form)(x)
    model = wnfused.convert(network("plain"), plain=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.load_state_dict(state, strict=True)
    torch.testing.assert_close(model(x), expected)


def test_training_goes_on_as_before():
    """Ten steps of an optimiser that was made before the conversion follow torch's weight norm."""
    theirs, ours = network("new"), network("new")
    x, target = torch.randn(16, 3, 8, 8), torch.randn(16, 2)
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (theirs, ours)]
    wnfused.convert(ours)
    for _ in range(10):
        for model, optimiser in zip((theirs, ours), optimisers, strict=True):
            optimiser.zero_grad()
            (model(x) - target).square().mean().backward()
            optimiser.step()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


class Branches(nn.Module):
    """Activations that must not be fused: two readers, a hook, one module used twice, called by ``forward`` itself."""

    def __init__(self):
        super().__init__()
        self.read_twice, self.hooked, self.shared_a, self.shared_b, self.last = (nn.Linear(4, 4) for _ in range(5))
        self.relu_1, self.relu_2, self.relu_3, self.relu_4 = (nn.ReLU() for _ in range(4))
        self.tail = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        a = self.read_twice(x)
        b = self.relu_1(a) + a
        c = self.relu_2(self.hooked(b))
        d = self.relu_3(self.shared_b(self.relu_3(self.shared_a(c))))
        return self.tail(self.relu_4(self.last(d)))


def test_only_what_is_safe_is_fused():
    model = Branches()
    seen = []
    model.relu_2.register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(3, 4)
    expected = model(x)
    wnfused.convert(model, plain=True)
    fused = {name for name, module in model.named_modules() if isinstance(module, FusedActivation)}
    assert fused == {"tail.1"}
    torch.testing.assert_close(model(x), expected)
    assert len(seen) == 2


def test_relu6_is_not_fused_as_a_relu():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU6(), nn.Linear(4, 2))
    x = 100 * torch.randn(8, 4)
    expected = model(x)
    wnfused.convert(model, plain=True)
    assert model[0].activation is None
    assert type(model[1]) is nn.ReLU6
    torch.testing.assert_close(model(x), expected)


def test_hooks_modes_and_flags_are_carried_over():
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)), nn.ReLU())
    model[0].weight_v.requires_grad_(False)
    model.eval()
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    wnfused.convert(model)
    assert not model[0].training
    assert not model[0].weight_v.requires_grad
    assert isinstance(model[1], nn.ReLU), "a hook on the layer must go on seeing the value before the activation"
    model(torch.randn(1, 3))
    assert seen == ["before", "forward"]


def test_hooks_of_every_kind_go_on_and_come_off():
    model, seen = nn.Sequential(nn.Linear(3, 3)), []
    layer = model[0]
    layer.register_forward_hook(lambda m, a, k, y: seen.append("kwargs"), with_kwargs=True)
    layer.register_forward_pre_hook(lambda m, a, k: seen.append("before"), with_kwargs=True)
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    handle = layer.register_forward_hook(lambda *_: seen.append("removed"))
    wnfused.convert(model, plain=True)
    handle.remove()
    model(torch.randn(1, 3, requires_grad=True)).sum().backward()
    assert seen == ["before", "kwargs", "backward"]


def test_weights_that_something_else_computes_are_left_alone(caplog):
    model = nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(3, 3)), parametrizations.spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 3)
    )
    prune.l1_unstructured(model[2], "weight", 0.3)
    x = torch.randn(2, 3)
    model.eval()
    expected = model(x)
    with caplog.at_level(logging.WARNING, "wnfused.convert"):
        wnfused.convert(model, plain=True)
    assert "0, 2: left alone, its weight or bias is computed" in caplog.text
    assert "1: left alone, its weight is parametrised" in caplog.text
    torch.testing.assert_close(model(x), expected)


def test_fold_leaves_subclasses_alone():
    class Tripled(WNLinear):
        def forward(self, input, residual=None):
            return 3 * super().forward(input, residual)

    layer = Tripled(3, 3)
    assert wnfused.fold(layer) is layer


def test_optimiser_states_carry_over():
    theirs = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2)))
    ours = wnfused.convert(nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2))))
    optimiser = torch.optim.Adam(theirs.parameters())
    theirs(torch.randn(4, 3)).sum().backward()
    optimiser.step()
    resumed = torch.optim.Adam(ours.parameters())
    resumed.load_state_dict(optimiser.state_dict())
    moments = [resumed.state[p]["exp_avg"].shape for p in ours.parameters()]
    assert moments == [p.shape for p in ours.parameters()]
    ours(torch.randn(4, 3)).sum().backward()
    resumed.step()
    assert all(torch.isfinite(p).all() for p in ours.parameters())


def test_shared_modules_stay_shared():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.Tanh()), "b": nn.Sequential(shared)})
    wnfused.convert(model, plain=True)
    assert model["a"][0] is model["b"][0]
    assert isinstance(model["a"][0], WNLinear)


def test_subclasses_are_left_alone_by_name(caplog):
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(3, 3), nn.Linear(3, 3))
    with caplog.at_level(logging.WARNING, "wnfused.convert"):
        wnfused.convert(model, plain=True)
    assert type(model[0]) is Scaled
    assert isinstance(model[1], WNLinear)
    assert "0: left alone, Scaled is a subclass of Linear with its own forward" in caplog.text


def test_filter_and_plain_choose():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.utils.weight_norm(nn.Linear(3, 3)))
    wnfused.convert(model)
    assert [type(m) for m in model] == [nn.Linear, nn.Linear, WNLinear]
    wnfused.convert(model, plain=True, filter=lambda name, module: name == "1")
    assert [type(m) for m in model] == [nn.Linear, WNLinear, WNLinear]


@pytest.mark.parametrize("form", FORMS)
def test_a_bare_layer_is_returned(form):
    layer = nn.Linear(3, 2) if form == "plain" else FORMS[form](nn.Linear(3, 2))
    x = torch.randn(4, 3)
    expected = layer(x)
    ours = wnfused.convert(layer, plain=True)
    assert type(ours) is WNLinear
    torch.testing.assert_close(ours(x), expected)
    back = wnfused.fold(ours)
    assert type(back) is nn.Linear
    assert not parametrize.is_parametrized(back)
    torch.testing.assert_close(back(x), expected)


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("form", ["old", "new"])
def test_any_dim(form, dim):
    layer = FORMS[form](nn.Conv2d(3, 4, 3), dim=dim)
    x = torch.randn(1, 3, 5, 5)
    expected = layer(x)
    torch.testing.assert_close(wnfused.convert(layer)(x), expected)


def test_fold_gives_back_the_activation_of_a_layer_that_never_had_a_module():
    layer = WNConv2d(3, 4, 3, activation="leaky_relu", negative_slope=0.3)
    x = torch.randn(1, 3, 5, 5)
    expected = layer(x)
    names = set(layer.state_dict())
    folded = wnfused.fold(layer)
    assert [type(m) for m in folded.modules()] == [nn.Conv2d, nn.LeakyReLU]
    assert set(folded.state_dict()) == {"weight", "bias"} != names
    torch.testing.assert_close(folded(x), expected)
    for twin in (copy.deepcopy(folded), torch.jit.script(folded), torch.fx.symbolic_trace(nn.Sequential(folded))):
        torch.testing.assert_close(twin(x), expected)
    again = wnfused.convert(folded, plain=True)
    assert (again.activation, again.negative_slope, len(list(again.children()))) == ("leaky_relu", 0.3, 0)
    torch.testing.assert_close(again(x), expected)


def test_fold_of_a_block_whose_strides_were_set_anew():
    block = wnfused.WNResidualBlock(4, 8, 2)
    block.conv1.stride = block.shortcut.stride = 2
    x = torch.randn(2, 4, 8, 8)
    expected = block(x)
    torch.testing.assert_close(wnfused.fold(block)(x), expected)


def test_fold_of_a_deep_network_has_only_torchs_layers():
    model = wnfused.models.wrn(22, 2, in_channels=1).double()
    x = torch.randn(2, 1, 8, 8).double()
    with wnfused.use_backend("reference"):
        expected = model(x)
    folded = wnfused.fold(model)
    torch.testing.assert_close(folded(x), expected)
    leaves = {type(m) for m in folded.modules() if not list(m.children())}
    assert leaves <= {nn.Conv2d, nn.Linear, nn.ReLU, nn.Identity}


@pytest.mark.parametrize("network", [wnfused.models.wrn, wnfused.models.cnn], ids=["wrn", "cnn"])
def test_folded_networks_can_be_scripted(network):
    folded = wnfused.fold(network(10, 2))
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(torch.jit.script(folded)(x), folded(x))


def test_zero_rows_survive():
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight[0] = 0
    x = torch.randn(4, 3)
    expected = layer(x)
    ours = wnfused.convert(copy.deepcopy(layer), plain=True)
    torch.testing.assert_close(ours(x), expected)
    ours(x).sum().backward()
    assert torch.isfinite(ours.weight_v.grad).all()


def test_no_layer_is_looked_for_among_all_others():
    """A model is walked a few times in all, however many layers it has."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(200)))
    walks = []
    walk = nn.Module.named_modules

    def counted(self, *arguments, **keywords):
        walks.append(self)
        return walk(self, *arguments, **keywords)

    with patch.object(nn.Module, "named_modules", counted):
        wnfused.fold(wnfused.convert(model, plain=True))
    assert sum(module is model for module in walks) < 60


def test_what_is_no_module_is_refused():
    for function in (wnfused.convert, wnfused.fold):
        with pytest.raises(TypeError, match=r"model: expected an nn.Module, got int"):
            function(3)
    with pytest.raises(TypeError, match="filter: expected a function of a name and a module, got str"):
        wnfused.convert(nn.Linear(1, 1), filter="head")


class Decoder(nn.Module):
    """Keeps what it computed: in a nested list, and in a deque."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU())
        self.cache, self.last = {"h": []}, collections.deque(maxlen=2)
        self.generator = torch.Generator()

    def forward(self, x):
        h = self.layers(x)
        self.cache["h"].append(h)
        self.last.append(h)
        torch.rand(1, generator=self.generator)
        return torch.cat(self.cache["h"], 1)


def test_nothing_of_the_trace_stays_in_the_model():
    model = Decoder()
    model.last.append("old")
    before = model.generator.get_state()
    model = wnfused.fold(wnfused.convert(model))
    assert model.cache == {"h": []}
    assert list(model.last) == ["old"]
    assert model.generator.get_state().equal(before)
    assert model(torch.randn(2, 4)).shape == (2, 4)


def test_a_forward_that_was_replaced_on_the_model_counts():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU())
    model.forward = lambda x: model[0](x)
    x = torch.randn(8, 4)
    expected = model(x)
    torch.testing.assert_close(wnfused.convert(model)(x), expected)


def test_an_activation_with_a_forward_of_its_own_stays():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU())
    model[1].forward = lambda x: x.clamp(0, 0.1)
    x = torch.randn(8, 4)
    expected = model(x)
    torch.testing.assert_close(wnfused.convert(model)(x), expected)


def test_layers_that_are_keys_are_replaced():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model.scale = {model[0]: 2.0, "other": 1.0, model[1]: 3.0}
    model = wnfused.convert(model)
    assert list(model.scale.items()) == [(model[0], 2.0), ("other", 1.0), (model[1], 3.0)]


def test_frozen_layers_are_traced_as_open_ones():
    model = wnfused.convert(nn.Sequential(nn.Linear(4, 4), nn.Conv1d(2, 2, 3, padding=1)))
    x = torch.randn(2, 2, 4)
    with wnfused.frozen(model):
        traced = torch.fx.symbolic_trace(model)
        torch.testing.assert_close(traced(x), model(x))


def test_a_sequence_with_a_place_left_empty():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[1] = None
    model = wnfused.convert(model, plain=True)
    assert isinstance(model[0], wnfused.WNLinear)
    assert model[1] is None
    assert type(wnfused.fold(model)[2]) is nn.Linear


def test_rows_of_zeros_get_their_directions_in_memory_of_their_own():
    """A state dict, say, holds the weight's."""
    model = nn.Sequential(nn.Linear(4, 3))
    nn.init.zeros_(model[0].weight)
    held, weight = model.state_dict(), model[0].weight
    converted = wnfused.convert(model, plain=True)
    assert (held["0.weight"] == 0).all()
    assert converted[0].weight_v is weight
    assert (converted[0].weight_v != 0).any(1).all()
    assert (converted[0].weight == 0).all()


def test_a_weight_in_the_memory_of_one_that_stays_is_left_alone(caplog):
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(5, 4, padding_idx=0), "out": nn.Linear(4, 5), "other": nn.Linear(4, 4)}
    )
    model["out"].weight.data = model["embedding"].weight.data
    with caplog.at_level(logging.WARNING, "wnfused.convert"):
        wnfused.convert(model, plain=True)
    assert type(model["out"]) is nn.Linear
    assert type(model["other"]) is WNLinear
    assert (model["embedding"].weight[0] == 0).all()
    assert "out: left alone, its weight is tied to that of embedding, which stays" in caplog.text


def test_a_sparse_weight_is_left_alone(caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.eye(4).to_sparse_csr())
    with caplog.at_level(logging.WARNING, "wnfused.convert"):
        wnfused.convert(model, plain=True)
    assert [type(layer) for layer in model] == [nn.Linear, WNLinear]
    assert "0: left alone, its parameters are torch.sparse_csr" in caplog.text


class _Meeting(nn.Module):
    """Its forward waits for somebody."""

    def __init__(self, inside, go_on):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.__dict__["events"] = inside, go_on

    def forward(self, x):
        inside, go_on = self.events
        inside.set()
        go_on.wait(60)
        return self.layers(x)


def test_other_threads_run_and_convert_models_meanwhile():
    """A trace changes nn.Module itself."""
    before = {name: vars(nn.Module)[name] for name in ("__call__", "__getattr__")}
    inside, go_on = threading.Event(), threading.Event()
    other_inside, free = threading.Event(), threading.Event()
    free.set()
    model, other, plain = _Meeting(inside, go_on), _Meeting(other_inside, free), nn.Linear(2, 2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(wnfused.convert, model, plain=True)
        assert inside.wait(60)
        x = torch.ones(1, 2)
        torch.testing.assert_close(plain(x), x @ plain.weight.T + plain.bias)  # in this thread, within the trace
        second = pool.submit(wnfused.convert, other, plain=True)
        assert not other_inside.wait(0.2)  # it has to wait for its turn
        go_on.set()
        first.result()
        second.result()
    assert {name: vars(nn.Module)[name] for name in before} == before
    assert model.layers[0].activation == other.layers[0].activation == "relu"


def test_a_half_imported_compiler_is_none(monkeypatch):
    """Another thread may be importing it."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    assert type(wnfused.convert(nn.Sequential(nn.Linear(2, 2)), plain=True)[0]) is WNLinear
