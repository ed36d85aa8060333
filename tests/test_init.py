"""Initialisation: the roles found on models of many kinds, the schemes, the report."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wnfused
from wnfused import WNConv2d, WNLinear
from wnfused.init import find_roles, initialize, initialize_population, schemes


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: initialize(WNLinear(2, 2), "glorot"), ValueError, "scheme: unknown 'glorot'; use one of 'arpit2019'"),
        (
            lambda: initialize(WNLinear(2, 2), "arpit2019", w=1),
            TypeError,
            "w: no option of scheme 'arpit2019'; it takes v",
        ),
        (lambda: initialize(WNLinear(2, 2), v="uniform"), ValueError, "v: unknown 'uniform'; use 'orthogonal' or 'he'"),
        (lambda: initialize(3), TypeError, "model: expected an nn.Module, got int"),
        (
            lambda: initialize_population([nn.Linear(2, 2), 3]),
            TypeError,
            r"models\[1\]: expected an nn.Module, got int",
        ),
        (lambda: initialize(WNLinear(2, 2), gammas={"x": 1.0}), ValueError, "gammas: the model has no layer 'x'"),
        (lambda: initialize(WNLinear(2, 2), gammas={"x": 1, 0: 2}), ValueError, "gammas: the model has no layer 'x'"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --------------------------------------------------------------------------------------------------------- roles


class FunctionalBlock(nn.Module):
    """A residual block as many people write it: functional ReLU, sum by ``+``, ReLU after the sum."""

    def __init__(self, c_in, c_out, stride=1, after=False):
        super().__init__()
        self.first, self.second = WNConv2d(c_in, c_out, 3, stride, 1), WNConv2d(c_out, c_out, 3, 1, 1)
        self.skip = WNConv2d(c_in, c_out, 1, stride) if c_in != c_out or stride != 1 else None
        self.norm, self.after = nn.BatchNorm2d(c_out), after

    def forward(self, x):
        y = self.second(F.relu(self.norm(self.first(x))))
        y = y + (x if self.skip is None else self.skip(x))
        return F.relu(y) if self.after else y


def gammas(model):
    return {role.name: round(role.gamma, 4) for role in find_roles(model)}


class UntraceableSequence(nn.Sequential):
    def forward(self, x):
        return super().forward(x) if x.sum() < 1e9 else x


@pytest.mark.parametrize("sequence", [nn.Sequential, UntraceableSequence])
def test_roles_in_a_sequential(sequence):
    model = sequence(
        WNLinear(4, 8), nn.ReLU(), WNLinear(8, 8, activation="relu"), WNLinear(8, 8), nn.LeakyReLU(1.0),
        WNLinear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.ReLU(), WNLinear(8, 2),
    )  # fmt: skip
    assert gammas(model) == {"0": 2, "2": 2, "3": 1, "5": 2, "9": 1}


class Functional(nn.Module):
    """A layer, then an activation as a function or a method, then a head."""

    def __init__(self, activation):
        super().__init__()
        self.layer, self.head, self.activation = WNLinear(4, 4), WNLinear(4, 2), activation

    def forward(self, x):
        return self.head(self.activation(self.layer(x)))


def assert_before(model, gamma, name):
    first = find_roles(model)[0]
    assert (first.activation_gamma, first.without_gamma) == (gamma, name)
    report = initialize(model)
    assert report.entries[0].gamma == gamma
    assert any("no gamma" in note for note in report.notes) == bool(name)
    assert (name or "before an activation") in report.entries[0].role


@pytest.mark.parametrize("sequence", [nn.Sequential, UntraceableSequence])
@pytest.mark.parametrize(
    ("activation", "gamma", "name"),
    [
        (nn.ReLU6(), 2, ""),
        (nn.GELU(), 1, "GELU"),
        (nn.SiLU(), 1, "SiLU"),
        (nn.Tanh(), 1, "Tanh"),
        (nn.PReLU(), 1, "PReLU"),
        (nn.Threshold(0, 0), 2, ""),
        (nn.Threshold(0.5, 0), 1, "Threshold"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_activations_that_are_modules(sequence, activation, gamma, name):
    assert_before(sequence(WNLinear(4, 4), activation, WNLinear(4, 2)), gamma, name)


@pytest.mark.parametrize(
    ("activation", "gamma", "name"),
    [
        (F.relu6, 2, ""), (F.gelu, 1, "GELU"), (F.silu, 1, "SiLU"), (F.logsigmoid, 1, "LogSigmoid"), (F.elu_, 1, "ELU"),
        (torch.tanh, 1, "Tanh"), (torch.sin, 1, "sin"), (lambda x: x.sigmoid(), 1, "Sigmoid"),
        (lambda x: F.gelu(F.dropout(x)), 1, "GELU"), (lambda x: x.clamp(min=0), 2, ""),
        (lambda x: torch.clamp_min(x, 0.0), 2, ""), (lambda x: torch.clamp(x, 0), 2, ""),
        (lambda x: F.threshold(x, 0, 0.0), 2, ""), (lambda x: F.threshold(x, 1.0, 0.0), 1, "Threshold"),
        (lambda x: torch.threshold(x, threshold=0.0, value=0.0), 2, ""),
        (lambda x: x * torch.sigmoid(x), 1, "its product with its own Sigmoid"),
        (lambda x: x.tanh().mul(x), 1, "its product with its own Tanh"),
        (lambda x: x * torch.tanh(F.softplus(x)), 1, "its product with its own Tanh of Softplus"),
    ],
)  # fmt: skip
def test_activations_that_are_functions(activation, gamma, name):
    assert_before(Functional(activation), gamma, name)


@pytest.mark.parametrize("sequence", [nn.Sequential, UntraceableSequence])
@pytest.mark.parametrize(
    "between",
    [
        nn.Identity(), nn.BatchNorm2d(4), nn.InstanceNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4),
        nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout(), nn.FeatureAlphaDropout(),
        nn.MaxPool2d(2), nn.AvgPool3d(2), nn.AdaptiveMaxPool1d(1), nn.AdaptiveMaxPool3d(1), nn.AdaptiveAvgPool2d(1),
        nn.FractionalMaxPool2d(2, output_size=1), nn.FractionalMaxPool3d(2, output_size=1),
        nn.Upsample(scale_factor=2), nn.UpsamplingNearest2d(scale_factor=2),
        nn.ZeroPad1d(1), nn.ZeroPad2d(1), nn.ConstantPad3d(1, 0.0), nn.ReflectionPad1d(1), nn.ReplicationPad2d(1),
        nn.CircularPad2d(1),
        nn.Flatten(), nn.Unflatten(1, (2, 2)), nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.ChannelShuffle(2),
    ],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_modules_between_a_layer_and_its_activation(between, sequence):
    model = sequence(WNLinear(4, 4), between, nn.Dropout(), nn.ReLU(), WNLinear(4, 2))
    assert_before(model, 2, "")
    assert "0" not in initialize(model).unplaced


CALLS_BETWEEN = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True), "instance_norm": F.instance_norm,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]), "group_norm": lambda x: F.group_norm(x, 2),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "dropout": F.dropout, "dropout1d": F.dropout1d, "dropout2d": F.dropout2d, "dropout3d": F.dropout3d,
    "alpha_dropout": F.alpha_dropout, "feature_alpha_dropout": F.feature_alpha_dropout,
    **{
        f"{name}{rank}d": lambda x, name=f"{name}{rank}d": getattr(F, name)(x, 1)
        for name in ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool") for rank in (1, 2, 3)
    },
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x, 2, 1),
    "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(x, 2, 1),
    "mean": lambda x: x.mean(-1), "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "pad": lambda x: F.pad(x, (1, 1)),
    "flatten": lambda x: x.flatten(1), "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "torch.unflatten": lambda x: torch.unflatten(x, 1, (2, 2)), "view": lambda x: x.view(x.size(0), -1),
    "reshape": lambda x: x.reshape(x.shape[0], -1), "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2), "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "permute": lambda x: x.permute(1, 0), "transpose": lambda x: x.transpose(0, 1),
    "movedim": lambda x: x.movedim(0, 1), "torch.moveaxis": lambda x: torch.moveaxis(x, 0, 1),
    "swapaxes": lambda x: x.swapaxes(0, 1), "swapdims": lambda x: x.swapdims(0, 1),
    "contiguous": lambda x: x.contiguous(), "to": lambda x: x.to(x.dtype), "float": lambda x: x.float(),
    "double": lambda x: x.double(), "half": lambda x: x.half(), "bfloat16": lambda x: x.bfloat16(),
    "mul": lambda x: 2 * x, "truediv": lambda x: x / 2, "div": lambda x: x.div(2.0), "div_": lambda x: x.div_(2.0),
    "true_divide": lambda x: torch.true_divide(x, 2.0),
}  # fmt: skip


@pytest.mark.parametrize("between", CALLS_BETWEEN.values(), ids=CALLS_BETWEEN)
def test_calls_between_a_layer_and_its_activation(between):
    assert_before(Functional(lambda x: F.relu(F.dropout(between(x)))), 2, "")


@pytest.mark.parametrize(
    "other", [lambda x: 2 / x, lambda x: x / x, lambda x: x / x.size(0), lambda x: F.lp_pool1d(x, 2.0, 2)]
)
def test_other_calls_between_are_not_seen_through(other):
    assert gammas(Functional(lambda x: F.relu(other(x))))["layer"] == 1


class Styled(Functional):
    """Its layer computes the weight of a norm of something else."""

    def forward(self, x, style):
        return self.head(F.relu(F.layer_norm(x, (4,), weight=self.layer(style))))


def test_the_weight_of_a_norm_does_not_pass_through_it():
    assert gammas(Styled(None))["layer"] == 1


@pytest.mark.parametrize("end", [[nn.Dropout()], [nn.BatchNorm1d(4), nn.Identity()]])
def test_what_follows_outside_of_a_sequence_is_not_known_without_a_trace(end):
    model = EitherWay(body=nn.Sequential(WNLinear(4, 4), nn.ReLU(), WNLinear(4, 4), *end), after=nn.ReLU())
    report = initialize(model)
    assert report.unplaced == ("body.2",)
    assert "not placed" in str(report)


@pytest.mark.parametrize(
    "clamp", [lambda x: x.clamp(0, 1), lambda x: x.clamp(max=0), lambda x: x.clamp_min(1), lambda x: x.clamp(min=x)]
)
def test_other_clamps_are_no_relu(clamp):
    assert gammas(Functional(clamp))["layer"] == 1


@pytest.mark.parametrize(
    "other", [lambda x: x * x, lambda x: x * (2 * x.sigmoid()), lambda x: x * x.sigmoid() + x, lambda x: x * x.relu()]
)
def test_other_products_are_no_activation(other):
    assert find_roles(Functional(other))[0].without_gamma == ""


def test_a_layer_before_an_activation_without_gamma_is_named_once():
    model = nn.Sequential(*(part for _ in range(7) for part in (WNLinear(4, 4), nn.GELU())), WNLinear(4, 4), nn.Tanh())
    report = initialize(model)
    [note] = report.notes
    assert note == (
        "before an activation for which the paper gives no gamma, taken as 1: 0, 2, 4, 6, 8 and 2 more; state one with "
        "gammas={'0': ...}, which is 2 for a ReLU"
    )
    assert report.entries[0].role == "before GELU, for which there is no gamma"
    assert report.entries[-1].role == "head"
    stated = initialize(model, gammas={str(i): 2.0 for i in range(0, 14, 2)})
    assert stated.entries[0].role == "before GELU; gamma as stated"
    assert not stated.notes
    assert not initialize(model, "he").notes
    assert not initialize(model, roles={str(i): {"activation_gamma": 1.5} for i in range(0, 14, 2)}).notes


def test_uses_that_differ_have_no_activation_in_common():
    model = Functional(lambda x: torch.maximum(x, torch.sigmoid(x)))
    assert find_roles(model)[0].without_gamma == ""


@pytest.mark.parametrize("after", [False, True])
def test_roles_in_a_users_residual_network(after):
    model = nn.Sequential(
        WNConv2d(3, 4, 3, padding=1),
        FunctionalBlock(4, 4, after=after), FunctionalBlock(4, 4, after=after), FunctionalBlock(4, 4, after=after),
        FunctionalBlock(4, 8, 2, after=after), FunctionalBlock(8, 8, after=after),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), WNLinear(8, 2),
    )  # fmt: skip
    found = {role.name: role for role in find_roles(model)}
    assert {n: (r.block, r.num_blocks) for n, r in found.items() if r.closes_branch} == {
        "1.second": (1, 3), "2.second": (2, 3), "3.second": (3, 3), "4.second": (1, 2), "5.second": (2, 2),
    }  # fmt: skip
    values = gammas(model)
    assert values["0"] == 1
    assert values["8"] == 1
    assert values["4.skip"] == 1
    assert {values[f"{i}.first"] for i in range(1, 6)} == {2}
    assert {values[f"{i}.second"] for i in (1, 2, 3)} == {round(1 / 3, 4)}
    assert {values[f"{i}.second"] for i in (4, 5)} == {0.5}
    assert all(role.placed for role in found.values())


def test_roles_in_a_stacked_and_an_unstacked_model_agree():
    stacked, unstacked = (wnfused.models.wrn(22, 2, stack=stack) for stack in (True, False))
    for model in (stacked, unstacked):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        initialize(model)
    for stage, blocks in zip(stacked.stages, unstacked.stages, strict=True):
        for block, view in zip(list(blocks)[1:], stage.blocks(), strict=True):
            torch.testing.assert_close(block.conv1.weight_g.flatten(), view.weight_g[0])
            torch.testing.assert_close(block.conv2.weight_g.flatten(), view.weight_g[1])
        torch.testing.assert_close(blocks[0].shortcut.weight_g, stage.transition.shortcut.weight_g)


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(WNLinear(4, 4), nn.ReLU())
        self.block = wnfused.WNResidualBlock(4, 4, num_blocks=5)
        self.tail = WNLinear(4, 2)

    def forward(self, x):
        return self.tail(self.body(x)) if x.sum() > 0 else x


def test_a_model_that_does_not_trace_is_read_by_its_structure():
    report = initialize(Untraceable())
    values = {entry.layer: entry.gamma for entry in report}
    assert values == {"body.0": 2, "block.conv1": 2, "block.conv2": 0.2, "tail": 1}
    assert report.unplaced == ("tail",)
    assert "not placed" in str(report)
    stated = initialize(Untraceable(), gammas={"tail": 2.0})
    assert stated.unplaced == ()
    assert {entry.layer: entry.gamma for entry in stated}["tail"] == 2


class EitherWay(nn.Module):
    """A model that no trace goes through, made of parts."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_list_with_a_place_left_empty():
    model = EitherWay(
        layers=nn.ModuleList([nn.ModuleList([WNLinear(4, 4), None]), None, wnfused.WNResidualBlock(4, 4)])
    )
    assert gammas(model) == {"layers.0.0": 1, "layers.2.conv1": 2, "layers.2.conv2": 1}


def test_an_activation_that_layers_share_comes_after_each():
    act = nn.ReLU()
    model = EitherWay(body=nn.Sequential(WNLinear(4, 4), act, WNLinear(4, 4), act, WNLinear(4, 4)))
    assert gammas(model) == {"body.0": 2, "body.2": 2, "body.4": 1}


def test_a_layer_that_sequences_share_has_one_role():
    layer = WNLinear(4, 4)
    model = EitherWay(first=nn.Sequential(layer, nn.ReLU()), second=nn.Sequential(layer, nn.ReLU(), layer, nn.Tanh()))
    assert gammas(model) == {"first.0": 2}


# ------------------------------------------------------------------------------------------------------- schemes


@pytest.mark.parametrize("scheme", schemes())
@pytest.mark.parametrize("norm", ["weight", "batch", "none"])
def test_every_scheme_initialises_every_model(scheme, norm):
    models = (
        (wnfused.models.wrn(16, 2, in_channels=1, norm=norm), (64, 1, 8, 8)),
        (wnfused.models.cnn(3, 8, norm=norm), (64, 3, 8, 8)),
        (wnfused.models.resnet(8, num_classes=100, norm=norm), (64, 3, 8, 8)),
        (wnfused.models.mlp(3, 16, in_features=64, norm=norm), (64, 64)),
    )
    for model, shape in models:
        sample = torch.randn(shape)
        report = initialize(model, scheme, sample=sample, generator=torch.Generator().manual_seed(1))
        first = {name: p.detach().clone() for name, p in model.named_parameters()}
        initialize(model, scheme, sample=sample, generator=torch.Generator().manual_seed(1))
        assert all(torch.equal(first[name], p) for name, p in model.named_parameters())
        assert torch.isfinite(model(sample)).all()
        assert len(report) > 0
        assert report.unplaced == ()


@pytest.mark.parametrize("v", ["orthogonal", "he", "torch"])
def test_torch_default_is_what_torchs_weight_norm_starts_from(v):
    model = wnfused.models.wrn(16, in_channels=1)
    initialize(model, "torch_default", v=v)
    for module in model.modules():
        if isinstance(module, WNConv2d):
            torch.testing.assert_close(module.weight_g.flatten(), module.weight_v.flatten(1).norm(dim=1))
            if v != "torch":
                assert (module.bias == 0).all()
    stage = model.stages[2]
    torch.testing.assert_close(stage.weight_g, stage.weight_v.flatten(3).norm(dim=3))
    bound = 1 / math.sqrt(9 * 64)
    if v == "torch":
        assert stage.weight_v.abs().max() <= bound
        assert abs(stage.weight_v.std() / (bound / math.sqrt(3)) - 1) < 0.02
        assert stage.bias.abs().max() > 0.9 * bound
    if v == "he":
        assert abs(stage.weight_v.std() / math.sqrt(2 / (9 * 64)) - 1) < 0.02


def test_signals_keep_their_norm_through_depth():
    """Theorem 1 in networks: ``E ||h||^2`` after 30 layers is that of the input.

    With ``2 relu(z)^2 = z^2 + z |z|`` and ``sum z^2`` kept, a layer's ratio has variance ``E z^4 / width = 3 / width``,
    a network's ``(1 + 3 / width)^depth - 1``.
    """
    depth, width, networks = 30, 96, 16
    ratios = []
    for seed in range(networks):
        x = torch.randn(1, width)
        model = wnfused.models.mlp(depth, width, in_features=width)
        initialize(model, generator=torch.Generator().manual_seed(seed))
        ratios.append((model.layers(x).norm() / x.norm()).square())
        if seed == 0:
            initialize(model, "torch_default")
            assert model.layers(x).norm() < 1e-3 * x.norm()
    assert abs(torch.stack(ratios).mean() - 1) < 4 * math.sqrt(((1 + 3 / width) ** depth - 1) / networks)


def test_the_report_prints_a_table():
    text = str(initialize(wnfused.models.wrn(16, stack=False)))
    assert "last of branch, block 1 of 2" in text
    assert "not weight-normalised" in text
    assert text.startswith("init scheme arpit2019")


# -------------------------------------------------------------------------------------------------- what is stated


def test_a_stated_gamma_goes_before_what_is_found():
    model = nn.Sequential(WNLinear(4, 4, gamma=1.5), nn.ReLU(), WNLinear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    report = initialize(model)
    assert [entry.gamma for entry in report] == [1.5, 2.0, None]
    assert "gamma as stated" in report.entries[0].role
    assert model[0].weight_g.flatten().tolist() == pytest.approx([math.sqrt(1.5)] * 4)
    assert initialize(model, gammas={"0": 3.0}).entries[0].gamma == 3.0


def test_what_a_block_gives_its_own_layers_is_not_stated():
    """Blocks that were not told how many they are get it from the model; what they were told stays."""
    untold = nn.Sequential(*(wnfused.WNResidualBlock(4, 4) for _ in range(3)))
    initialize(untold)
    assert untold[1].conv2.weight_g.flatten().tolist() == pytest.approx([math.sqrt(1 / 3)] * 4)
    told = nn.Sequential(wnfused.WNResidualBlock(4, 4, num_blocks=8))
    initialize(told)
    assert told[0].conv2.weight_g.flatten().tolist() == pytest.approx([math.sqrt(1 / 8)] * 4)


def test_factors_of_stacked_blocks_can_be_stated():
    model = wnfused.models.wrn(16)
    initialize(model, gammas={"stages.0.weight_v[:, 1]": 0.25, "stages.1.transition.conv2": 4.0})
    assert (model.stages[0].weight_g[:, 1] == 0.5).all()
    assert (model.stages[1].transition.conv2.weight_g == 2.0).all()


def test_roles_stated_by_hand():
    model = Untraceable()
    roles = {"tail": {"closes_branch": True, "num_blocks": 4, "block": 2}}
    assert initialize(model, "arpit2019", roles=roles).unplaced == ()
    assert model.tail.weight_g.flatten().tolist() == pytest.approx([math.sqrt(4 / 2 / 4)] * 2)
    initialize(model, "hanin2018", roles=roles)
    assert model.tail.weight_g.flatten().tolist() == pytest.approx([0.81] * 2)
    with pytest.raises(ValueError, match="roles: 'colour' for 'tail' is none of activation_gamma"):
        initialize(model, roles={"tail": {"colour": 1}})
    with pytest.raises(ValueError, match="roles: the model has no layer 'x'; it has "):
        initialize(model, roles={"x": {}})


def test_heads_are_found():
    def heads(model):
        return [role.name for role in find_roles(model) if role.head]

    assert heads(wnfused.models.wrn(16)) == ["head"]
    assert heads(wnfused.models.mlp(2, 4, norm="batch")) == ["head"]
    assert heads(Untraceable()) == ["tail"]
    assert heads(nn.Sequential(WNLinear(2, 2), nn.ReLU())) == []
    assert heads(wnfused.models.wrn(16).stages) == []
    assert heads(ShapedBySize()) == ["head"]


class ShapedBySize(nn.Module):
    """Its output asks another layer's for a size alone."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = WNLinear(4, 4), WNLinear(4, 2)

    def forward(self, x):
        h = self.layer(x)
        return self.head(h).view(h.size(0), -1)


def test_branches_are_numbered():
    stacked, separate = (wnfused.models.wrn(22, norm="weight", stack=stack) for stack in (True, False))
    found = {role.name: role for role in find_roles(separate)}
    assert [found[f"stages.{k}.{b}.conv2"].branch for k in range(3) for b in range(3)] == list(range(1, 10))
    assert {role.branch_layers for role in found.values() if role.branch} == {2}
    assert [role.branch for role in find_roles(stacked) if role.branch] == [1, 4, 7]
    parts = {part.name: part for part in next(r for r in find_roles(stacked) if r.branch == 4).parts()}
    assert parts["stages.1.weight_v[:, 1]"].branch == 5
    assert parts["stages.1.transition.conv2"].branch == 4
    assert parts["stages.1.transition.shortcut"].branch == 0


def test_a_long_report_prints_its_ends():
    report = initialize(wnfused.models.wrn(400, norm="none"))
    assert len(report) == 401 - 1
    assert 50 < len(str(report).splitlines()) < 70
    assert "more, which iterating over the report gives" in str(report)


def test_not_inside_frozen():
    model = WNLinear(2, 2)
    with wnfused.frozen(model), pytest.raises(RuntimeError, match=r"model: cannot be written inside wnfused\.frozen"):
        initialize(model)


@pytest.mark.parametrize("dim", [0, 1, 2, None])
def test_rows_along_another_dim_keep_the_size_of_activations(dim):
    """``g^2 = gamma c_in / rows``: all rows together have the norm that the filters would have."""
    torch.manual_seed(0)
    layer = wnfused.WNConv1d(64, 32, 3, dim=dim, padding=1, padding_mode="circular")
    rows = 1 if dim is None else layer.weight_v.shape[dim]
    torch.testing.assert_close(layer.weight_g, torch.full_like(layer.weight_g, math.sqrt(64 / rows)))
    x = torch.randn(16, 64, 50)
    ratio = layer(x).square().mean() / x.square().mean()
    assert ratio.item() == pytest.approx(64 / 32, rel=0.1)
    initialize(nn.Sequential(layer), "arpit2019")
    torch.testing.assert_close(layer.weight_g, torch.full_like(layer.weight_g, math.sqrt(64 / rows)))
    initialize(nn.Sequential(layer), "hanin2018", roles={"0": {"closes_branch": True, "num_blocks": 4, "block": 2}})
    torch.testing.assert_close(layer.weight_g, torch.full_like(layer.weight_g, 0.81 * math.sqrt(32 / rows)))
    assert layer.weight.norm().item() == pytest.approx(0.81 * math.sqrt(32))


@pytest.mark.parametrize("dim", [0, 1, 2, None])
def test_rows_of_a_fading_transposed_layer_keep_its_norm(dim):
    layer = wnfused.WNConvTranspose1d(64, 32, 3, stride=2, groups=2, dim=dim)
    initialize(nn.Sequential(layer), "hanin2018", roles={"0": {"closes_branch": True, "num_blocks": 4, "block": 2}})
    assert layer.weight.norm().item() == pytest.approx(0.81 * math.sqrt(64))


@pytest.mark.parametrize("scheme", ["arpit2019", "hanin2018"])
@pytest.mark.parametrize(
    ("stated", "gamma"), [({"gammas": {"head": 3.0}}, 3.0), ({"roles": {"head": {"activation_gamma": 2.0}}}, 2.0)]
)
def test_what_is_stated_of_a_plain_head_goes_before_torchs_default(scheme, stated, gamma):
    model = wnfused.models.wrn(10)
    report = initialize(model, scheme, **stated)
    norms = model.head.weight.norm(dim=1)
    torch.testing.assert_close(norms, torch.full_like(norms, math.sqrt(gamma * 64 / 10)))
    assert next(entry.gamma for entry in report if entry.layer == "head") == gamma
    initialize(model, scheme)
    assert (model.head.weight.norm(dim=1) < 1).all()
