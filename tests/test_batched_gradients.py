"""Many gradients in one backward: ``is_grads_batched``, and vectorised Jacobians and Hessians."""

import pytest
import torch
from torch.autograd.functional import hessian, jacobian

import wnfused
from wnfused import dispatch
from wnfused.backends import native_autograd, native_entry

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::wnfused.BackendWarning")]

LAYERS = {
    "linear": (lambda **kind: wnfused.WNLinear(6, 4, **kind), (3, 6)),
    "linear, relu": (lambda **kind: wnfused.WNLinear(6, 4, activation="relu", **kind), (3, 6)),
    "conv": (lambda **kind: wnfused.WNConv2d(3, 4, 3, padding=1, activation="leaky_relu", **kind), (2, 3, 4, 4)),
    "conv_transpose": (lambda **kind: wnfused.WNConvTranspose2d(3, 4, 3, 2, **kind), (2, 3, 3, 3)),
    "stage": (lambda **kind: wnfused.WNResidualStage(4, 4, 2, **kind), (2, 4, 4, 4)),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, params=["C++", "Python"])
def nodes(request, monkeypatch):
    """What layers are recorded by."""
    if request.param == "Python":
        monkeypatch.setattr(native_entry, "layer", lambda name: None)
        monkeypatch.setattr(native_autograd, "unavailable", lambda: "a test does without")
    elif not dispatch.prefers_native() or native_autograd.unavailable() is not None:
        pytest.skip("there are no nodes in C++ here")


def close(a, b):
    tolerance = 32 * torch.finfo(a.dtype).eps
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1, b.abs().max().item()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_batch_of_gradients_is_each_of_them(name, dtype):
    make, shape = LAYERS[name]
    layer, x = make(dtype=dtype), torch.randn(shape, dtype=dtype, requires_grad=True)
    y, of = layer(x), [x, *layer.parameters()]
    dys = torch.randn(3, *y.shape, dtype=dtype)
    together = torch.autograd.grad(y, of, dys, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(y, of, dy, retain_graph=True) for dy in dys]
    for found, *each in zip(together, *alone, strict=True):
        close(found, torch.stack(each))
    dx, dv = torch.autograd.grad(y, of[:2], dys, is_grads_batched=True, create_graph=True)
    loss = (dx**2).sum() + (dv**2).sum()
    (twice,) = torch.autograd.grad(loss, of[2], allow_unused=True, retain_graph=True)  # float64's graphs share a weight
    parts = [torch.autograd.grad(y, of[:2], dy, create_graph=True) for dy in dys]
    (expected,) = torch.autograd.grad(sum((a**2).sum() + (b**2).sum() for a, b in parts), of[2], allow_unused=True)
    close(twice, expected)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_vmap_of_a_backward(name, dtype, graph):
    """By ``torch.func.vmap``, over a graph that was recorded outside."""
    make, shape = LAYERS[name]
    layer, x = make(dtype=dtype), torch.randn(shape, dtype=dtype, requires_grad=True)
    y, of = layer(x), [x, *layer.parameters()]
    dys = torch.randn(3, *y.shape, dtype=dtype)
    options = {"retain_graph": True, "create_graph": graph}
    together = torch.func.vmap(lambda dy: torch.autograd.grad(y, of, dy, **options))(dys)
    alone = [torch.autograd.grad(y, of, dy, retain_graph=True) for dy in dys]
    for found, *each in zip(together, *alone, strict=True):
        close(found, torch.stack(each))


@pytest.mark.parametrize("name", LAYERS)
def test_vectorised_jacobians_and_hessians(name):
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    close(jacobian(layer, x, vectorize=True), jacobian(layer, x))
    close(
        hessian(lambda x: (layer(x) ** 3).sum(), x[:1], vectorize=True), hessian(lambda x: (layer(x) ** 3).sum(), x[:1])
    )


def test_a_tensor_that_is_given_twice():
    layer, x = wnfused.WNLinear(4, 4), torch.randn(3, 4, requires_grad=True)
    y = layer(x, residual=x)
    dys = torch.randn(2, 3, 4)
    (together,) = torch.autograd.grad(y, x, dys, is_grads_batched=True, retain_graph=True)
    close(together, torch.stack([torch.autograd.grad(y, x, dy, retain_graph=True)[0] for dy in dys]))


def test_effective_weights():
    v, g = torch.randn(4, 3, requires_grad=True), torch.rand(4, requires_grad=True)
    for w in (wnfused.functional.weight_norm(v, g), wnfused.functional.weight_norm_many([v], [g])[0]):
        dws = torch.randn(2, 4, 3)
        together = torch.autograd.grad(w, (v, g), dws, is_grads_batched=True, retain_graph=True)
        alone = [torch.autograd.grad(w, (v, g), dw, retain_graph=True) for dw in dws]
        for found, *each in zip(together, *alone, strict=True):
            close(found, torch.stack(each))


def test_a_stage_without_blocks():
    stage, x = wnfused.WNResidualStage(4, 8, 1, stride=2), torch.randn(2, 4, 4, 4, requires_grad=True)
    y, of = stage(x), [x, *stage.parameters()]
    dys = torch.randn(2, *y.shape)
    together = torch.autograd.grad(y, of, dys, is_grads_batched=True, retain_graph=True, allow_unused=True)
    alone = [torch.autograd.grad(y, of, dy, retain_graph=True, allow_unused=True) for dy in dys]
    for found, *each in zip(together, *alone, strict=True):
        assert (found is None) == (each[0] is None)
        if found is not None and found.numel():
            close(found, torch.stack(each))
