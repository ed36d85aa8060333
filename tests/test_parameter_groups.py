"""Weights decay, gains and biases do not."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import wnfused


def model():
    return nn.ModuleDict(
        {
            "conv": wnfused.WNConv2d(3, 4, 3), "stage": wnfused.WNResidualStage(4, 8, 3, 2), "norm": nn.BatchNorm2d(8),
            "old": nn.utils.weight_norm(nn.Linear(8, 4)), "new": parametrizations.weight_norm(nn.Linear(8, 4)),
            "plain": nn.Linear(4, 4), "embed": nn.Embedding(3, 4),
        }
    )  # fmt: skip


def test_gains_biases_and_vectors_are_not_decayed():
    net = model()
    net["plain"].bias.requires_grad_(False)
    net["tied"] = net["plain"]
    groups = wnfused.param_groups(net, weight_decay=0.1, lr=0.5)
    names = {id(p): name for name, p in net.named_parameters()}
    decayed, kept = ([names[id(p)] for p in group["params"]] for group in groups)
    assert decayed == [
        "conv.weight_v", "stage.weight_v", "stage.transition.conv1.weight_v", "stage.transition.conv2.weight_v",
        "stage.transition.shortcut.weight_v", "old.weight_v", "new.parametrizations.weight.original1",
        "plain.weight", "embed.weight",
    ]  # fmt: skip
    assert set(decayed) | set(kept) == {n for n, p in net.named_parameters() if p.requires_grad}
    assert not set(decayed) & set(kept)
    assert [(group["weight_decay"], group["lr"]) for group in groups] == [(0.1, 0.5), (0.0, 0.5)]


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, parametrizations.weight_norm])
def test_gains_of_any_tensor_are_not_decayed(norm):
    recurrent = nn.RNN(3, 4)
    for name in ("weight_hh_l0", "weight_ih_l0"):
        norm(recurrent, name)
    decayed, kept = (sorted(list(p.shape) for p in group["params"]) for group in wnfused.param_groups(recurrent, 0.1))
    assert decayed == [[4, 3], [4, 4]]
    assert kept == [[4], [4], [4, 1], [4, 1]]


def test_a_chain_behind_a_weight_norm_changes_nothing():
    layer = parametrizations.weight_norm(nn.Linear(3, 4))
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    [decayed] = wnfused.param_groups(layer, 0.1)[0]["params"]
    assert decayed is layer.parametrizations.weight.original1


def decayed_and_kept(net):
    names = {id(p): name for name, p in net.named_parameters()}
    return tuple([names[id(p)] for p in group["params"]] for group in wnfused.param_groups(net, 0.1))


def test_normalisations_of_several_dims_are_not_decayed():
    net = nn.ModuleDict(
        {
            "layer": nn.LayerNorm((4, 6, 6)), "rms": nn.RMSNorm((4, 6)), "batch": nn.BatchNorm2d(4),
            "group": nn.GroupNorm(2, 4), "linear": nn.Linear(6, 6, bias=False), "pruned": nn.LayerNorm((4, 6)),
            "parametrised": nn.LayerNorm((4, 6)),
        }
    )  # fmt: skip
    prune.identity(net["pruned"], "weight")
    parametrize.register_parametrization(net["parametrised"], "weight", nn.Softplus())
    assert decayed_and_kept(net)[0] == ["linear.weight"]


def test_gains_and_biases_that_something_else_computes_are_not_decayed():
    net = nn.ModuleDict(
        {
            "pruned": wnfused.WNLinear(3, 4), "parametrised": wnfused.WNConv2d(3, 4, 3),
            "stage": wnfused.WNResidualStage(4, 4, 2), "old": nn.utils.weight_norm(nn.Linear(3, 4)),
            "recurrent": nn.utils.weight_norm(nn.RNN(3, 4, bias=False), "weight_hh_l0"),
            "new": parametrizations.weight_norm(nn.Linear(3, 4)),
        }
    )  # fmt: skip
    prune.identity(net["pruned"], "weight_g")
    prune.identity(net["pruned"], "weight_v")
    parametrize.register_parametrization(net["parametrised"], "weight_g", nn.Softplus())
    parametrize.register_parametrization(net["parametrised"], "weight_v", nn.Identity())
    prune.identity(net["stage"], "bias")
    parametrize.register_parametrization(net["stage"], "weight_g", nn.Softplus())
    prune.identity(net["old"], "weight_g")
    prune.identity(net["recurrent"], "weight_hh_l0_g")
    prune.identity(net["new"].parametrizations.weight, "original0")
    decayed, kept = decayed_and_kept(net)
    assert sorted(decayed) == [
        "new.parametrizations.weight.original1", "old.weight_v", "parametrised.parametrizations.weight_v.original",
        "pruned.weight_v_orig", "recurrent.weight_hh_l0_v", "recurrent.weight_ih_l0", "stage.weight_v",
    ]  # fmt: skip
    assert {
        "pruned.weight_g_orig", "parametrised.parametrizations.weight_g.original", "stage.bias_orig",
        "stage.parametrizations.weight_g.original", "old.weight_g_orig", "recurrent.weight_hh_l0_g_orig",
        "new.parametrizations.weight.original0_orig",
    } <= set(kept)  # fmt: skip


def test_an_optimiser_takes_them():
    layer = wnfused.WNLinear(3, 3)
    layer.bias.data.fill_(1)
    before = {name: p.clone() for name, p in layer.named_parameters()}
    optimiser = torch.optim.SGD(wnfused.param_groups(layer, weight_decay=0.5), lr=1.0)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    torch.testing.assert_close(layer.weight_v, before["weight_v"] / 2)
    for name in ("weight_g", "bias"):
        torch.testing.assert_close(getattr(layer, name), before[name])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, 0.1), TypeError, "model: expected an nn.Module, got int"),
        ((nn.Linear(1, 1), -0.1), ValueError, "weight_decay: -0.1 must be finite and at least 0"),
        ((nn.LazyLinear(1), 0.1), ValueError, "model: 'weight' has no shape yet; run the model once"),
        ((nn.Linear(1, 1), float("nan")), ValueError, "weight_decay: nan must be finite and at least 0"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        wnfused.param_groups(*arguments)


def test_params_are_the_models():
    with pytest.raises(TypeError, match="params: is no option; the parameters are those of the model"):
        wnfused.param_groups(nn.Linear(1, 1), 0.1, params=[1])
