"""Row norms, effective weights and their backward: of one tensor along any dim, of many in one launch."""

import pytest
import torch
from triton_cases import DEVICE, DTYPES, TOLERANCE, relative

from wnfused import reference
from wnfused.backends import triton as backend
from wnfused.backends.triton import rows, support
from wnfused.backends.triton.kernels import rows as kernels

SHAPES = [((5, 7), 0), ((1, 3, 3, 3), 0), ((9,), 0), ((3, 1031), 0), ((4, 6, 5), 1), ((4, 6, 5), 2), ((4, 6, 5), None)]
EMPTY = [((0, 4), 0), ((4, 0), 0), ((3, 0, 2), 2)]


def pair(shape, dim, dtype=torch.float32, gain=None):
    """Drawn on the CPU: the same numbers on every device."""
    v = torch.randn(shape).to(DEVICE, dtype)
    count = 1 if dim is None else shape[dim]
    return v, torch.randn(count).to(DEVICE, gain or dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "dim"), SHAPES + EMPTY, ids=str)
def test_one_tensor(shape, dim, dtype):
    v, g = pair(shape, dim, dtype)
    dw = torch.randn(shape, device=DEVICE).to(dtype)
    w, norm = backend.weight_norm(v, g, dim)
    expected, norm64 = reference.weight_norm(v.double(), g.double(), dim)
    assert norm.dtype == torch.float32
    assert norm.shape == norm64.shape
    found = (w, norm, *backend.weight_norm_backward(dw, v, g, norm, dim))
    wanted = (expected, norm64, *reference.weight_norm_backward(dw.double(), v.double(), g.double(), norm64, dim))
    assert all(relative(one, other) < TOLERANCE[dtype] for one, other in zip(found, wanted, strict=True))
    assert [t.dtype for t in found[2:]] == [dtype, dtype]


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("dim", [0, 1, -1, None])
def test_many_tensors_of_several_types_and_layouts(dim, weights):
    shapes = [(5, 7), (4, 16), (8, 3, 3, 3), (40, 2, 1, 1), (3, 70)] + ([(0, 4), (4, 0)] if dim == 0 else [])
    vs, gs = [], []
    for i, shape in enumerate(shapes):
        v, g = pair(shape, dim, DTYPES[i % 3], torch.float32 if i % 2 else None)
        vs.append(v.contiguous(memory_format=torch.channels_last) if v.dim() == 4 else v)
        gs.append(g)
    vs[0] = torch.cat([vs[0].new_zeros(1), vs[0].flatten()])[1:].reshape(shapes[0])  # off every vector's border
    vs[1][2] = 0
    found = backend.weight_norm_many(vs, gs, dim, weights)
    expected = reference.weight_norm_many([v.double() for v in vs], [g.double() for g in gs], dim, weights)
    assert len(found[0]) == (len(vs) if weights else 0)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other, v in zip(ours, theirs, vs, strict=False):
            assert one.shape == other.shape
            assert relative(one, other) < TOLERANCE[v.dtype]
    dws = [torch.randn(v.shape, device=DEVICE).to(v.dtype) for v in vs]
    found = backend.weight_norm_many_backward(dws, vs, gs, found[1], dim)
    wide = ([t.double() for t in tensors] for tensors in (dws, vs, gs, expected[1]))
    for ours, theirs, like in zip(found, reference.weight_norm_many_backward(*wide, dim), (vs, gs), strict=True):
        for one, other, t, v in zip(ours, theirs, like, vs, strict=True):
            assert (one.shape, one.dtype) == (t.shape, t.dtype)
            assert relative(one, other) < TOLERANCE[v.dtype]


def test_a_captured_graph_gets_no_table(monkeypatch):
    """Its replay would read a table whose memory has gone to others: each tensor has its own launch."""
    vs, gs = zip(*(pair((5, 7), 0) for _ in range(3)), strict=True)
    dws = [torch.randn(5, 7, device=DEVICE) for _ in vs]
    many = backend.weight_norm_many(vs, gs)
    gradients = backend.weight_norm_many_backward(dws, vs, gs, many[1])
    monkeypatch.setattr(rows, "_must_go_one_by_one", lambda v: True)
    monkeypatch.setattr(rows, "_launch_many", None)
    single = backend.weight_norm_many(vs, gs)
    again = backend.weight_norm_many_backward(dws, vs, gs, single[1])
    same(many, single, gradients, again)


def same(many, single, gradients, again):
    """To the bit in the interpreter; on a GPU one kernel may sum a row in another order than the other."""
    for ours, theirs in ((many, single), (gradients, again)):
        for ones, others in zip(ours, theirs, strict=True):
            for one, other in zip(ones, others, strict=True):
                assert one.is_cuda or torch.equal(one, other)
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("weights", [True, False])
def test_a_call_before_a_capture_brings_its_kernels(monkeypatch, weights):
    """Under capture Triton may neither compile nor load one: the first call of a kind makes the single launches too."""
    seen = []

    def launch(kernel, grid, arguments, **constants):
        seen.append(kernel)
        support.launch(kernel, grid, arguments, **constants)

    monkeypatch.setattr(rows, "launch", launch)
    monkeypatch.setattr(rows, "_launched", set())
    monkeypatch.setattr(rows, "_on_a_gpu", lambda v: False)
    monkeypatch.setattr(rows, "_must_go_one_by_one", lambda v: False)
    monkeypatch.setattr(rows, "_sent", lambda numbers, dtype, device: torch.tensor(numbers, dtype=dtype, device=device))
    vs, gs = zip(*(pair(shape, 0) for shape in [(5, 7), (5, 7), (4, 16)]), strict=True)
    dws = [torch.randn(v.shape, device=DEVICE) for v in vs]

    def both():
        seen.clear()
        found = backend.weight_norm_many(vs, gs, 0, weights)
        gradients = backend.weight_norm_many_backward(dws, vs, gs, found[1])
        return found, gradients

    many, gradients = both()
    assert kernels.weight_norm not in seen
    monkeypatch.setattr(rows, "_on_a_gpu", lambda v: True)
    single, again = both()
    assert [seen.count(kernel) for kernel in (kernels.weight_norm, kernels.weight_norm_backward)] == [2, 2]
    same(many, single, gradients, again)
    both()
    assert kernels.weight_norm not in seen
    assert kernels.weight_norm_backward not in seen
    vs, gs = [v.bfloat16() for v in vs], [g.bfloat16() for g in gs]
    both()
    assert seen.count(kernels.weight_norm) == 2


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("dim", [0, 1])
def test_zero_rows_are_0_and_take_no_gradient_whatever_comes(dim, value):
    v, g = pair((5, 7), dim)
    rows_of = v if dim == 0 else v.T
    rows_of[2] = 0
    g[2] = float("inf")
    dw = torch.full_like(v, value)
    (w,), (norm,), (scale,) = backend.weight_norm_many([v], [g], dim)
    single, _ = backend.weight_norm(v, g, dim)
    for found in (w, single):
        assert (found.select(dim, 2) == 0).all()
    assert scale[2] == 0
    (dv,), (dg,) = backend.weight_norm_many_backward([dw], [v], [g], [norm], dim)
    for gradients in ((dv, dg), backend.weight_norm_backward(dw, v, g, norm, dim)):
        assert (gradients[0].select(dim, 2) == 0).all()
        assert gradients[1].flatten()[2] == 0
