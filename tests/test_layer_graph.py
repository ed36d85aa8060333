"""Layers inside losses on their own derivatives: eikonal ones, differential equations, products with the Hessian."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_direct import nodes, tensors  # noqa: F401  nodes runs every test by each kind of node
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import wnfused
from wnfused import dispatch
from wnfused.ops import _nodes

pytestmark = pytest.mark.skipif(not dispatch.prefers_native(), reason="the C++ kernels are not what runs here")

F = wnfused.functional


def layer(function, x, v, g, bias, residual, **options):
    return function(x, v, g, bias, residual=residual, **options)


ROWS = (5, 3), (4, 3), (4, 1), (4,), (5, 4)
COLUMNS = (5, 3), (4, 3), (1, 3), (4,), (5, 4)
# What runs it, the dim of its norms, and the shapes of x, v, g, bias and residual.
LAYERS = {
    "rows": (partial(layer, F.linear), 0, ROWS),
    "flat gains": (partial(layer, F.linear), 0, ((5, 3), (4, 3), (4,), (4,), (5, 4))),
    "samples of samples": (partial(layer, F.linear), 0, ((2, 5, 3), (4, 3), (4, 1), (4,), (2, 5, 4))),
    "one sample": (partial(layer, F.linear), 0, ((3,), (4, 3), (4, 1), (4,), (4,))),
    "columns": (partial(layer, F.linear, dim=1), 1, COLUMNS),
    "whole": (partial(layer, F.linear, dim=None), None, ((5, 3), (4, 3), (), (4,), (5, 4))),
    "rows, ReLU": (partial(layer, F.linear, activation="relu"), 0, ROWS),
    "columns, leaky ReLU": (partial(layer, F.linear, dim=1, activation="leaky_relu"), 1, COLUMNS),
    "conv1d": (
        partial(layer, F.conv1d, padding=1, activation="leaky_relu", negative_slope=0.3), 0,
        ((2, 3, 7), (4, 3, 3), (4, 1, 1), (4,), (2, 4, 7)),
    ),
    "conv2d, groups": (
        partial(layer, F.conv2d, stride=2, padding=1, groups=2), 0,
        ((2, 4, 5, 6), (6, 2, 3, 3), (6, 1, 1, 1), (6,), (2, 6, 3, 3)),
    ),
    "conv3d": (
        partial(layer, F.conv3d, dilation=2, padding=2, activation="relu"), 0,
        ((1, 2, 5, 5, 5), (3, 2, 3, 3, 3), (3, 1, 1, 1, 1), (3,), (1, 3, 5, 5, 5)),
    ),
    "conv_transpose2d": (
        partial(layer, F.conv_transpose2d, stride=2, padding=1, activation="relu"), 0,
        ((2, 4, 3, 3), (4, 3, 4, 4), (4, 1, 1, 1), (3,), (2, 3, 6, 6)),
    ),
}  # fmt: skip
each_layer = pytest.mark.parametrize("name", LAYERS)


@pytest.fixture
def in_python(monkeypatch):
    """A list with an entry for each gradient with a graph that Python composes."""
    entries = []
    with_graph = _nodes.Gradients.with_graph
    monkeypatch.setattr(_nodes.Gradients, "with_graph", lambda *a: entries.append(1) or with_graph(*a))
    return entries


def drawn(name, dtype, zero_row=False):
    torch.manual_seed(3)
    run, dim, shapes = LAYERS[name]
    x, v, g, bias, residual = (t.detach().to(dtype) for t in tensors(*shapes))
    if zero_row:
        v.select(dim or 0, 1).zero_()
        if dim is None:
            v.zero_()
    return run, [t.requires_grad_() for t in (x, v, g, bias, residual)]


def derivatives(name, dtype, first_by, orders, zero_row=False, transform=None):
    """All gradients of each order, each of a cubic function of the ones before."""
    layer, inputs = drawn(name, dtype, zero_row)

    def run(x):
        y = layer(x, *inputs[1:])
        of = [y.sin(), *torch.autograd.grad(y.sin().sum(), [inputs[i] for i in first_by], create_graph=True)]
        found = []
        for _ in range(orders - 1):
            of = torch.autograd.grad(sum(t.pow(3).sum() for t in of), inputs, create_graph=True)
            found += of
        return found

    found = run(inputs[0]) if transform is None else transform(run, inputs[0])
    return [*found, *torch.autograd.grad(sum(t.square().sum() for t in found), inputs)]


def assert_as_in_float64(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one.double(), other, rtol=2e-4, atol=2e-4 * other.abs().max().item())


@each_layer
@pytest.mark.parametrize("zero_row", [False, True], ids=["", "a row of zeros"])
@pytest.mark.parametrize("first_by", [(0,), (0, 4), (1, 2), (0, 1, 2, 3)], ids=str)
def test_derivatives_up_to_the_third(name, first_by, zero_row, nodes, in_python):  # noqa: F811
    found = derivatives(name, torch.float32, first_by, 3, zero_row)
    if nodes != "Python":
        assert not in_python
    assert_as_in_float64(found, derivatives(name, torch.float64, first_by, 3, zero_row))


def test_derivatives_of_the_fourth_order():
    wanted = derivatives("rows", torch.float64, (0,), 4)
    assert_as_in_float64(derivatives("rows", torch.float32, (0,), 4), wanted)


def saved_on_cpu(run, x):
    with torch.autograd.graph.save_on_cpu():
        return run(x)


@each_layer
@pytest.mark.parametrize("hooked", [partial(checkpoint, use_reentrant=False), saved_on_cpu], ids=["checkpoint", "cpu"])
def test_what_is_saved_may_go_through_hooks(name, hooked):
    wanted = derivatives(name, torch.float64, (0,), 2)
    assert_as_in_float64(derivatives(name, torch.float32, (0,), 2, transform=hooked), wanted)


@pytest.mark.parametrize("frozen", [(1,), (2,), (1, 2), (3,), (0,)], ids=str)
def test_what_requires_no_gradient_gets_none(frozen):
    def run(dtype):
        layer, inputs = drawn("rows", dtype)
        for i in frozen:
            inputs[i].requires_grad_(False)
        wanted = [t for t in inputs if t.requires_grad]
        y = layer(*inputs).sin().sum()
        first = torch.autograd.grad(y, wanted[:2], create_graph=True)
        return torch.autograd.grad(sum(t.pow(3).sum() for t in first), wanted, allow_unused=True)

    for one, other in zip(run(torch.float32), run(torch.float64), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_autocast_around_the_derivative_casts_nothing():
    """As around any backward: what the forward ran in, its derivatives run in."""
    layer, inputs = drawn("rows", torch.float32)

    def slopes(casts):
        y = layer(*inputs).sin().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            return torch.autograd.grad(y, inputs, create_graph=True)

    for one, other in zip(slopes(True), slopes(False), strict=True):
        assert torch.equal(one, other)


@each_layer
@pytest.mark.parametrize("by", [0, 1])
def test_a_batch_of_second_derivatives(name, by):
    def run(dtype):
        layer, inputs = drawn(name, dtype)
        y = layer(*inputs)
        (slope,) = torch.autograd.grad(y.pow(3).sum(), inputs[by], create_graph=True)
        each = torch.eye(slope.numel(), dtype=dtype).reshape(-1, *slope.shape)
        return torch.autograd.grad(slope, inputs, each, is_grads_batched=True)

    assert_as_in_float64(run(torch.float32), run(torch.float64))


def test_the_slope_of_a_network_can_be_asked_for_twice():
    """The graph of one slope is freed with its loss, that of the output is not."""
    layer, (x, v, g, bias, residual) = drawn("rows", torch.float32)
    y = layer(x, v, g, bias, residual)
    found = []
    for _ in range(2):
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True, retain_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), (v, g), retain_graph=True))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_freed_graph_leaves_nothing_to_the_next():
    """The slope's graph has a weight of its own, which its loss frees; graphs that are kept share one."""
    layer, (x, v, g, bias, residual) = drawn("rows", torch.float32)
    y = layer(x, v, g, bias, residual)
    found = []
    for keeps in (False, True, False, False):
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.pow(3).sum(), (v, g), retain_graph=keeps))
    for pair in found[1:]:
        assert all(map(torch.equal, pair, found[0]))


def test_a_wave_equation():
    """Two derivatives by the input, and one by the parameters of their squares, against the reference."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    for module in eager:
        if isinstance(module, nn.Linear):
            weight_norm(module)
    points = torch.rand(20, 2)

    def gradients(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        bend = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
        loss = (bend[0] - bend[1]).square().mean() + (slope[:, 0] - 1).square().mean()
        parameters = [p for name, p in model.named_parameters() if "bias" not in name]
        return torch.autograd.grad(loss, parameters)

    with wnfused.use_backend("reference"):
        wanted = gradients(wnfused.convert(eager), points.double())
    found = gradients(wnfused.convert(eager).float(), points)
    assert_as_in_float64(found, wanted)
    assert len(found) == 6
