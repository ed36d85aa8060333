"""Layers in float64 on the CPU: torch's own product with a weight whose node is in C++, against the reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_layer_graph import LAYERS

import wnfused
from wnfused import dispatch
from wnfused.backends import native_autograd
from wnfused.ops import _registration

pytestmark = [
    pytest.mark.skipif(not dispatch.prefers_native(), reason="the C++ kernels are not what runs here"),
    pytest.mark.skipif(native_autograd.unavailable() is not None, reason=str(native_autograd.unavailable())),
]

F = wnfused.functional


def drawn(shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.fixture
def ops(monkeypatch):
    """A list with the ops that are called from Python: a layer in float64 calls none."""
    called = []
    below = _registration.below_autograd
    monkeypatch.setattr(_registration, "below_autograd", lambda op, *a: called.append(op) or below(op, *a))
    return called


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_values_and_derivatives_are_the_references(name, recorded, ops):
    run, _, shapes = LAYERS[name]
    inputs = drawn(shapes)

    def derivatives():
        if not recorded:
            with torch.no_grad():
                return [run(*inputs)]
        y = run(*inputs)
        first = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
        return [y, *first, *torch.autograd.grad(sum(t.square().sum() for t in first), inputs)]

    found = derivatives()
    assert not ops
    with wnfused.use_backend("reference"):
        wanted = derivatives()
    assert ops  # the reference goes by them
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12 * (1 + other.abs().max().item()))


@pytest.mark.parametrize("name", LAYERS)
def test_rows_of_zeros(name):
    run, dim, shapes = LAYERS[name]
    inputs = drawn(shapes)
    with torch.no_grad():
        inputs[1].select(dim or 0, 0).zero_()
        if dim is None:
            inputs[1].zero_()
    first = torch.autograd.grad(run(*inputs).sin().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(t.square().sum() for t in first), inputs)
    assert all(t.isfinite().all() for t in (*first, *second))
    assert not first[1].select(dim or 0, 0).any()


@pytest.mark.parametrize(("dims", "format"), [(4, torch.channels_last), (5, torch.channels_last_3d)])
@pytest.mark.parametrize("of", ["x", "v", "both"])
def test_the_format_of_the_output(dims, format, of):
    x, v, g = drawn(((2, 3, *[5] * (dims - 2)), (4, 3, *[3] * (dims - 2)), (4,)))
    x = x if of == "v" else x.to(memory_format=format)
    v = v if of == "x" else v.to(memory_format=format)
    assert getattr(F, f"conv{dims - 2}d")(x, v, g).is_contiguous(memory_format=format)


LINEAR = ((5, 3), (4, 3), (4, 1), (4,), (5, 4))
CONV = ((2, 4, 5, 5), (6, 2, 3, 3), (6,), (6,), (2, 6, 3, 3))


@pytest.mark.parametrize("i", range(5))
@pytest.mark.parametrize("wrong", ["float32", "shape"])
@pytest.mark.parametrize(("run", "shapes"), [(F.linear, LINEAR), (partial(F.conv2d, groups=2), CONV)])
def test_what_does_not_fit_is_named(run, shapes, i, wrong):
    inputs = drawn(shapes)
    inputs[i] = inputs[i].float() if wrong == "float32" else inputs[i][..., None, :1]
    name = "x|v" if i < 2 else ("g", "bias", "residual")[i - 2]
    with pytest.raises((TypeError, ValueError), match=f"^({name}): "):
        run(*inputs[:4], residual=inputs[4])


def test_autocast_leaves_float64_alone():
    inputs = drawn(LINEAR)
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(*inputs[:4])
    assert torch.equal(y, F.linear(*inputs[:4]))


def test_a_stage_says_that_the_backend_asked_for_has_no_kernel():
    x, v, g = torch.randn(1, 4, 5, 5), torch.randn(2, 2, 4, 4, 3, 3), torch.rand(2, 2, 4)
    tensors = [t.double() for t in (x, v, g, g)]
    assert F.residual_stage(*tensors).dtype == torch.float64
    with dispatch.use_backend("native"), pytest.raises(dispatch.BackendUnavailableError, match=r"torch\.float64"):
        F.residual_stage(*tensors)
