"""Derivatives through a layer's gradient by its input: penalties on gradients, and what torch says of them."""

from functools import partial

import pytest
import torch
from test_direct import LAYERS, layers, nodes, tensors  # noqa: F401  nodes runs every test twice
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import wnfused
from wnfused import dispatch, reference
from wnfused.ops import _input_gradient as input_gradient
from wnfused.ops import _nodes

pytestmark = pytest.mark.skipif(not dispatch.prefers_native(), reason="the C++ kernels are not what runs here")


@pytest.fixture
def taken(monkeypatch):
    """Of every gradient with a graph whether it is one by the input alone."""
    answers = []
    asks = _nodes.is_of_input_alone
    monkeypatch.setattr(_nodes, "is_of_input_alone", lambda *a: answers.append(asks(*a)) or answers[-1])
    return answers


class Needs(TorchDispatchMode):
    """Which gradients the kernel of a linear layer is asked for."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.wnfused_native.linear_backward.default:
            self.seen.append(args[6])
        return op(*args, **kwargs or {})


def penalised(function, x, v, g, bias, residual, first_of):
    """Gradients by all that requires one of a penalty on the gradients by ``first_of``, and of the output itself."""
    y = function(x, v, g, bias, residual).sin()
    first = torch.autograd.grad(y.sum(), first_of, create_graph=True)
    loss = sum(t.square().sum() for t in first) + 0.1 * y.square().sum()
    inputs = [t for t in (x, v, g, bias, residual) if t is not None and t.requires_grad]
    return [*first, *torch.autograd.grad(loss, inputs)]


@layers
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("by_residual", [False, True])
def test_a_penalty_on_the_gradient_by_the_input(name, with_bias, by_residual, nodes, taken):  # noqa: F811
    function, shapes = LAYERS[name]
    drawn = tensors(*shapes)

    def run(dtype):
        x, v, g, bias, residual = (t.detach().to(dtype).requires_grad_() for t in drawn)
        if not by_residual:
            residual = residual.detach()
        return penalised(function, x, v, g, bias if with_bias else None, residual, [x, residual][: 1 + by_residual])

    found, wanted = run(torch.float32), run(torch.float64)
    # In float64 the reference runs, and the nodes in C++ have this in C++.
    assert taken == ([True] if nodes == "Python" else [])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@layers
@pytest.mark.filterwarnings("ignore:.*reference cycle")
def test_parameters_among_what_is_asked_for_take_no_kernel(name, nodes, taken):  # noqa: F811
    function, shapes = LAYERS[name]
    x, v, g, bias, residual = tensors(*shapes)
    for parameter in (v, g, bias):
        penalised(function, x, v, g, bias, residual, (x, parameter))
        penalised(function, x, v * 1, g * 1, bias * 1, residual, (x, parameter))
    function(x, v, g, bias, residual).sum().backward(create_graph=True)
    assert taken == ([False] * 7 if nodes == "Python" else [])  # the nodes in C++ make a graph themselves


# torch itself has no third derivative of a transposed convolution with output_padding.
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "conv_transpose1d"])
def test_third_derivatives(name, nodes, taken):  # noqa: F811
    function, shapes = LAYERS[name]
    drawn = tensors(*shapes)

    def run(dtype):
        x, v, g, bias, residual = inputs = [t.detach().to(dtype).requires_grad_() for t in drawn]
        y = function(x, v, g, bias, residual).sin()
        first = torch.autograd.grad(y.sum(), (x, residual), create_graph=True)
        second = torch.autograd.grad(sum(t.pow(3).sum() for t in first), inputs, create_graph=True)
        return torch.autograd.grad(sum(t.square().sum() for t in second), inputs)

    found, wanted = run(torch.float32), run(torch.float64)
    assert taken[:1] == ([True] if nodes == "Python" else [])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3 * other.abs().max().item())


def saved_on_cpu(run, x):
    with torch.autograd.graph.save_on_cpu():
        return run(x)


HOOKED = {"a checkpoint": partial(checkpoint, use_reentrant=False), "saved on the CPU": saved_on_cpu}


@pytest.mark.parametrize("hooked", HOOKED.values(), ids=HOOKED)
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "conv_transpose1d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("asked", ["input", "parameters"])
def test_derivatives_of_gradients_where_what_is_saved_goes_through_hooks(name, dtype, asked, hooked):
    """Up to the third; torch.func, which the reference's derivatives go by elsewhere, does not do that."""
    function, shapes = LAYERS[name]
    x, v, g, bias, residual = inputs = [t.detach().to(dtype).requires_grad_() for t in tensors(*shapes)]

    def run(x):
        y = function(x, v, g, bias, residual).sin()
        first = torch.autograd.grad(y.sum(), (x, residual) if asked == "input" else (v, g), create_graph=True)
        second = torch.autograd.grad(sum(t.pow(3).sum() for t in first), (x, v, g, bias, residual), create_graph=True)
        return sum(t.square().sum() for t in (*first, *second))

    found = torch.autograd.grad(hooked(run, x), inputs)
    wanted = torch.autograd.grad(run(x), inputs)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())


def critic():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 3, 1, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 16, 12), nn.ReLU(), nn.Linear(12, 1),
    )  # fmt: skip


def test_a_critic_with_a_gradient_penalty(nodes, taken):  # noqa: F811
    eager = critic()
    for layer in eager:
        if hasattr(layer, "weight"):
            weight_norm(layer)
    x = torch.randn(5, 3, 8, 8)

    def gradients(model, images):
        images.requires_grad_()
        (slope,) = torch.autograd.grad(model(images).sum(), images, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        # The last bias is in no derivative; all else is, if only by zeros.
        found = torch.autograd.grad(penalty, [images, *model.parameters()], allow_unused=True)
        return dict(zip(("images", *(name for name, _ in model.named_parameters())), found, strict=True))

    wanted = gradients(eager.double(), x.double())
    found = gradients(wnfused.convert(eager.float()), x.clone())
    assert taken == ([True] * 4 if nodes == "Python" else [])
    old = {name: f"{name.partition('.')[0]}.parametrizations.weight.original" for name in found}
    for name, gradient in found.items():
        there = {"weight_g": f"{old[name]}0", "weight_v": f"{old[name]}1"}.get(name.rpartition(".")[2], name)
        assert (gradient is None) == (wanted[there] is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient.double(), wanted[there], rtol=1e-4, atol=1e-6)


def two_layers():
    x, v, g, bias = tensors((3, 5), (5, 5), (5,), (5,))
    function = LAYERS["linear"][0]
    y = function(function(x, v, g, bias, None), v, g, bias, None)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (slope.square().sum(), x, v, g, bias)


def test_zeros_belong_to_whom_they_are_given():
    """A gradient of zeros is one number in memory between layers; that of a leaf can be written to."""
    loss, x, _, _, bias = two_layers()
    for zeros in torch.autograd.grad(loss, (x, bias)):
        assert not zeros.any()
        assert 0 not in zeros.stride()
        zeros.add_(1)
        assert (zeros == 1).all()
    loss, *leaves = two_layers()
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    torch.nn.utils.clip_grad_norm_(leaves, 1e-3)
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_zeros_of_one_backward_are_not_those_of_the_next():
    def zeros_of_the_middle():
        x, v, g = tensors((3, 5), (5, 5), (5,))
        middle = LAYERS["linear"][0](x, v, g, None, None)
        y = LAYERS["linear"][0](middle, v, g, None, None)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (zeros,) = torch.autograd.grad(slope.sum(), middle)
        return zeros

    spoilt = zeros_of_the_middle()
    assert not spoilt.any()
    spoilt.numpy()[:] += 1  # torch guards what lies in one place from its own writes alone
    assert not zeros_of_the_middle().any()


class Backwards(TorchDispatchMode):
    """What the kernels of layers are asked for backward, in bits."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in (torch.ops.wnfused_native.linear_backward.default, torch.ops.wnfused_native.conv_backward.default):
            self.asked.append(args[6])
        return op(*args, **kwargs or {})


def penalty_of(run, x):
    (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    return (slope.flatten(1).norm(dim=1) - 1).square().mean()


def test_a_penalty_does_not_go_back_through_the_layers_with_zeros(nodes):  # noqa: F811
    if nodes == "Python":
        pytest.skip("there it is the last layer alone that computes nothing for zeros")
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    convolutions = wnfused.convert(
        nn.Sequential(*(m for c in (3, 8, 8) for m in (nn.Conv2d(c, 8, 3, padding=1), nn.LeakyReLU(0.2)))), plain=True
    )
    loss = penalty_of(convolutions, x)
    with Backwards() as backwards:
        loss.backward()
    assert backwards.asked == [2] * 3  # the weights' gradients from the cotangents of the slopes
    x = torch.randn(2, 3, requires_grad=True)
    linear = wnfused.convert(nn.Sequential(*(m for c in (3, 8, 8) for m in (nn.Linear(c, 8), nn.ReLU()))), plain=True)
    loss = penalty_of(linear, x)
    with Backwards() as backwards:
        loss.backward()
    assert backwards.asked == []
    for model in (convolutions, linear):
        for name, parameter in model.named_parameters():
            assert name.endswith("bias") != parameter.grad.any(), name
            parameter.grad.add_(1)  # its own memory


@pytest.mark.parametrize(("kind", "image", "window"), [("linear", (), ()), ("conv2d", (5, 4), (3, 3))])
def test_zeros_and_gradients_meet_where_paths_do(kind, image, window):
    """Outputs with several readers, some of which hand zeros on, and some of what is asked for between the layers."""
    layer = partial(getattr(wnfused.functional, kind), **({"padding": 1} if window else {}))
    torch.manual_seed(1)
    x = torch.randn(2, 3, *image)
    parameters = [t for c in (3, 4, 4, 4) for t in (torch.randn(4, c, *window), torch.rand(4) + 0.5, torch.randn(4))]

    def run(dtype):
        images = x.to(dtype).requires_grad_()
        leaves = [t.to(dtype).requires_grad_() for t in parameters]
        of = [leaves[i : i + 3] for i in range(0, 12, 3)]
        first = layer(images, *of[0], activation="relu")
        left = layer(first, *of[1], activation="leaky_relu")
        right = layer(first, *of[2], residual=left, activation="relu")
        last = layer(right, *of[3], residual=first)
        (slope,) = torch.autograd.grad(last.sum(), images, create_graph=True)
        asked = [images, *leaves[:-1], first, left]  # the last layer has no activation: no derivative has its bias
        found = torch.autograd.grad(slope.square().sum(), asked, retain_graph=True)
        return [*found, *torch.autograd.grad(slope.square().sum() + last.square().sum() + left.sum(), asked)]

    for one, other in zip(run(torch.float32), run(torch.float64), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4 * (1 + other.abs().max().item()))


def test_a_parameter_without_a_share_in_the_penalty_is_not_asked():
    """Hooks see gradients, never None; torch calls none on a bias that is in no derivative."""
    x, v, g, bias = tensors((3, 5), (5, 5), (5,), (5,))
    seen = []
    for tensor in (v, g, bias):
        tensor.register_hook(lambda gradient: seen.append(gradient))
    y = wnfused.functional.linear(x, v, g, bias)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert len(seen) == 3
    assert all(gradient is not None for gradient in seen)
    seen.clear()
    (slope,) = torch.autograd.grad(wnfused.functional.linear(x, v, g, bias).sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert len(seen) == 2
    assert all(gradient is not None for gradient in seen)


def test_gradients_by_the_input_alone_leave_those_of_the_parameters_out():
    """What ``torch.autograd.grad`` is asked for by the input costs no gradient of a large weight."""
    x, v, g, bias = tensors((512, 256), (256, 256), (256,), (256,))
    y = wnfused.functional.linear(x, v, g, bias, activation="relu")
    every = torch.autograd.grad(y.sum(), (x, v, g, bias), retain_graph=True)
    with Needs() as needs:
        (alone,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        one, other = torch.autograd.grad(y.sum(), (x, bias))
    assert torch.equal(alone, every[0])
    assert torch.equal(one, every[0])
    assert torch.equal(other, every[3])
    assert needs.seen[0] == 1
    assert needs.seen[1] & 5 == 5


def test_a_stage_asked_for_its_inputs_gradient_alone():
    stage = wnfused.WNResidualStage(16, 16, 3)
    x = torch.randn(2, 16, 8, 8, requires_grad=True)
    y = stage(x)
    parameters = list(stage.parameters())
    every = torch.autograd.grad(y.square().sum(), (x, *parameters), retain_graph=True)
    (alone,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    torch.testing.assert_close(alone, every[0], rtol=1e-5, atol=1e-5)
    one, other = torch.autograd.grad(y.square().sum(), (x, parameters[0]))
    torch.testing.assert_close(one, every[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(other, every[1])


@pytest.mark.parametrize("default", ["cpu", "meta"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_zeros_are_where_the_gradient_is_whatever_the_default_device(device, default):
    y = torch.ones(3, device=device)
    input_gradient._running.zeros.clear()
    with torch.device(default):
        zeros = input_gradient.zero_gradient(y)
    assert zeros.device == y.device
    assert input_gradient.is_zero_gradient(zeros)
    if device == "cpu":  # what is on "meta" is nowhere in memory
        assert not input_gradient.is_zero_gradient(y)


def test_zeros_for_what_is_not_on_a_cpu():
    # "meta" stands for a GPU: the engine refuses a gradient that is not where its tensor is.
    def kernel(x, v, g, bias, residual, activation, slope):
        return reference.linear(x, v, g, bias, residual, 0, reference.ACTIVATIONS[activation], slope)

    def kernel_backward(dy, y, x, v, g, norm, needs, *constants):
        dx, dv, dg = torch.func.vjp(lambda *of: kernel(*of, None, None, *constants)[0], x, v, g)[1](dy)
        return dx, dv, dg, None, dy

    by_input = input_gradient.input_gradient("linear", kernel, kernel_backward, kernel)
    x, v, g, y = (torch.rand(shape, device="meta", requires_grad=True) for shape in ((4, 8), (3, 8), (3,), (4, 3)))
    relu = reference.ACTIVATIONS.index("relu")
    dx, _ = by_input(torch.ones_like(y), v, g, y, x.detach(), None, None, g.detach(), False, (relu, 0.0))
    by = torch.autograd.grad(dx.square().sum(), (v, g, y))
    assert [gradient.device.type for gradient in by] == ["meta"] * 3
