"""Initialisation: Haar matrices, the roles found on models of many kinds, the schemes, the report."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wnfused
from wnfused import WNConv2d, WNLinear
from wnfused.init import find_roles, initialize, orthogonal_batched, schemes

# ---------------------------------------------------------------------------------------------------- orthogonal


@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (5, 5), (3, 2, 6, 4), (2, 3, 4, 9), (0, 4, 4), (2, 1, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_orthogonal_batched_is_orthogonal(shape, dtype):
    q = orthogonal_batched(torch.full(shape, float("nan"), dtype=dtype), gain=3.0)
    gram = (q.mT @ q if shape[-2] >= shape[-1] else q @ q.mT).double()
    expected = 9 * torch.eye(min(shape[-2:]), dtype=torch.float64).expand_as(gram)
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 0.2}[dtype]
    torch.testing.assert_close(gram, expected, rtol=0, atol=tolerance)


def test_orthogonal_batched_fills_what_it_was_given():
    holder = torch.zeros(4, 3, 6).mT
    assert orthogonal_batched(holder) is holder
    torch.testing.assert_close(holder.mT @ holder, torch.eye(3).expand(4, 3, 3), rtol=0, atol=1e-5)
    first = orthogonal_batched(torch.empty(2, 4, 4), generator=torch.Generator().manual_seed(3))
    again = orthogonal_batched(torch.empty(2, 4, 4), generator=torch.Generator().manual_seed(3))
    assert torch.equal(first, again)


def test_orthogonal_batched_is_haar():
    """Of O(3): entries u with u^2 ~ Beta(1/2, 1), so |u| is uniform; determinants +-1 alike; E tr^2 = 1."""
    count = 20_000
    q = orthogonal_batched(torch.empty(count, 3, 3, dtype=torch.float64), generator=torch.Generator().manual_seed(1))
    for row in range(3):
        for column in range(3):
            ordered = q[:, row, column].abs().sort().values
            uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
            # Kolmogorov-Smirnov at one in a million: sqrt(ln(2e6) / (2 n)).
            assert (ordered - uniform).abs().max() < math.sqrt(math.log(2e6) / (2 * count))
            assert abs(q[:, row, column].mean()) < 5 / math.sqrt(3 * count)
    assert abs((torch.linalg.det(q) > 0).double().mean() - 0.5) < 5 * 0.5 / math.sqrt(count)
    trace = q.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert abs(trace.square().mean() - 1) < 0.1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: orthogonal_batched(torch.empty(3)), ValueError, r"tensor: shape \[3\] must have at least two dims"),
        (lambda: orthogonal_batched(torch.empty(3, 3).long()), TypeError, "tensor: expected a floating-point"),
        (lambda: orthogonal_batched(torch.empty(3, 3), gain=float("inf")), ValueError, "gain: inf must be finite"),
        (lambda: initialize(WNLinear(2, 2), "glorot"), ValueError, "scheme: unknown 'glorot'; use one of 'arpit2019'"),
        (
            lambda: initialize(WNLinear(2, 2), "arpit2019", w=1),
            TypeError,
            "w: no option of scheme 'arpit2019'; it takes v",
        ),
        (lambda: initialize(WNLinear(2, 2), v="uniform"), ValueError, "v: unknown 'uniform'; use 'orthogonal' or 'he'"),
        (lambda: initialize(3), TypeError, "model: expected an nn.Module, got int"),
        (lambda: initialize(WNLinear(2, 2), gammas={"x": 1.0}), ValueError, "gammas: the model has no layer 'x'"),
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


def test_roles_in_a_sequential():
    model = nn.Sequential(
        WNLinear(4, 8), nn.ReLU(), WNLinear(8, 8, activation="relu"), WNLinear(8, 8), nn.LeakyReLU(1.0),
        WNLinear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.ReLU(), WNLinear(8, 2),
    )  # fmt: skip
    assert gammas(model) == {"0": 2, "2": 2, "3": 1, "5": 2, "9": 1}


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


# ------------------------------------------------------------------------------------------------------- schemes


@pytest.mark.parametrize("scheme", schemes())
@pytest.mark.parametrize("norm", ["weight", "batch", "none"])
def test_every_scheme_initialises_every_model(scheme, norm):
    models = (
        (wnfused.models.wrn(16, 2, in_channels=1, norm=norm), (64, 1, 8, 8)),
        (wnfused.models.cnn(3, 8, norm=norm), (64, 3, 8, 8)),
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
    """Theorem 1 in a network: ``E ||h||^2`` after 100 layers is that of the input, and each half alone is not."""
    torch.manual_seed(3)
    x = torch.randn(64, 256)
    model = wnfused.models.mlp(100, 256, in_features=256)
    ratio = (model.layers(x).norm(dim=1) / x.norm(dim=1)).mean()
    assert 0.5 < ratio < 2
    initialize(model, "torch_default")
    assert model.layers(x).norm(dim=1).mean() < 1e-6


def test_the_report_prints_a_table():
    text = str(initialize(wnfused.models.wrn(16, stack=False)))
    assert "last of branch, block 1 of 2" in text
    assert "not weight-normalised" in text
    assert text.startswith("init scheme arpit2019")
