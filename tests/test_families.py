"""Models as other people write them: converted by one line, trained beside torch's weight norm, folded, exported."""

import copy

import pytest
import torch
from families import FAMILIES, SignedDistance, eikonal
from torch import nn
from torch.nn.utils import parametrizations

import wnfused
from wnfused.nn import WeightNormalised

pytestmark = pytest.mark.usefixtures("one_thread")

NORMS = {"old": nn.utils.weight_norm, "new": parametrizations.weight_norm}


def built(name, form):
    torch.manual_seed(11)
    return FAMILIES[name].build(NORMS[form])


def sample(name):
    return torch.randn(FAMILIES[name].shape, generator=torch.Generator().manual_seed(12))


def relative(found, expected):
    return float((found - expected).detach().norm() / expected.detach().norm())


def parameters(model):
    return list(wnfused.state_dict_to_torch(model, "old").values())


@pytest.mark.parametrize("form", NORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_one_line_in_and_one_line_out(name, form):
    theirs, x = built(name, form), sample(name)
    ours = wnfused.convert(built(name, form))
    left = [m for m in ours.modules() if m._forward_pre_hooks or nn.utils.parametrize.is_parametrized(m)]
    assert not left
    assert any(isinstance(m, WeightNormalised) for m in ours.modules())
    assert relative(ours(x), theirs(x)) < 1e-5
    assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in theirs.parameters()]

    loaded = wnfused.convert(built(name, form))
    loaded.load_state_dict(theirs.state_dict(), strict=True)
    assert relative(loaded(x), theirs(x)) < 1e-5

    folded = wnfused.fold(copy.deepcopy(ours))
    assert not any(type(m).__module__.startswith("wnfused") for m in folded.modules())
    assert relative(folded(x), theirs(x)) < 1e-5
    back = wnfused.convert(copy.deepcopy(folded), plain=True)
    assert relative(back(x), theirs(x)) < 1e-5
    assert list(folded.state_dict()) == list(FAMILIES[name].build(lambda layer, **_: layer).state_dict())


@pytest.mark.parametrize("name", FAMILIES)
def test_twenty_steps_follow_torchs_weight_norm(name):
    """Adam divides by the gradient's size, so its steps would show what is wrong with a small one too."""
    theirs, ours, x = built(name, "new"), wnfused.convert(built(name, "new")), sample(name)
    begin = [p.clone() for p in parameters(theirs)]
    for model in (theirs, ours):
        # eps keeps gradients that are rounding alone from being divided by themselves.
        optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3, eps=1e-4)
        for _ in range(20):
            optimiser.zero_grad()
            FAMILIES[name].loss(model, x).backward()
            optimiser.step()
    moved = [relative(p, b) for p, b in zip(parameters(theirs), begin, strict=True) if b.norm() > 0]
    assert max(moved) > 1e-2
    for found, expected in zip(parameters(ours), parameters(theirs), strict=True):
        assert relative(found, expected) < 1e-4
    assert relative(ours(x), theirs(x)) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_exports_are_equal(name):
    model, x = wnfused.convert(built(name, "old")), sample(name)
    expected = model(x)
    if name in ("vocoder", "distillation"):  # as it is; the others folded
        assert relative(torch.export.export(model, (x,)).module()(x), expected) < 1e-5
    wnfused.fold(model)
    program = torch.export.export(model, (x,))
    assert not any("wnfused" in str(node.target) for node in program.graph.nodes)
    assert relative(program.module()(x), expected) < 1e-5


@pytest.mark.parametrize("name", ["positional", "distillation"])
def test_compiled_in_one_graph_with_a_dynamic_batch(name):
    torch._dynamo.reset()
    model = wnfused.convert(built(name, "new"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    learnt = [p for p in model.parameters() if p.requires_grad]
    for x in (sample(name), torch.cat([sample(name)] * 2)):
        torch._dynamo.mark_dynamic(x, 0)
        y, expected = compiled(x), model(x)
        assert relative(y, expected) < 1e-5
        for found, wanted in zip(
            torch.autograd.grad(y.square().sum(), learnt), torch.autograd.grad(expected.square().sum(), learnt),
            strict=True,
        ):  # fmt: skip
            assert (found - wanted).norm() < 1e-4 * max(wanted.norm(), 1)


def test_the_gain_of_a_distillation_head_stays_at_one():
    head = wnfused.convert(built("distillation", "old"))
    assert not head.last_layer.weight_g.requires_grad
    head(sample("distillation")).sum().backward()
    assert head.last_layer.weight_g.grad is None
    groups = wnfused.param_groups(head, weight_decay=0.04)
    assert not any(p is head.last_layer.weight_g for group in groups for p in group["params"])
    norms = head.last_layer.weight.detach().norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(32))


def test_an_eikonal_loss_has_second_and_third_derivatives():
    """The gradient of the loss by its parameters, checked against finite differences of the loss."""
    torch.manual_seed(2)
    model = wnfused.convert(SignedDistance(nn.utils.weight_norm)).double()
    points = torch.randn(4, 3, dtype=torch.float64)
    layer = model.layers[2]

    def loss(v, g):
        return torch.func.functional_call(
            Loss(model, points), {"model.layers.2.weight_v": v, "model.layers.2.weight_g": g}, ()
        )

    tensors = [p.detach().clone().requires_grad_() for p in (layer.weight_v, layer.weight_g)]
    assert torch.autograd.gradcheck(loss, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, tensors, fast_mode=True)


class Loss(nn.Module):
    def __init__(self, model, points):
        super().__init__()
        self.model, self.points = model, points

    def forward(self):
        return eikonal(self.model, self.points)
