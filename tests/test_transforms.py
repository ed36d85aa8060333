"""Every op under the transforms of ``torch.func``, one in another: the composite of torch's own ops says what is right,
under the same transforms, in float64."""

import pytest
import samples
import torch
from samples import SAMPLES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize, grad, jacfwd, jacrev, jvp, vjp, vmap

from wnfused import dispatch, reference
from wnfused.backends import native_autograd, native_entry
from wnfused.functional import linear, residual_stage, weight_norm

by_name = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)


def loss(run):
    return lambda *tensors: (run(*tensors) ** 2).sum()


def everything(tensors):
    return tuple(range(len(tensors)))


def of_each_sample(run, tensors):
    """By the parameters, as differential privacy asks."""
    batch = torch.stack([tensors[0], 2 * tensors[0], tensors[0] - 1])
    return vmap(grad(loss(run), everything(tensors)[1:]), (0, *(None,) * (len(tensors) - 1)))(batch, *tensors[1:])


def of_an_ensemble(run, tensors):
    return vmap(grad(loss(run), everything(tensors)))(*(torch.stack([t, 0.5 * t + 1]) for t in tensors))


def of_one_at_a_time(run, tensors):
    """Each tensor batched, along its last dim, and the others the same for all."""
    found = []
    for i, tensor in enumerate(tensors):
        in_dims = tuple(-1 if j == i else None for j in everything(tensors))
        batch = torch.stack([tensor, 2 - tensor], -1)
        found.append(vmap(run, in_dims)(*tensors[:i], batch, *tensors[i + 1 :]))
    return found


def pushed_forward(run, tensors):
    return jvp(run, tuple(tensors), tuple(t.sin() for t in tensors))


def pushed_forward_in_a_batch(run, tensors):
    batch = torch.stack([tensors[0], -tensors[0]])
    return vmap(lambda x: jvp(lambda *p: run(x, *p), tuple(tensors[1:]), tuple(t.cos() for t in tensors[1:])))(batch)


def product_with_the_hessian(run, tensors):
    """Forward over reverse."""
    return jvp(grad(loss(run), everything(tensors)), tuple(tensors), tuple(t.sin() for t in tensors))


def product_with_the_hessian_by_reverse(run, tensors):
    gradients = grad(loss(run), everything(tensors))
    return vjp(gradients, *tensors)[1](tuple(t.sin() for t in tensors))


def rows_of_the_hessian(run, tensors):
    return jacfwd(jacrev(loss(run), len(tensors) - 1), 0)(*tensors), jacrev(grad(loss(run), 1), 1)(*tensors)


def gradient_of_a_batch(run, tensors):
    """Reverse over ``vmap``, and over a gradient of each sample."""

    def penalty(x, *parameters):
        batch = torch.stack([x, 2 * x])
        each = vmap(grad(loss(run)), (0, *(None,) * len(parameters)))(batch, *parameters)
        return each.square().sum()

    return grad(penalty, everything(tensors))(*tensors)


def batches_of_batches(run, tensors):
    inner = vmap(run, (0, *(None,) * (len(tensors) - 1)))
    outer = vmap(inner, (None, *(0,) * (len(tensors) - 1)))
    return outer(torch.stack([tensors[0], 1 - tensors[0]]), *(torch.stack([t, t + 1, -t]) for t in tensors[1:]))


def third_derivatives(run, tensors):
    def directional(of):
        return lambda v: jvp(of, (v,), (v.sin(),))[1]

    def at(v):
        return loss(run)(tensors[0], v, *tensors[2:]) if len(tensors) > 1 else loss(run)(v)

    v = tensors[min(1, len(tensors) - 1)]
    return directional(directional(grad(at)))(v)


def recorded_outside(run, tensors):
    """A graph outside of the transforms, as of a module's own parameters."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    batch = torch.stack([leaves[0], 2 * leaves[0]])
    y = vmap(run, (0, *(None,) * (len(leaves) - 1)))(batch, *leaves[1:])
    return torch.autograd.grad(y.square().sum(), leaves)


def recorded_outside_twice(run, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    gradients = grad(loss(run), everything(leaves))(*leaves)
    return torch.autograd.grad(sum(t.square().sum() for t in gradients), leaves)


def rows_recorded_outside(run, tensors):
    """Many second derivatives at once of a graph that was recorded outside."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    gradients = torch.autograd.grad(loss(run)(*leaves), leaves, create_graph=True)
    gradients = [t + 0 * leaf for t, leaf in zip(gradients, leaves, strict=True)]  # some may be constant
    cotangents = [torch.stack([t.detach().sin(), t.detach().cos()]) for t in gradients]
    return vmap(lambda *c: torch.autograd.grad(gradients, leaves, c, retain_graph=True))(*cotangents)


TRANSFORMS = [
    of_each_sample,
    of_an_ensemble,
    of_one_at_a_time,
    pushed_forward,
    pushed_forward_in_a_batch,
    product_with_the_hessian,
    product_with_the_hessian_by_reverse,
    rows_of_the_hessian,
    gradient_of_a_batch,
    batches_of_batches,
    third_derivatives,
    recorded_outside,
    recorded_outside_twice,
    rows_recorded_outside,
]


def leaves_of(found):
    return torch.utils._pytree.tree_leaves(found)


def assert_agree(found, expected, tolerance):
    found, expected = leaves_of(found), leaves_of(expected)
    assert len(found) == len(expected) > 0
    for f, e in zip(found, expected, strict=True):
        assert f.shape == e.shape
        assert float((f.double() - e).norm()) <= tolerance * max(1.0, float(e.norm()))


@by_name
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's convolutions
@pytest.mark.filterwarnings(
    "ignore::wnfused.BackendWarning"
)  # of stages in float64 that recompute, outside of transforms
def test_transforms(sample, transform, dtype):
    tensors = [t.detach() for t in sample.tensors(dtype)]
    expected = transform(sample.expected, [t.double() for t in tensors])
    assert_agree(transform(sample.run, tensors), expected, 1e-10 if dtype == torch.float64 else 2e-3)


@by_name
@pytest.mark.parametrize("transform", [of_each_sample, product_with_the_hessian], ids=lambda f: f.__name__)
def test_without_the_nodes_in_cpp(sample, transform, monkeypatch):
    monkeypatch.setattr(native_autograd, "unavailable", lambda: "a test does without")
    monkeypatch.setattr(native_entry, "layer", lambda name: None)
    tensors = [t.detach() for t in sample.tensors()]
    assert_agree(transform(sample.run, tensors), transform(sample.expected, tensors), 1e-10)


@pytest.mark.skipif(native_autograd.unavailable() is not None, reason=str(native_autograd.unavailable()))
@pytest.mark.skipif(not dispatch.prefers_native(), reason="the C++ kernels are not what runs here")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_norm_is_one_op(dtype, monkeypatch):
    """Not the reference's dozen of small ones; with parameters in float32 also beside a narrower input."""

    def never(*arguments):
        raise AssertionError("the reference ran")

    monkeypatch.setattr(reference, "weight_norm", never)
    norms = [s for s in SAMPLES if s.name.startswith("norm-")]
    layers = [s for s in SAMPLES if s.op in (samples.linear, samples.conv, samples.transpose)]
    assert len(norms) > 5
    assert len(layers) > 20
    for sample in norms + layers:
        tensors = [t.detach() for t in sample.tensors(torch.promote_types(dtype, torch.float32))]
        if sample in layers:
            tensors = [t.to(dtype) if i in (0, 4) else t for i, t in enumerate(tensors)]  # the input and the residual
        grad(loss(sample.run))(*tensors)


def zero_rows(v, dim):
    """With one row of zeros, and a gain for it that is infinite."""
    v = v.clone()
    v.select(dim, 1).zero_()
    g = torch.rand(v.shape[dim], dtype=v.dtype) + 0.5
    g[1] = torch.inf
    return v, g


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_zero_rows_have_no_derivative(dim, dtype):
    v, g = zero_rows(torch.randn(4, 5, dtype=dtype), dim)
    x, weights = torch.randn(3, 5, dtype=dtype), torch.randn(4, 5, dtype=dtype)

    def run(v, g):
        return (weight_norm(v, g, dim=dim) * weights).sum()

    def check(dv, dg):
        assert not dv.movedim(dim, 0)[1].any()
        assert not dg[..., 1].any()
        assert torch.isfinite(dv).all()

    check(*grad(run, (0, 1))(v, g))
    _, (dv, dg) = jvp(grad(run, (0, 1)), (v, g), (torch.ones_like(v), torch.ones_like(g)))
    check(dv, dg)
    for dv, dg in zip(*vmap(grad(run, (0, 1)))(torch.stack([v, -v]), torch.stack([g, g])), strict=True):
        check(dv, dg)
    _, tangent = jvp(lambda v, g: weight_norm(v, g, dim=dim), (v, g), (torch.ones_like(v), torch.ones_like(g)))
    assert not tangent.movedim(dim, 0)[1].any()
    if dim == 0:
        each = vmap(grad(lambda v, g, x: linear(x, v, g).sum(), (0, 1)), (None, None, 0))(v, g, x)
        for dv, dg in zip(*each, strict=True):
            check(dv, dg)


@pytest.mark.parametrize(
    "sample",
    [s for s in SAMPLES if s.name in ("linear-relu", "conv2d", "transpose2d", "stage-three")],
    ids=lambda sample: sample.name,
)
def test_functionalized(sample):
    """Whatever writes to memory is taken out of a function, before or behind its gradient."""
    tensors = [t.detach() for t in sample.tensors()]
    torch.testing.assert_close(functionalize(sample.run)(*tensors), sample.expected(*tensors))
    torch.testing.assert_close(
        functionalize(grad(loss(sample.run), everything(tensors)))(*tensors),
        grad(loss(sample.expected), everything(tensors))(*tensors),
    )
    found, expected = (
        functionalize(lambda *tensors, run=run: of_each_sample(run, tensors))(*tensors)
        for run in (sample.run, sample.expected)
    )
    torch.testing.assert_close(found, expected)


def test_fake_tensors_outside_their_mode():
    """Shapes are found where no entries are."""
    with FakeTensorMode():
        x, v, g = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    assert vmap(lambda x: linear(x, v, g))(x).shape == (3, 4)
    assert [t.shape for t in grad(loss(linear), (0, 1, 2))(x, v, g)] == [x.shape, v.shape, g.shape]


def test_autocast_touches_nothing_inside():
    """A stage keeps its stream in float32; what it takes and gives is autocast's."""
    x = torch.randn(2, 3, 4, 5, 5)
    v, g, bias = torch.randn(3, 2, 4, 4, 3, 3), torch.rand(3, 2, 4), torch.randn(3, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = vmap(lambda x: residual_stage(x, v, g, bias))(x)
        expected = torch.stack([reference.residual_stage(each.bfloat16(), v, g, bias)[0] for each in x])
    with torch.autocast("cpu", enabled=False):
        wide = torch.stack([reference.residual_stage(each.bfloat16(), v, g, bias)[0] for each in x])
    assert not torch.equal(expected, wide)
    assert torch.equal(found, wide)
