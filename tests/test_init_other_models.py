"""Init schemes on models not written for them: autocast, tied weights, layers of their own, errors half-way."""

import copy

import pytest
import torch
import torch.nn.functional as F
from drawn import generator
from torch import nn
from torch.nn.utils import parametrizations, prune

import wnfused
from wnfused import diagnostics
from wnfused.init import find_roles, initialize

DATA_DEPENDENT = ("mishkin2016", "salimans2016", "daneshmand2021")


def sample(*shape):
    return 3 * torch.randn(*shape, generator=generator(3))


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_unchanged(model, before):
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


class Autocasts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.b(F.relu(self.a(x)))


@pytest.mark.parametrize("outside", [False, True])
def test_lsuv_under_autocast(outside):
    model = Autocasts()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
        report = initialize(model, "mishkin2016", sample=sample(512, 32), generator=generator())
    assert report.notes == ()
    assert abs(model(sample(512, 32)).float().var().item() - 1) < 0.1


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("scheme", ["arpit2019", "he", "orthogonal", "torch_default"])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_torch_s_weight_norms_over_any_dim_get_what_ours_get(scheme, dim):
    def model(norm):
        return nn.Sequential(norm(nn.Linear(4, 3)), nn.ReLU(), nn.Linear(3, 2))

    ours = model(lambda layer: wnfused.convert(nn.utils.parametrizations.weight_norm(layer, dim=dim)))
    initialize(ours, scheme, generator=generator())
    for norm in (nn.utils.weight_norm, nn.utils.parametrizations.weight_norm):
        theirs = model(lambda layer, norm=norm: norm(layer, dim=dim))
        initialize(theirs, scheme, generator=generator())
        torch.testing.assert_close(theirs(torch.eye(4)), ours(torch.eye(4)))


def test_a_pruned_weight_is_left_alone_and_named():
    model = nn.Sequential(wnfused.WNLinear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 2))
    prune.l1_unstructured(model[0], "weight_v", 3)
    prune.l1_unstructured(model[2], "weight", 3)
    before = copy.deepcopy(nn.Sequential(model[0], model[2]).state_dict())
    report = initialize(model, "he", generator=generator())
    assert report.notes == ("left alone, their weights are computed by something else: 0, 2",)
    assert_unchanged(nn.Sequential(model[0], model[2]), before)


@pytest.mark.parametrize("scheme", ["arpit2019", "mishkin2016"])
def test_pruned_stages_are_left_alone_and_named(scheme):
    stages = wnfused.WNResidualStage(2, 2, 2), wnfused.WNResidualStage(2, 3, 2)
    model = nn.Sequential(*stages, nn.Conv2d(3, 2, 1))
    prune.l1_unstructured(stages[0], "weight_v", 0.5)
    prune.l1_unstructured(stages[1].transition.conv1, "weight_g", 1)
    before = copy.deepcopy(nn.Sequential(stages[0], stages[1].transition.conv1).state_dict())
    v = stages[1].weight_v.clone()
    report = initialize(model, scheme, sample=torch.randn(4, 2, 4, 4), generator=generator())
    named = "0.weight_v[:, 0], 0.weight_v[:, 1], 1.transition.conv1"
    assert report.notes == (f"left alone, their weights are computed by something else: {named}",)
    assert_unchanged(nn.Sequential(stages[0], stages[1].transition.conv1), before)
    assert not torch.equal(stages[1].weight_v, v)


# ----------------------------------------------------------------------------------------------- tied weights


class TiedToAnEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.branch = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, i):
        x = self.embedding(i)
        return self.head(x + self.branch(x))


def test_fixup_does_not_silence_an_embedding():
    model = TiedToAnEmbedding()
    report = initialize(model, "zhang2019", generator=generator())
    assert any(note.startswith("head: stays He's") for note in report.notes)
    assert "head: its weight is that of embedding too, which changes with it" in report.notes
    assert (model.branch[2].weight == 0).all()
    F.cross_entropy(model(torch.arange(50)), torch.arange(50)).backward()
    assert (model.embedding.weight.grad != 0).any()


def test_a_weight_of_two_layers_is_initialised_once():
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    second.weight = first.weight
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(32, 5))
    report = initialize(model, "mishkin2016", sample=sample(256, 32), generator=generator())
    assert report.notes == ("0: its weight is that of 2 too, and is initialised for 0",)
    assert [entry.layer for entry in report] == ["0", "4"]
    assert abs(first(sample(256, 32)).var().item() - 1) < 0.1
    assert (second.bias == 0).all()


# ------------------------------------------------------------------------------------- layers of somebody's own


class Causal(nn.Conv1d):
    def forward(self, x):
        return super().forward(F.pad(x, (self.dilation[0] * (self.kernel_size[0] - 1), 0)))


class EqualisedRate(nn.Linear):
    def forward(self, input, scale=0.1):
        return F.linear(input, scale * self.weight, self.bias)


@pytest.mark.parametrize("norm", [lambda layer: layer, nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
def test_lsuv_measures_what_a_layer_computes(norm):
    # A kernel that is longer than the input before the class pads it.
    model = nn.Sequential(norm(Causal(8, 8, 3, dilation=64)), nn.ReLU(), norm(Causal(8, 8, 3)))
    initialize(model, "mishkin2016", sample=sample(32, 8, 100), generator=generator())
    assert abs(model(sample(32, 8, 100)).var().item() - 1) < 0.1
    model = nn.Sequential(norm(EqualisedRate(32, 32)), nn.ReLU(), norm(EqualisedRate(32, 32)))
    initialize(model, "mishkin2016", sample=sample(256, 32), generator=generator())
    assert abs(model(sample(256, 32)).var().item() - 1) < 0.1


def test_salimans_standardises_what_a_layer_computes():
    model = nn.Sequential(EqualisedRate(32, 32), nn.ReLU(), nn.Linear(32, 4))
    initialize(model, "salimans2016", sample=sample(256, 32), generator=generator())
    y = model[0](sample(256, 32))
    torch.testing.assert_close(y.mean(0), torch.zeros(32), rtol=0, atol=1e-4)
    torch.testing.assert_close(y.std(0, correction=0), torch.ones(32), rtol=0, atol=1e-4)


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = EqualisedRate(32, 32)

    def forward(self, x):
        return self.layer(scale=0.01, input=x)


def test_a_layer_that_is_called_by_keywords():
    model = ByKeyword()
    initialize(model, "mishkin2016", sample=sample(256, 32), generator=generator())
    assert abs(model(sample(256, 32)).var().item() - 1) < 0.1


def test_daneshmand_leaves_a_forward_it_does_not_know():
    model = nn.Sequential(nn.Linear(32, 32), EqualisedRate(32, 32), nn.Linear(32, 4))
    report = initialize(model, "daneshmand2021", sample=sample(256, 32), generator=generator())
    assert "1: computes by a forward of its own: stays Xavier's" in report.notes


@pytest.mark.parametrize("prepend", [False, True])
def test_a_hook_of_the_user_may_change_the_input(prepend):
    model = nn.Sequential(nn.Linear(32, 32))
    model[0].register_forward_pre_hook(lambda module, arguments: (arguments[0] * 5,), prepend=prepend)
    initialize(model, "mishkin2016", sample=sample(256, 32), generator=generator())
    assert abs(model(sample(256, 32)).var().item() - 1) < 0.1


@pytest.mark.parametrize("before", [False, True])
def test_a_compiled_model_is_walked(before):
    inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model = torch.compile(inner, backend="eager")
    if before:
        model(sample(256, 16))
    report = initialize(model, "mishkin2016", sample=sample(256, 16), generator=generator())
    assert report.notes == ()
    assert abs(inner(sample(256, 16)).var().item() - 1) < 0.1
    torch._dynamo.reset()


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = wnfused.WNLinear(4, 4), wnfused.WNLinear(4, 4)

    def forward(self, x):
        return x + self.last(torch.relu(self.first(x)))


@pytest.mark.parametrize("compiled", ["whole", "whole, in place", "a block", "a block, in place", "wrapped"])
def test_places_are_found_in_what_is_compiled(compiled):
    model = nn.Sequential(wnfused.WNLinear(4, 4), Branch(), Branch(), wnfused.WNLinear(4, 2))
    expected = [(entry.role, entry.gamma) for entry in initialize(model)]
    if compiled == "wrapped":
        model = nn.DataParallel(torch.compile(model, backend="eager"))
    elif compiled.endswith("in place"):
        (model if "whole" in compiled else model[1]).compile(backend="eager")
    elif compiled == "whole":
        model = torch.compile(model, backend="eager")
    else:
        model[1] = torch.compile(model[1], backend="eager")
    report = initialize(model)
    assert [(entry.role, entry.gamma) for entry in report] == expected
    assert report.unplaced == ()
    assert {entry.layer for entry in report} <= {name for name, _ in model.named_modules()}
    torch._dynamo.reset()


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        mean = self.encoder(x)
        return self.decoder(mean + torch.randn_like(mean))


def test_the_generator_decides_what_a_model_draws():
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model, before = Draws(), torch.get_rng_state()
        initialize(model, "mishkin2016", sample=sample(64, 16), generator=generator())
        assert torch.equal(torch.get_rng_state(), before)
        found.append(model.decoder.weight)
    assert torch.equal(*found)


# ------------------------------------------------------------------------------------------ nothing else is moved


class MovingBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("ones", torch.ones(1).expand(8))

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return self.layer(x) * self.ones


@pytest.mark.parametrize(
    "run",
    [
        lambda model, x: initialize(model, "mishkin2016", sample=x),
        lambda model, x: diagnostics.layer_norms(model, x),
        lambda model, x: diagnostics.similarity(model, x),
        lambda model, x: diagnostics.jacobian_spectrum(model, x),
    ],
)
def test_buffers_that_are_assigned_are_put_back(run):
    model = MovingBuffers()
    average = model.average
    run(model, sample(16, 8))
    assert model.average is average
    assert (average == 0).all()


class Merges(nn.Linear):
    """An adapter that merges its weights in evaluation mode, as LoRA's layers do."""

    merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


def test_modes_are_set_without_running_anybodys_code():
    model = nn.Sequential(Merges(8, 8), nn.Dropout(0.5))
    initialize(model, "mishkin2016", sample=sample(64, 8))
    assert not model[0].merged
    assert model.training
    assert model[1].training


class FailsTheSecondTime(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x):
        x = self.a(x)
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("once is enough")
        return self.b(x)


@pytest.mark.parametrize("scheme", DATA_DEPENDENT)
def test_an_error_half_way_leaves_the_parameters(scheme):
    model = FailsTheSecondTime()
    before = state(model)
    with pytest.raises(RuntimeError, match="once is enough"):
        initialize(model, scheme, sample=sample(64, 8))
    assert_unchanged(model, before)
    models = [FailsTheSecondTime(), FailsTheSecondTime()]
    befores = [state(model) for model in models]
    with pytest.raises(RuntimeError, match="once is enough"):
        wnfused.init.initialize_population(models, scheme, sample=sample(64, 8))
    for model, before in zip(models, befores, strict=True):
        assert_unchanged(model, before)


def test_too_small_a_sample_leaves_the_parameters():
    model = wnfused.models.mlp(3, 16, in_features=8)
    before = state(model)
    with pytest.raises(ValueError, match="use a larger one"):
        initialize(model, "daneshmand2021", sample=sample(4, 8), deficient="error")
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("scheme", "wrong"), [("he", {"gammas": {"x": 1.0}}), ("he", {"distribution": "x"}), ("arpit2019", {"v": "x"})]
)
def test_an_error_leaves_the_factors_of_sums(scheme, wrong):
    model = wnfused.models.wrn(10, in_channels=1)
    initialize(model, "half_scaling", generator=generator())
    factor, y = model.stages[0].skip_scale, model(torch.ones(1, 1, 8, 8))
    with pytest.raises(ValueError, match="'x'"):
        initialize(model, scheme, **wrong)
    assert model.stages[0].skip_scale == factor
    assert torch.equal(model(torch.ones(1, 1, 8, 8)), y)
    initialize(model, "he")
    assert model.stages[0].skip_scale == 1.0


def test_a_model_without_layers_is_said_to_have_none():
    report = initialize(nn.Sequential(nn.ReLU()))
    assert report.notes == ("no layer was found",)
    assert str(report) == "init scheme arpit2019\nnote: no layer was found", "no table without rows"


# ------------------------------------------------------------------------------------------------ residual branches


class Block(nn.Module):
    def __init__(self, kind, channels=4):
        super().__init__()
        self.kind = kind
        self.shortcut = nn.Identity()
        self.a, self.b = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.c = nn.Conv2d(channels, channels, 1) if kind in ("a sum inside", "three beside") else None
        if "gate" in kind:
            self.squeeze, self.excite = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x):
        if self.kind == "concatenated shortcut":
            shortcut = torch.cat((F.avg_pool2d(x, 1)[:, :2], torch.zeros_like(x)[:, :2]), 1)
            return F.relu(shortcut + self.b(F.relu(self.a(x))))
        if self.kind == "a sum inside":
            return x + self.c(F.relu(self.a(x) + self.b(x)))
        if self.kind == "a sum at the end":
            return x + F.relu(self.a(x) + self.b(x))
        if self.kind == "three beside":
            return x + F.dropout(self.a(x) + self.b(x) + self.c(x))
        if self.kind == "side by side":
            return self.a(x) + self.b(x) + x
        if self.kind == "a sum in brackets":
            return self.shortcut(x) + (self.a(x) + self.b(x))
        y = self.b(F.relu(self.a(x)))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return x + (gate * y if self.kind == "gate first" else y * gate)


@pytest.mark.parametrize("kind", ["concatenated shortcut", "gate first", "gate last"])
def test_one_branch_of_two_layers(kind):
    roles = {role.name: role for role in find_roles(nn.Sequential(nn.Conv2d(3, 4, 3), Block(kind), Block(kind)))}
    for i, name in enumerate(("1", "2"), start=1):
        inner, last = roles[f"{name}.a"], roles[f"{name}.b"]
        assert (inner.closes_branch, inner.branch, inner.branch_layers) == (False, i, 2)
        assert (last.closes_branch, last.branch, last.branch_layers) == (True, i, 2)
        assert (last.num_blocks, last.block) == (2, i)
    assert [role.name for role in roles.values() if role.branch] == ["1.a", "1.b", "2.a", "2.b"]


@pytest.mark.parametrize(
    ("kind", "beside"), [("side by side", "ab"), ("a sum in brackets", "ab"), ("three beside", "abc")]
)
def test_branches_side_by_side_are_blocks_each(kind, beside):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Block(kind), Block(kind)).eval()
    roles = [role for role in find_roles(model) if role.branch]
    names = [f"{i}.{name}" for i in (1, 2) for name in beside]
    assert [(r.name, r.closes_branch, r.num_blocks, r.block, r.branch) for r in roles] == [
        (name, True, len(names), i, i) for i, name in enumerate(names, start=1)
    ]
    start = copy.deepcopy(model)
    initialize(start, "zhang2019", generator=generator())
    x = sample(2, 3, 8, 8)
    torch.testing.assert_close(start(x), start[0](x))


def test_a_sum_inside_a_branch_is_no_end_of_it():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Block("a sum inside"), Block("a sum inside"))
    roles = {role.name: role for role in find_roles(model)}
    for i in (1, 2):
        last = roles[f"{i}.c"]
        assert (last.closes_branch, last.branch_layers, last.num_blocks, last.block) == (True, 2, 2, i)
        for name in "ab":
            inner = roles[f"{i}.{name}"]
            assert (inner.closes_branch, inner.branch, inner.branch_layers, inner.num_blocks) == (False, i, 2, 2)


def test_a_sum_at_the_end_of_a_branch_is_not_another_block():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Block("a sum at the end"), Block("a sum at the end"))
    branches = [(r.name, r.branch, r.branch_layers, r.num_blocks) for r in find_roles(model) if r.branch]
    assert branches == [(f"{i}.{name}", i, 1, 2) for i in (1, 2) for name in "ab"]


class Projecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.shortcut = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.shortcut(x) + self.b(F.relu(self.a(x)))


def test_a_block_inside_a_branch_stays_one():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Around(Projecting(), Projecting(), nn.Conv2d(4, 4, 1)))
    roles = {role.name: role for role in find_roles(model)}
    assert all(roles[name].closes_branch for name in ("1.0.b", "1.1.b", "1.2"))


class Widened(nn.Module):
    """Two branches and a shortcut of one layer, all summed."""

    def __init__(self, first):
        super().__init__()
        self.first = first
        self.a, self.b = (nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1)) for _ in range(2))
        self.shortcut = nn.Conv2d(4, 8, 3)

    def forward(self, x):
        branches = self.a(x) + self.b(x)
        return self.shortcut(x) + branches if self.first else branches + self.shortcut(x)


@pytest.mark.parametrize("first", [False, True])
def test_branches_beside_a_shortcut_of_one_layer(first):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Widened(first))
    branches = [(r.name, r.branch, r.closes_branch, r.num_blocks) for r in find_roles(model) if r.branch]
    assert branches == [
        ("1.a.0", 1, False, 2), ("1.a.2", 1, True, 2), ("1.b.0", 2, False, 2), ("1.b.2", 2, True, 2),
    ]  # fmt: skip


class Apart(nn.Module):
    """Two sums of what comes from one tensor, of which neither is the other's."""

    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        x = self.stem(x)
        return F.relu(self.a(x) + self.b(x)), x + self.c(F.relu(x))


def test_sums_apart_are_not_taken_together():
    roles = {role.name: role for role in find_roles(Apart())}
    assert roles["c"].closes_branch
    assert roles["c"].num_blocks == 1


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = F.relu(self.layer(x))
        return x * torch.sigmoid(self.gate(x))


class Around(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def test_a_long_chain_of_gates_is_walked_once():
    roles = find_roles(Around(*(Gated() for _ in range(200))))
    assert [role.name for role in roles if role.closes_branch] == ["199.layer"]
    assert {role.branch_layers for role in roles if role.branch} == {200}


@pytest.mark.parametrize("start", [0.0, 3.0])
def test_biases_of_tied_layers_are_zero_before_anything_is_measured(start):
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    second.weight = first.weight
    nn.init.constant_(second.bias, start)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(32, 5))
    initialize(model, "mishkin2016", sample=sample(256, 32), generator=generator())
    assert abs(model(sample(256, 32)).var().item() - 1) < 0.1


def test_a_gamma_that_was_stated_for_a_tied_layer_counts():
    first, second = wnfused.WNLinear(8, 8), wnfused.WNLinear(8, 8)
    second.weight_v, second.weight_g = first.weight_v, first.weight_g
    initialize(nn.Sequential(first, nn.ReLU(), second), gammas={"2": 0.25})
    torch.testing.assert_close(first.weight_g, torch.full_like(first.weight_g, 0.5))


class Derivative(nn.Module):
    """Computes with a derivative by its input: a distance field, a force field. ``on``: it records gradients itself."""

    def __init__(self, on):
        super().__init__()
        self.net, self.on = nn.Sequential(wnfused.WNLinear(3, 32), nn.Softplus(), wnfused.WNLinear(32, 1)), on

    def forward(self, x):
        x = x.detach().requires_grad_(True)
        with torch.set_grad_enabled(self.on or torch.is_grad_enabled()):
            y = self.net(x)
            return torch.autograd.grad(y.sum(), x, create_graph=True)[0] + y


class WithoutDerivative(nn.Module):
    """Uses its layers for the same: none of them is a head."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        y = self.net(x)
        return torch.ones_like(y) * y.sum() + y


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("scheme", DATA_DEPENDENT)
def test_a_model_that_takes_derivatives(scheme, on):
    model, x = Derivative(on), sample(64, 3)
    without = WithoutDerivative(copy.deepcopy(model.net))
    initialize(model, scheme, sample=x, generator=generator(0))
    initialize(without, scheme, sample=x, generator=generator(0))
    for parameter, expected in zip(model.parameters(), without.parameters(), strict=True):
        assert torch.equal(parameter, expected)
        assert parameter.requires_grad


class Experts(nn.Module):
    """One of two experts gets no rows, nor does a stage."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.stage = nn.Linear(8, 8), nn.Linear(8, 8), wnfused.WNResidualStage(2, 2, 1)

    def forward(self, x):
        rows = x[:, 0] > 1e9
        self.stage(x[rows].view(-1, 2, 2, 2))
        return torch.cat([self.a(x[rows]), self.b(x[~rows])])


@pytest.mark.parametrize("scheme", DATA_DEPENDENT)
@pytest.mark.filterwarnings("error")
def test_a_layer_without_any_rows_is_not_reached(scheme):
    model = Experts()
    report = initialize(model, scheme, sample=sample(64, 8))
    assert [entry.layer for entry in report.entries] == ["b"]
    assert (
        "not reached by the sample, left as they started: stage.weight_v[:, 0], stage.weight_v[:, 1], a" in report.notes
    )
    assert all(parameter.isfinite().all() for parameter in model.parameters())


class Halving(wnfused.WNResidualStage):
    def forward(self, x):
        return super().forward(x) / 2


@pytest.mark.parametrize("scheme", DATA_DEPENDENT)
@pytest.mark.parametrize("kind", [wnfused.WNResidualStage, Halving])
def test_a_stage_with_a_forward_of_its_own_is_not_walked_block_by_block(scheme, kind):
    stage, tail = kind(2, 2, 2), wnfused.WNConv2d(2, 2, 1)
    seen = []
    if kind is wnfused.WNResidualStage:
        plain = stage.forward
        stage.forward = lambda x: seen.append(x) or plain(x) / 2
    patch = stage.__dict__.get("forward")
    report = initialize(nn.Sequential(stage, tail), scheme, sample=sample(64, 2, 4, 4), generator=generator())
    assert [entry.layer for entry in report.entries] == ["1"]
    assert report.notes == (
        "run by a forward of the stage's own, not block by block, left as they started: "
        "0.weight_v[:, 0], 0.weight_v[:, 1]",
    )
    assert bool(seen) is (patch is not None)
    assert stage.__dict__.get("forward") is patch


class OnAVector(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.condition, self.z = nn.Linear(8, 8), nn.Linear(4, 8), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return self.a(x) + self.condition(self.z)


@pytest.mark.parametrize("scheme", DATA_DEPENDENT)
def test_a_linear_layer_on_a_vector(scheme):
    report = initialize(OnAVector(), scheme, sample=sample(64, 8))
    assert [entry.layer for entry in report.entries] == ["a", "condition"]


def test_a_layer_of_no_outputs_is_no_error():
    layer = nn.Sequential(nn.Linear(8, 0, bias=False), nn.Linear(0, 4))
    initialize(layer, "salimans2016", sample=sample(64, 8))
    assert all(parameter.isfinite().all() for parameter in layer.parameters())


def encoder_and_decoder(kinds, options):
    conv, transposed = kinds
    model = nn.Sequential(
        conv(3, 8, 3, stride=2, padding=1), nn.ReLU(), conv(8, 8, 3), nn.ReLU(),
        transposed(8, 8, 3, stride=2, padding=1, output_padding=1), nn.ReLU(), transposed(8, 3, 3, stride=2),
    )  # fmt: skip
    for layer in (model[0], model[4]):
        for name in ("stride", "dilation", "output_padding"):  # the padding of a transposed one must stay a tuple
            value = getattr(layer, name)
            setattr(layer, name, value if options is None else options(value))
    return model


@pytest.mark.parametrize("kinds", [(nn.Conv2d, nn.ConvTranspose2d), (wnfused.WNConv2d, wnfused.WNConvTranspose2d)])
@pytest.mark.parametrize("scheme", ["arpit2019", "he", *DATA_DEPENDENT])
@pytest.mark.parametrize("options", [lambda value: value[0], list])
def test_a_stride_that_was_set_anew(kinds, scheme, options):
    """To one number, or to a list of them: torch takes both."""
    torch.manual_seed(0)
    model = encoder_and_decoder(kinds, options)
    expected = encoder_and_decoder(kinds, None)
    expected.load_state_dict(model.state_dict())
    for each in (model, expected):
        initialize(each, scheme, sample=sample(64, 3, 8, 8), generator=generator(0))
    torch.testing.assert_close(model.state_dict(), expected.state_dict())


def test_a_transposed_layer_whose_stride_was_set_anew_starts_by_the_rule():
    layer = wnfused.WNConvTranspose2d(4, 4, 3)
    layer.stride = 2
    layer.reset_parameters()
    torch.testing.assert_close(layer.weight_g, torch.full_like(layer.weight_g, 2.0))


def test_a_padding_that_was_set_anew_counts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(256, 2))
    expected = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 2))
    model[1].padding = 1
    for each in (model, expected):
        initialize(each, "daneshmand2021", sample=sample(64, 3, 8, 8), generator=generator(0))
    torch.testing.assert_close(model.state_dict(), expected.state_dict())


class Doubled(nn.Linear):
    """A layer that holds another one with its own weight."""

    def __init__(self):
        super().__init__(4, 4)
        self.other = nn.Linear(4, 4)
        self.other.weight = self.weight

    def forward(self, x):
        return super().forward(self.other(x))


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)
        self.layer.weight = self.weight


@pytest.mark.parametrize(
    ("model", "scheme", "note"),
    [
        (lambda: prune.identity(nn.Linear(4, 4), "weight"), "he", "computed by something else: the model"),
        (lambda: nn.Conv2d(4, 2, 3), "xiao2018", "the model: orthogonal, not delta-orthogonal"),
        (lambda: nn.Linear(4, 4), "mishkin2016", "the model: its output's variance on the sample is 0, not 1"),
        (lambda: nn.Linear(4, 4), "salimans2016", "the model: 4 units are constant"),
        (Doubled, "he", "the model: its weight is that of other too, and is initialised for the model"),
        (Holding, "he", "layer: its weight is that of the model too"),
    ],
)
def test_notes_call_a_model_that_is_one_layer_the_model(model, scheme, note):
    notes = initialize(model(), scheme, sample=torch.zeros(8, 4)).notes
    assert any(note in each for each in notes), notes
    assert not any(each.startswith(": ") for each in notes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: initialize(nn.Linear(4, 4), gammas={"x": 1}), "no layer 'x'; it has '', which is the model itself$"),
        (lambda: initialize(nn.Linear(4, 4), roles={"": {"x": 1}}), "roles: 'x' for the model is none of"),
        (
            lambda: initialize(nn.Conv2d(4, 2, 3), "xiao2018", otherwise="error"),
            "model: the model cannot be delta-orthogonal",
        ),
        (lambda: wnfused.regularize.retract_(wnfused.WNLinear(4, 4, dim=1)), "the model is normalised over other rows"),
        (lambda: wnfused.regularize.retract_(prune.identity(nn.Linear(4, 4), "weight")), "weight of the model is"),
    ],
)
def test_errors_call_a_model_that_is_one_layer_the_model(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class Mixed(nn.Module):
    """Parts that no scheme has a rule for, beside layers, normalisations and a tied embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.tied, self.head = nn.Embedding(4, 8), nn.Embedding(4, 8), nn.Linear(8, 4)
        self.head.weight = self.tied.weight
        self.more = nn.ModuleList(nn.Embedding(2, 2) for _ in range(6))
        self.rnn = parametrizations.weight_norm(nn.GRU(8, 8), "weight_hh_l0")
        self.attention, self.scale = nn.MultiheadAttention(8, 2), nn.Parameter(torch.ones(3))
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.PReLU()])
        self.pruned = prune.identity(nn.Linear(2, 2), "weight")


def test_what_no_scheme_has_a_rule_for_is_named():
    model = Mixed()
    before = {name: p.clone() for name, p in model.named_parameters()}
    [note] = [note for note in initialize(model).notes if note.startswith("left as they were")]
    assert note == (
        "left as they were, for no scheme has a rule for their parameters: the model (Mixed); embed, more.0, more.1, "
        "more.2, more.3 and 2 more (Embedding); rnn (GRU); attention (MultiheadAttention)"
    )
    left = ("scale", "embed.", "more.", "rnn.", "attention.in_proj", "norms.")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name.startswith(left))
    assert initialize(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))).notes == ()


class Asserts(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch, self.head = Branch(), nn.Linear(4, 2)

    def forward(self, x):
        if x.dim() != 2:
            raise ValueError("two dims are right")
        return self.head(self.branch(x))


def test_why_places_are_not_found_is_said():
    model = Asserts()
    report = initialize(model)
    assert report.unplaced == ("branch.first", "branch.last", "head")
    assert report.notes == (
        "the model's forward does not trace (symbolically traced variables cannot be used as inputs to control flow): "
        "places are read off its structure; gammas= and roles= state others",
    )
    stated = initialize(model, gammas={"branch.first": 2, "branch.last": 1}, roles={"head": {"head": True}})
    assert (stated.unplaced, stated.notes) == ((), ()), "nothing is missing"


@pytest.mark.parametrize("wrong", [{"x": torch.ones(2, 8)}, [torch.ones(2, 8)], (torch.ones(2, 8), "x")])
def test_a_sample_of_another_kind_is_named(wrong):
    with pytest.raises(TypeError, match=r"sample: expected a batch .*, got (dict|list|str)$"):
        initialize(OnAVector(), "salimans2016", sample=wrong)
