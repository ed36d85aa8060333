"""``layer.weight``: read with its graph, written in every way, and not to be taken over."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import wnfused
from wnfused import WNConv2d, WNLinear


def write_in_place(w, new):
    w.copy_(new)


def write_by_index(w, new):
    w[:] = new


def write_data(w, new):
    w.data = new


def write_through_data(w, new):
    w.data.copy_(new)


def write_through_view(w, new):
    w.view(-1)[:] = new.reshape(-1)


def write_row_by_row(w, new):
    for i in range(len(new)):
        w[i] = new[i]


def write_out(w, new):
    torch.add(new, 0, out=w.data)


def write_out_of_a_function_that_only_reads(w, new):
    torch.mul(new, 1, out=w)


@pytest.mark.parametrize(
    "write",
    [
        write_in_place, write_by_index, write_data, write_through_data, write_through_view, write_row_by_row, write_out,
        write_out_of_a_function_that_only_reads,
    ],
)  # fmt: skip
def test_writes_to_weight_reach_the_layer(write):
    layer, new = WNConv2d(3, 4, 3), torch.randn(4, 3, 3, 3)
    with torch.no_grad():
        write(layer.weight, new)
    torch.testing.assert_close(layer.weight.detach(), new)
    torch.testing.assert_close(layer.weight_v.detach(), new)
    torch.testing.assert_close(layer.weight_g.detach().flatten(), new.flatten(1).norm(dim=1))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize(
    "fill",
    [
        lambda w: nn.init.constant_(w, 2.0), nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_,
        nn.init.kaiming_normal_, nn.init.xavier_uniform_, nn.init.orthogonal_, nn.init.trunc_normal_,
        lambda w: torch._foreach_mul_([w], 3.0), lambda w: torch.ops.aten.fill_.Scalar(w, 3.0),
        lambda w: F.relu(w, inplace=True),
    ],
)  # fmt: skip
def test_every_way_to_write_reaches_the_layer(fill, through_data, guard):
    layer = WNLinear(6, 5)
    before = layer.weight.detach().clone()
    with guard():
        weight = layer.weight.data if through_data else layer.weight
        fill(weight)
    torch.testing.assert_close(layer.weight.detach(), weight.detach().as_subclass(torch.Tensor))
    assert not torch.allclose(layer.weight.detach(), before)


def test_assignment_init_functions_and_augmented_assignment():
    layer, new = WNLinear(3, 3), torch.randn(3, 3)
    layer.weight = nn.Parameter(new)
    torch.testing.assert_close(layer.weight.detach(), new)
    assert set(dict(layer.named_parameters())) == {"weight_v", "weight_g", "bias"}
    nn.init.eye_(layer.weight)
    torch.testing.assert_close(layer.weight.detach(), torch.eye(3))
    nn.init.orthogonal_(layer.weight, gain=2.0)
    torch.testing.assert_close(layer.weight.detach().norm(dim=1), torch.full((3,), 2.0))
    nn.init.kaiming_normal_(layer.weight)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight *= 2
    torch.testing.assert_close(layer.weight.detach(), 2 * before)
    layer.weight.requires_grad_(False)
    assert not layer.weight_v.requires_grad
    assert not layer.weight_g.requires_grad


def test_reading_weight_is_differentiable_and_plain_afterwards():
    layer = WNLinear(3, 2)
    penalty = layer.weight.square().sum()
    assert type(penalty) is torch.Tensor
    penalty.backward()
    torch.testing.assert_close(layer.weight_g.grad, 2 * layer.weight_g.detach())
    assert type(copy.deepcopy(layer.weight)) is torch.Tensor
    assert type(pickle.loads(pickle.dumps(layer.weight.detach()))) is torch.Tensor


def test_a_hook_sees_the_gradient_of_its_own_reading():
    layer, seen = WNLinear(3, 2), []
    held = layer.weight
    held.register_hook(seen.append)
    layer.weight.square().sum().backward()
    layer(torch.randn(4, 3)).sum().backward()
    assert not seen
    held.square().sum().backward()
    torch.testing.assert_close(seen, [2 * held.detach()])


def test_weight_of_a_wrong_shape_or_type_is_refused():
    layer = WNLinear(3, 2)
    with pytest.raises(ValueError, match=r"weight: shape \[2, 2\] does not fit; use \[2, 3\]"):
        layer.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(TypeError, match="weight: expected a Tensor"):
        layer.weight = 3


@pytest.mark.parametrize(
    ("who", "apply"),
    [
        ("pruned", lambda layer: prune.l1_unstructured(layer, "weight", 0.5)),
        ("pruned", lambda layer: prune.identity(layer, "weight")),
        ("parametrized", lambda layer: parametrizations.weight_norm(layer)),
        ("parametrized", lambda layer: parametrizations.spectral_norm(layer)),
        ("parametrized", lambda layer: parametrizations.orthogonal(layer)),
        ("parametrized", lambda layer: parametrize.register_parametrization(layer, "weight", nn.Identity())),
        ("parametrized", lambda layer: parametrize.remove_parametrizations(layer, "weight")),
    ],
)
def test_what_would_take_the_weight_over_is_refused(who, apply):
    layer = WNLinear(3, 3)
    with pytest.raises(RuntimeError, match=rf"^weight: cannot be {who}, .*wnfused\.convert\(model, plain=True\)"):
        apply(layer)
    assert not parametrize.is_parametrized(layer)
    assert torch.isfinite(layer(torch.randn(1, 3))).all()
    assert set(layer.state_dict()) == {"weight_v", "weight_g", "bias"}


def test_who_removes_a_parametrization_is_told_that_there_is_none():
    with pytest.raises(RuntimeError, match=r"nor has it a parametrization to remove: .*wnfused\.fold\(model\)"):
        parametrize.remove_parametrizations(WNLinear(3, 3), "weight")


def test_weight_v_can_be_parametrised():
    class Doubled(nn.Module):
        def forward(self, v):
            return 2 * v

    layer, x = WNLinear(3, 3), torch.randn(2, 3)
    expected = layer(x)
    parametrize.register_parametrization(layer, "weight_v", Doubled())
    assert parametrize.is_parametrized(layer, "weight_v")
    torch.testing.assert_close(layer(x), expected)
    assert type(wnfused.fold(layer)) is type(layer), "left alone"


def test_a_parameter_made_of_the_weight_is_one_of_its_own():
    """The usual way to copy a weight into another layer; there it trains, moves and is saved like any other."""
    source, layer = WNLinear(3, 3), nn.Linear(3, 3)
    layer.weight = nn.Parameter(source.weight.data)
    before = source.weight.detach().clone()
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.requires_grad
    layer(torch.randn(5, 3)).square().sum().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()
    assert not torch.equal(layer.weight, before)
    nn.init.zeros_(layer.weight)
    assert torch.equal(source.weight, before)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin.weight) is nn.Parameter
        assert twin.weight.requires_grad
    assert layer.double()(torch.randn(2, 3, dtype=torch.double)).dtype == torch.double
    nn.Parameter(source.weight.data, requires_grad=False)
    assert source.weight_v.requires_grad
    assert source.weight_g.requires_grad


def test_what_shares_the_weights_memory_has_its_own_requires_grad():
    layer = WNLinear(3, 2)
    leaf = layer.weight.detach().requires_grad_()
    assert torch.equal(torch.autograd.grad((3 * leaf).sum(), leaf)[0], torch.full((2, 3), 3.0))
    layer.weight.requires_grad_(False)
    assert not layer.weight_v.requires_grad
    assert not layer.weight_g.requires_grad


def test_a_tensor_that_expects_a_gradient_is_refused():
    layer, weight = WNLinear(3, 2), torch.randn(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="weight: this tensor would get no gradient"):
        torch.func.functional_call(layer, {"weight": weight}, torch.randn(4, 3))
    x = torch.randn(4, 3)
    found = torch.func.functional_call(layer, {"weight": weight.detach()}, x)
    torch.testing.assert_close(found, F.linear(x, weight, layer.bias))


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize(
    "give",
    [
        lambda layer: nn.init.zeros_(layer.weight),
        lambda layer: layer.load_state_dict({"weight": torch.zeros(4, 8), "bias": torch.zeros(4)}),
        lambda layer: layer.load_state_dict({"weight": torch.zeros(4, 8), "bias": torch.zeros(4)}, assign=True),
    ],
    ids=["written", "loaded", "assigned"],
)
def test_a_weight_of_zeros_trains(dim, give):
    """Zero-initialised layers are common; v = 0 and g = 0 would stay there for ever."""
    layer = WNLinear(8, 4, dim=dim)
    give(layer)
    assert not layer.weight.any()
    x, target = torch.randn(64, 8), torch.randn(64, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert layer.weight.abs().amin(1).all()
    assert losses[-1] < losses[0]


def test_a_row_of_zeros_keeps_the_direction_it_had():
    layer = WNConv2d(3, 4, 3)
    before = layer.weight_v.detach().clone()
    with torch.no_grad():
        layer.weight[2] = 0
    assert torch.equal(layer.weight_v[2], before[2])
    assert layer.weight_g.flatten()[2] == 0
    assert not layer.weight[2].any()


def train(layer, clip, read_again):
    """Ten steps, each followed by a write that changes nothing, to the weight as read before the first or now."""
    held, optimizer = layer.weight, torch.optim.SGD(layer.parameters(), lr=0.05)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    for _ in range(10):
        optimizer.zero_grad()
        (layer(x) - 1).square().mean().backward()
        optimizer.step()
        clip(layer.weight if read_again else held)
    return layer.weight.detach()


@pytest.mark.parametrize(
    "clip",
    [
        lambda w: w.data.clamp_(-10, 10),
        torch.no_grad()(lambda w: w.clamp_(-10, 10)),
        torch.no_grad()(lambda w: w[0].mul_(1)),
        torch.no_grad()(lambda w: torch._foreach_mul_([w], 1.0)),
        torch.no_grad()(lambda w: torch.mul(w, 1, out=w)),
    ],
)
def test_a_write_to_what_was_read_before_a_step_does_not_undo_the_step(clip):
    torch.manual_seed(0)
    layer = WNLinear(5, 5, bias=False)
    alone = copy.deepcopy(layer)
    torch.testing.assert_close(train(layer, clip, False), train(alone, clip, True))


def test_two_readings_of_a_weight_are_written_in_turn():
    layer = WNLinear(4, 3, bias=False)
    before, first, second = layer.weight.detach().clone(), layer.weight, layer.weight.data
    with torch.no_grad():
        first.mul_(2)
        second.add_(1)
        first[0] = 5
    wanted = before * 2 + 1
    wanted[0] = 5
    torch.testing.assert_close(layer.weight.detach(), wanted)


def test_what_was_read_does_not_change_by_itself():
    layer = WNLinear(4, 3)
    held = layer.weight.detach()
    copied, other = held.clone(), torch.zeros(3, 4)
    layer.weight.data.mul_(2)
    assert held.equal(copied)
    other.copy_(held)
    torch.add(held, 1, out=torch.empty(3, 4))
    torch._foreach_copy_([other], [held])
    assert other.equal(copied)
    layer.weight.data.copy_(held)  # put back
    torch.testing.assert_close(layer.weight.detach(), copied)


def test_a_weight_that_a_compiled_function_gave_is_written_to():
    layer = WNLinear(4, 3)
    held = torch.compile(lambda: layer.weight, backend="eager")()
    layer.weight.data.mul_(2)
    with torch.no_grad():
        held.add_(1)
    if isinstance(held, wnfused.nn.EffectiveWeight):
        torch.testing.assert_close(layer.weight.detach(), held.detach())


def test_a_write_that_shows_too_late_is_refused():
    layer = WNLinear(4, 3)
    held = layer.weight.detach()
    layer.weight.data.mul_(2)
    wanted = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"weight: dropout wrote to what was read before .* read layer.weight again"):
        F.dropout(held, inplace=True)
    assert layer.weight.detach().equal(wanted)


def test_writes_by_a_function_of_python_reach_the_layer():
    layer = WNLinear(2, 2, bias=False)
    layer.weight.data.apply_(lambda _: 7.0)
    torch.testing.assert_close(layer.weight.detach(), torch.full((2, 2), 7.0))
    layer.weight.data.map_(torch.ones(2, 2), lambda mine, other: mine + other)
    torch.testing.assert_close(layer.weight.detach(), torch.full((2, 2), 8.0))
    layer.weight.data.map2_(torch.ones(2, 2), torch.ones(2, 2), lambda mine, a, b: mine + a + b)
    torch.testing.assert_close(layer.weight.detach(), torch.full((2, 2), 10.0))


def test_set_is_refused():
    with pytest.raises(RuntimeError, match="weight: set_ cannot reach weight_v and weight_g"):
        WNLinear(2, 2).weight.data.set_(torch.zeros(2, 2))
    parameter = nn.Parameter(WNLinear(2, 2).weight.detach())  # one of its own
    parameter.data.set_(torch.zeros(2, 2))
