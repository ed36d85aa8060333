"""Init schemes that look at residual branches: Fixup, and half scaling of the sums."""

import math

import pytest
import torch
import torch.nn.functional as F
from drawn import generator
from init_weights import effective
from torch import nn
from torch.nn.utils import prune

import wnfused
from wnfused.init import graph, initialize
from wnfused.nn import FixupBlock, PlainResidualBlock, WNResidualBlock


@pytest.mark.parametrize("norm", ["weight", "none"])
def test_zhang_starts_shallow_and_learns_to_be_deep(norm):
    model = wnfused.models.wrn(40, in_channels=1, norm=norm, stack=False)
    report = initialize(model, "zhang2019", generator=generator())
    assert any("no scalar multipliers" in note for note in report.notes)
    branches = 18
    x = torch.randn(8, 1, 8, 8)
    assert (model(x) == 0).all()
    shallow = model.stem(x)
    for stage in model.stages:
        shallow = stage[0].shortcut(shallow)
    torch.testing.assert_close(model.stages(model.stem(x)), shallow)
    for stage in model.stages:
        for block in stage:
            fan_in = block.conv1.weight[0].numel()
            std = math.sqrt(2 / fan_in) * branches**-0.5
            assert abs(effective(block.conv1).std() / std - 1) < 6 / math.sqrt(2 * block.conv1.weight.numel())
            assert (effective(block.conv2) == 0).all()
            if norm == "weight":
                assert (block.conv2.weight_v != 0).any()
    # One step on the head lets gradients into the branches: into the gains, not into the directions.
    with torch.no_grad():
        model.head.weight.normal_()
    F.cross_entropy(model(x), torch.arange(8)).backward()
    last = model.stages[1][2].conv2
    if norm == "weight":
        assert (last.weight_v.grad == 0).all()
        assert (last.weight_g.grad != 0).all()
    else:
        assert (last.weight.grad != 0).any()


def test_zhang_inside_stages_agrees():
    model = wnfused.models.wrn(40, in_channels=1)
    initialize(model, "zhang2019")
    stage = model.stages[2]
    assert (stage.weight_g[:, 1] == 0).all()
    expected = math.sqrt(2) * 18**-0.5
    assert abs(stage.weight_g[:, 0].square().mean().sqrt() / expected - 1) < 0.02
    assert abs(stage.transition.conv1.weight_g.square().mean().sqrt() / expected - 1) < 0.05


@pytest.mark.parametrize("form", ["plain", "blocks", "stage"])
def test_branches_that_something_else_computes_count(form):
    """They are left alone, and run all the same."""
    options = {"norm": "none"} if form == "plain" else {"stack": form == "stage"}
    model = wnfused.models.wrn(22, **options)
    if form == "stage":
        prune.identity(model.stages[0], "weight_v")
    else:
        prune.identity(model.stages[0][1].conv2, "weight" if form == "plain" else "weight_v")
    report = initialize(model, "zhang2019")
    assert {entry.role.rpartition(" times ")[2] for entry in report if " times " in entry.role} == {"9^(-0.5)"}


class Bottleneck(nn.Module):
    """Three layers in the branch: the first two times ``L^(-1/4)``."""

    def __init__(self, c):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 1)

    def forward(self, x):
        return F.relu(x + self.c(F.relu(self.b(F.relu(self.a(x))))))


def test_zhang_counts_the_layers_of_a_branch():
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        *(Bottleneck(32) for _ in range(16)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    )
    initialize(model, "zhang2019", generator=generator())
    assert (model[-1].weight == 0).all()
    assert abs(model[0].weight.std() / math.sqrt(2 / 27) - 1) < 0.1
    for block in model[1:17]:
        assert (block.c.weight == 0).all()
        for conv in (block.a, block.b):
            expected = math.sqrt(2 / conv.weight[0].numel()) * 16**-0.25
            assert abs(conv.weight.std() / expected - 1) < 6 / math.sqrt(2 * conv.weight.numel())


@pytest.mark.parametrize(
    ("roles", "named"),
    [
        ({"1.c": {"closes_branch": False}}, "'1.a' is in a residual branch of 3 layers"),
        ({"0": {"branch": 1, "branch_layers": 2}, "1.c": {"closes_branch": False}}, "'0' is in a residual branch of 2"),
    ],
)
def test_zhang_refuses_branches_that_never_close(roles, named):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Bottleneck(8), FixupBlock(8, 8))
    roles = {**roles, "2.conv2": {"closes_branch": False}}
    with torch.no_grad():
        model[2].scale.zero_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = f"roles: {named}.*no layer closes a branch; state 'closes_branch': True"
    with pytest.raises(ValueError, match=message):
        initialize(model, "zhang2019", roles=roles)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    initialize(model, "zhang2019", roles={**roles, "1.c": {"closes_branch": True}})


def test_the_fixup_block():
    block = FixupBlock(4, 6, 2, num_branches=4)
    x = torch.randn(3, 4, 8, 8)
    torch.testing.assert_close(block(x), torch.relu(block.shortcut(x)))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_()
    shifted = x + block.bias1
    y = torch.relu(F.conv2d(shifted, block.conv1.weight, stride=2, padding=1) + block.bias2) + block.bias3
    y = block.scale * F.conv2d(y, block.conv2.weight, padding=1)
    torch.testing.assert_close(
        block(x), torch.relu(y + F.conv2d(shifted, block.shortcut.weight, stride=2) + block.bias4)
    )
    model = nn.Sequential(nn.Conv2d(4, 6, 3), FixupBlock(6, 6), FixupBlock(6, 6), nn.Flatten(), nn.Linear(6, 2))
    with torch.no_grad():
        model[1].scale.zero_()
    report = initialize(model, "zhang2019", generator=generator())
    assert not report.notes
    assert model[1].scale.item() == 1
    assert {r.name: (r.closes_branch, r.num_blocks, r.block) for r in wnfused.init.find_roles(model) if r.branch} == {
        "1.conv1": (False, 2, 1), "1.conv2": (True, 2, 1), "2.conv1": (False, 2, 2), "2.conv2": (True, 2, 2),
    }  # fmt: skip
    with pytest.raises(ValueError, match="stride: 0 must be an int of at least 1"):
        FixupBlock(2, 2, 0)


@pytest.mark.parametrize("norm", ["weight", "batch", "none"])
def test_half_scaling_changes_the_forward_pass(norm):
    model = wnfused.models.wrn(16, in_channels=1, norm=norm)
    report = initialize(model, "half_scaling", generator=generator())
    blocks = [m for m in model.modules() if hasattr(m, "skip_scale")]
    assert len(blocks) >= 3
    assert all(block.skip_scale == math.sqrt(0.5) for block in blocks)
    assert any("sum times sqrt(1/2)" in entry.role for entry in report)
    if norm == "none":
        h = torch.randn(2, 16, 8, 8)
        block = model.stages[0][1]
        expected = math.sqrt(0.5) * (h + block.conv2(torch.relu(block.conv1(h))))
        torch.testing.assert_close(block(h), expected)
    if norm == "weight":
        h = torch.randn(2, 16, 8, 8)
        expected = h
        for block in model.stages[0].blocks():
            weights = [
                block.weight_v[i] * (block.weight_g[i] / block.weight_v[i].flatten(1).norm(dim=1)).reshape(-1, 1, 1, 1)
                for i in (0, 1)
            ]
            inner = torch.relu(F.conv2d(expected, weights[0], padding=1))
            expected = math.sqrt(0.5) * (expected + F.conv2d(inner, weights[1], padding=1))
        torch.testing.assert_close(model.stages[0](h), expected, rtol=1e-4, atol=1e-4)


def test_other_schemes_put_the_forward_pass_back():
    model = wnfused.models.wrn(16, in_channels=1)
    model.stages[1].skip_scale = 0.9
    blocks = [m for m in model.modules() if hasattr(m, "skip_scale")]
    before = [block.skip_scale for block in blocks]
    for _ in range(2):
        initialize(model, "half_scaling")
    initialize(model, "he")
    assert [block.skip_scale for block in blocks] == before


def test_half_scaling_refuses_what_it_cannot_scale():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Bottleneck(8))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"the residual branch that '1.c' closes has no skip_scale"):
        initialize(model, "half_scaling")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    block = PlainResidualBlock(4, 4)
    initialize(block, "half_scaling")
    assert block.skip_scale == math.sqrt(0.5)


@pytest.mark.parametrize("name", ["weight_v", "bias"])
def test_half_scaling_leaves_the_sums_of_stages_that_it_leaves_alone(name):
    model = nn.Sequential(*(wnfused.WNResidualStage(4, 4, 2) for _ in range(2)), wnfused.WNResidualStage(4, 8, 1))
    prune.identity(model[0], name)
    report = initialize(model, "half_scaling")
    assert any("0.weight_v[:, 0], 0.weight_v[:, 1]" in note for note in report.notes)
    assert [stage.skip_scale for stage in model] == [1.0, math.sqrt(0.5), math.sqrt(0.5)]


def test_half_scaling_scales_the_sums_of_blocks_that_share_a_weight():
    model = nn.Sequential(PlainResidualBlock(4, 4), PlainResidualBlock(4, 4))
    model[1].conv2.weight = model[0].conv2.weight
    initialize(model, "half_scaling")
    assert [block.skip_scale for block in model] == [math.sqrt(0.5)] * 2


class Upsampled(nn.Module):
    """A transposed convolution whose second argument is ``given``, between a layer and a head."""

    def __init__(self, layers, given):
        super().__init__()
        convolution, transposed = layers
        self.stem, self.inner = convolution(3, 8, 3, 1, 1), transposed(8, 8, 3, 1, 1)
        self.up, self.head = transposed(8, 8, 3, 1, 1), convolution(8, 3, 1)
        self.given = given

    def forward(self, x):
        h = self.stem(x)
        return self.head(torch.relu(self.up(torch.relu(self.inner(h)), *self.given(x, h))))


BOTH = [(nn.Conv2d, nn.ConvTranspose2d), (wnfused.WNConv2d, wnfused.WNConvTranspose2d)]


@pytest.mark.parametrize("layers", BOTH, ids=["torch", "wnfused"])
@pytest.mark.parametrize("given", [lambda x, h: (x.shape,), lambda x, h: (x.size()[2:],), lambda x, h: ()])
def test_an_output_size_is_no_residual(layers, given):
    model = Upsampled(layers, given)
    roles = {entry.layer: entry.role for entry in initialize(model, "zhang2019")}
    assert roles["up"] == "before an activation"
    assert (model.up.weight != 0).any()


def test_a_residual_by_position_closes_a_branch():
    roles = [
        {entry.layer: entry.role for entry in initialize(Upsampled(BOTH[1], given))}["up"]
        for given in (lambda x, h: (None, h), lambda x, h: (None,))
    ]
    assert roles == ["last of branch, block 1 of 1, before an activation", "before an activation"]


class Guarded(nn.Module):
    """What no trace goes through."""

    def __init__(self, *modules):
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x):
        for part in self.parts:
            x = part(x) if x.sum() < 1e9 else x
        return x


def deep(norm):
    return wnfused.models.wrn(28, in_channels=3, norm=norm, stack=False)


def sequence_of_blocks():
    return nn.Sequential(
        WNResidualBlock(4, 4), nn.Identity(), WNResidualBlock(4, 4), WNResidualBlock(4, 8), WNResidualBlock(8, 8)
    )


@pytest.mark.parametrize("scheme", ["arpit2019", "hanin2018", "zhang2019"])
@pytest.mark.parametrize(
    "build", [lambda: deep("weight"), lambda: deep("none"), lambda: deep("fixup"), sequence_of_blocks]
)
def test_stages_are_counted_without_a_trace_too(build, scheme):
    def branches(model):
        found = initialize(model, scheme, generator=torch.Generator().manual_seed(0))
        return {e.layer.removeprefix("parts.0."): (e.role, e.gain) for e in found if "block" in e.role}

    wanted, found = branches(build()), branches(Guarded(build()))
    assert found.keys() == wanted.keys()
    for name, (role, gain) in wanted.items():
        assert found[name][0] == role
        assert found[name][1] == pytest.approx(gain, rel=0.1)


def test_blocks_that_nothing_holds_together_are_named_without_a_trace():
    model = Guarded(nn.Identity())
    model.first, model.second = WNResidualBlock(4, 4), WNResidualBlock(4, 4)
    assert initialize(model).unplaced == ("first.conv2", "second.conv2")
    del model.second
    assert initialize(model).unplaced == ()


class _Gated(nn.Module):
    def __init__(self, gate_first, drops=False):
        super().__init__()
        self.a, self.b, self.gate, self.head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(3, 4), nn.Linear(4, 2)
        self.gate_first, self.drops = gate_first, drops

    def forward(self, x, c):
        branch, gate = self.b(F.relu(self.a(x))), self.gate(c).unsqueeze(0).squeeze(0)
        product = gate * branch if self.gate_first else branch * gate
        if self.drops and self.training:
            product = product / 0.5 * (torch.rand(len(x), 1) < 0.5)
        return self.head(x + F.dropout(product, 0.1, self.training))


@pytest.mark.parametrize("gate_first", [False, True])
def test_a_branch_is_found_whichever_factor_its_gate_is(gate_first):
    roles = {role.name: role for role in wnfused.init.find_roles(_Gated(gate_first))}
    assert roles["b"].closes_branch
    assert [roles[name].branch for name in ("a", "b", "gate", "head")] == [1, 1, 0, 0]


def test_branches_that_training_drops_are_found_all_the_same():
    """How many samples there are is not known in a trace."""
    model = _Gated(True, drops=True)
    roles = {role.name: role for role in wnfused.init.find_roles(model)}
    assert roles["b"].closes_branch
    assert roles["head"].head
    assert model.training


def test_zhang_leaves_a_layer_alone_that_is_only_the_last_to_be_registered():
    class Untraceable(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.out, self.middle = FixupBlock(4, 4), nn.Conv2d(4, 2, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return self.out(self.middle(self.block(x)) if x.sum() > 0 else x)

    model = Untraceable()
    report = initialize(model, "zhang2019", generator=generator())
    assert (model.middle.weight != 0).any()
    note = "no classification layer was found to be set to 0; if it is middle, the last one, roles={'middle': "
    assert note + "{'head': True}}" in report.notes
    initialize(model, "zhang2019", roles={"out": {"head": True}}, generator=generator())
    assert (model.out.weight == 0).all()


def test_a_sum_of_many_branches_is_looked_at_once(monkeypatch):
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            pairs = ((nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(16))
            self.experts = nn.ModuleList(nn.Sequential(*pair) for pair in pairs)

        def forward(self, x):
            return x + sum(expert(x) for expert in self.experts)

    looked_at = []
    looks = graph._side_by_side
    monkeypatch.setattr(
        graph, "_side_by_side", lambda g, node, summands: looked_at.append(node) or looks(g, node, summands)
    )
    roles = wnfused.init.find_roles(Mixture())
    assert len(looked_at) == 1
    assert [role.closes_branch for role in roles] == [False, True] * 16
    assert {role.num_blocks for role in roles} == {16}
