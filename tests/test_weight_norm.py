"""Row norms of one tensor and of many at once: every instruction set, dtype, layout and dim against float64."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import ISAS
from torch.library import opcheck

import wnfused
from wnfused import dispatch, reference
from wnfused.backends import native
from wnfused.functional import row_scales_many, weight_norm, weight_norm_many

needs_native = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
BACKENDS = [name for name in ("native", "reference") if dispatch.backend_module(name).unavailable() is None]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# A norm is a sum of squares, whose relative error is that of one addition whatever the length where it is taken in 16
# parts and more; a few eps for the sum, the root, the division and the products behind it.
EPS = {dtype: 16 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps for dtype in DTYPES}


@st.composite
def direction(draw):
    """``(v, g, dim)``: any rank, odd sizes, an empty or zero row, any memory order, sizes far from 1."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 5, 9, 16, 33, 70]), min_size=1, max_size=4))
    while torch.Size(shape).numel() > 40_000:
        shape[shape.index(max(shape))] = 2
    if draw(st.integers(0, 9)) == 0:
        shape[draw(st.integers(0, len(shape) - 1))] = 0
    dtype = draw(st.sampled_from(DTYPES))
    dim = draw(st.sampled_from([None, *range(-len(shape), len(shape))]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    size = draw(st.sampled_from([1.0, 1e-3, 1e3] if dtype == torch.float16 else [1.0, 1e-15, 1e15]))
    v = torch.randn(shape, generator=generator, dtype=torch.float64) * size
    if dim is not None and shape[dim] > 1 and draw(st.booleans()):
        v.select(dim, 0).zero_()
    if len(shape) == 4 and draw(st.booleans()):
        v = v.contiguous(memory_format=torch.channels_last)
    elif draw(st.booleans()):
        v = v.mT.contiguous().mT if len(shape) > 1 else v.repeat_interleave(2)[::2]
    rows = 1 if dim is None else shape[dim]
    flat = draw(st.booleans()) or dim is None
    g = torch.randn(rows, generator=generator, dtype=torch.float64)
    if not flat:
        g = g.reshape([rows if d == dim % len(shape) else 1 for d in range(len(shape))])
    return v.to(dtype), g.to(draw(st.sampled_from([dtype, torch.float32])) if dtype != torch.float64 else dtype), dim


def size(t):
    return t.double().norm()


def rounding(dtype):
    return EPS[dtype] + (torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=120, deadline=None, derandomize=True)
@given(direction(), st.integers(1, 3))
def test_forward_and_backward_against_float64(isa, drawn, threads):
    v, g, dim = drawn
    before = torch.get_num_threads()
    torch.ops.wnfused_native.set_cpu_isa(isa)
    torch.set_num_threads(threads)
    try:
        w, norm = native.weight_norm(v, g, dim)
        dw = torch.randn(v.shape, generator=torch.Generator().manual_seed(1)).to(v.dtype)
        dv, dg = native.weight_norm_backward(dw, v, g, norm, dim)
    finally:
        torch.set_num_threads(before)
        torch.ops.wnfused_native.set_cpu_isa("auto")
    wide_w, wide_norm = reference.weight_norm(v.double(), g.double(), dim)
    wide_dv, wide_dg = reference.weight_norm_backward(dw.double(), v.double(), g.double(), wide_norm, dim)
    tolerance = rounding(v.dtype)
    assert (w.dtype, dv.dtype, dg.dtype) == (v.dtype, v.dtype, g.dtype)
    assert (w.shape, dv.shape, dg.shape) == (v.shape, v.shape, g.shape)
    torch.testing.assert_close(norm.double(), wide_norm, rtol=EPS[v.dtype], atol=0)
    assert size(w - wide_w) <= tolerance * size(wide_w)
    # Both are differences of products as large as dw, which may cancel.
    factor = g.double().abs().max() / wide_norm[wide_norm > 0].min() if (wide_norm > 0).any() else 0
    if v.dtype != torch.float16:  # whose gradients leave its range at norms of 1e-3
        assert size(dv - wide_dv) <= 4 * tolerance * factor * size(dw)
    assert size(dg - wide_dg) <= 4 * max(tolerance, torch.finfo(g.dtype).eps) * size(dw)
    assert w.isfinite().all()


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [0, 1, None])
def test_what_is_not_finite_comes_out_as_torch_gives_it(isa, dim):
    for value in (float("inf"), float("nan")):
        v, g = torch.randn(9, 37), torch.randn(37 if dim else 9 if dim == 0 else 1)
        v[4, 5] = value
        torch.ops.wnfused_native.set_cpu_isa(isa)
        found, norm = native.weight_norm(v, g, dim)
        torch.ops.wnfused_native.set_cpu_isa("auto")
        expected, wanted_norm = reference.weight_norm(v, g, dim)
        torch.testing.assert_close(found, expected, equal_nan=True)
        torch.testing.assert_close(norm, wanted_norm, equal_nan=True)


@pytest.mark.parametrize("backend", [pytest.param(native, marks=needs_native), reference], ids=["native", "reference"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_zero_rows_take_no_gradient_even_from_one_that_is_not_finite(dim, value, backend):
    v = torch.randn(5, 40)
    rows = v[2] if dim == 0 else v[:, 2] if dim == 1 else v
    rows.zero_()
    g = torch.ones(5 if dim == 0 else 40 if dim == 1 else 1)
    w, norm = backend.weight_norm(v, g, dim)
    dv, dg = backend.weight_norm_backward(torch.full_like(v, value), v, g, norm, dim)
    zero = (v == 0) if dim is None else (v == 0).all(1 - dim)
    for t in (w, dv):
        zeros = t if dim is None else t[2] if dim == 0 else t[:, 2]
        assert (zeros == 0).all()
    assert (dg[zero if dim is not None else ...] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("shape", "dim"), [((4, 31, 0), 1), ((31, 5, 0, 4), 1), ((5, 0), 0), ((0, 4), 1), ((3, 0), 1)])
def test_rows_without_an_entry_have_a_norm_of_0(shape, dim, backend):
    v, g = torch.empty(shape, requires_grad=True), torch.ones(shape[dim], requires_grad=True)
    for _ in range(3):
        torch.full((shape[dim],), torch.nan)  # for whoever reads memory that nobody wrote
        with wnfused.use_backend(backend):
            dv, dg = torch.autograd.grad(weight_norm(v, g, dim).sum(), (v, g))
        assert dv.shape == v.shape
        assert dg.tolist() == [0] * shape[dim]


@needs_native
@pytest.mark.parametrize("shape", [(4096, 300), (3, 70000), (300, 4096)])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_long_sums_are_right_and_the_same_for_any_number_of_threads(shape, dim):
    v, found = torch.randn(shape), []
    g = torch.ones(1 if dim is None else shape[dim])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            w, norm = native.weight_norm(v, g, dim)
            found.append((w, norm, *native.weight_norm_backward(w + 1, v, g, norm, dim)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    wanted = v.double().square().sum([d for d in (0, 1) if d != dim]).sqrt()
    torch.testing.assert_close(found[0][1].double(), wanted, rtol=EPS[torch.float32], atol=0)


# -------------------------------------------------------------------------------------------------- many at once


def layers_of_a_model():
    """Mixed shapes, dtypes, layouts and gain shapes; one tensor large enough to be shared among threads."""
    shapes = [(8, 3, 3, 3), (700, 130), (5, 70000), (4, 0), (1, 1), (6,), (16, 4, 5, 3)]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32, torch.bfloat16]
    vs = [torch.randn(s).to(d) for s, d in zip(shapes, dtypes, strict=True)]
    vs[0] = vs[0].contiguous(memory_format=torch.channels_last)
    vs[1] = vs[1].T.contiguous().T
    gs = [torch.randn(v.shape[0], *[1] * (v.dim() - 1) * (i % 2)).to(v.dtype) for i, v in enumerate(vs)]
    gs[2] = gs[2].float()
    return vs, gs


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_are_what_one_by_one_gives(backend):
    vs, gs = layers_of_a_model()
    for t in (*vs, *gs):
        t.requires_grad_()
    with wnfused.use_backend(backend):
        single = [weight_norm(v, g) for v, g in zip(vs, gs, strict=True)]
        many = weight_norm_many(vs, gs)
        norms, scales = row_scales_many(vs, gs)
        dws = [torch.randn_like(w) for w in single]
        wanted = torch.autograd.grad(single, [*vs, *gs], dws)
        found = torch.autograd.grad(many, [*vs, *gs], dws)
    assert all(map(torch.equal, many, single))
    assert all(map(torch.equal, found, wanted))
    for v, g, norm, scale in zip(vs, gs, norms, scales, strict=True):
        exact = v.detach().double().flatten(1).norm(dim=1) if v.dim() > 1 else v.detach().double().abs()
        torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
        expected = torch.where(exact == 0, 0.0, g.detach().double().flatten() / exact)
        torch.testing.assert_close(scale.double(), expected, rtol=1e-6, atol=0)
        assert not norm.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_some_outputs_and_inputs_without_gradients(backend):
    vs, gs = [torch.randn(3, 4) for _ in range(3)], [torch.ones(3) for _ in range(3)]
    vs[0].requires_grad_()
    with wnfused.use_backend(backend):
        first, _, _ = weight_norm_many(vs, gs)
        (found,) = torch.autograd.grad(first.sum(), vs[0])
        (wanted,) = torch.autograd.grad(weight_norm(vs[0], gs[0]).sum(), vs[0])
    assert torch.equal(found, wanted)


@needs_native
def test_one_call_of_the_kernel_for_all(monkeypatch):
    calls = []
    kernel = native.weight_norm_many
    monkeypatch.setattr(native, "weight_norm_many", lambda *a: calls.append(len(a[0])) or kernel(*a))
    vs, gs = layers_of_a_model()
    weight_norm_many(vs, gs)
    assert calls == [len(vs)]


def test_opcheck_of_lists():
    vs = [torch.randn(3, 4, requires_grad=True), torch.randn(2, 5, requires_grad=True)]
    gs = [torch.randn(3, 1, requires_grad=True), torch.randn(2, requires_grad=True)]
    opcheck(torch.ops.wnfused.weight_norm_many.default, (vs, gs))
    opcheck(torch.ops.wnfused.weight_norm_many.default, (vs, gs, 0, False))
    plain = [[t.detach() for t in tensors] for tensors in (vs, vs, gs)]
    opcheck(torch.ops.wnfused.weight_norm_many_backward.default, (*plain, [torch.ones(3), torch.ones(2)]))


def test_fullgraph_compile_of_many():
    vs, gs = [torch.randn(3, 4, requires_grad=True), torch.randn(2, 5)], [torch.ones(3, 1), torch.ones(2)]
    compiled = torch.compile(lambda: sum(w.square().sum() for w in weight_norm_many(vs, gs)), fullgraph=True)
    torch.testing.assert_close(compiled(), torch.tensor(5.0))


def test_wrong_lists_are_named():
    v, g = torch.randn(3, 4), torch.ones(3)
    assert weight_norm_many([], []) == []
    assert row_scales_many([], []) == ([], [])
    with pytest.raises(TypeError, match="vs: expected a list of tensors, got Tensor"):
        weight_norm_many(v, g)
    with pytest.raises(ValueError, match="gs: 1 gains do not fit 2 tensors vs"):
        weight_norm_many([v, v], [g])
    with pytest.raises(TypeError, match=r"vs\[1\]: expected a floating-point tensor, got torch.int64"):
        weight_norm_many([v, v.long()], [g, g])
    with pytest.raises(ValueError, match=r"g: shape \[4\] does not fit v of \[3, 4\].*number 1 of the lists"):
        weight_norm_many([v, v], [g, torch.ones(4)])


def test_many_leave_the_package_as_torchs_own_ops():
    class Normalised(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.v, self.g = torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.rand(3))

        def forward(self, x):
            return x @ weight_norm_many([self.v], [self.g])[0].T

    model, x = Normalised(), torch.randn(2, 4)
    exported = torch.export.export(model, (x,))
    assert "wnfused" not in str(exported.graph)
    torch.testing.assert_close(exported.module()(x), model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(model, x)
    assert "wnfused::" not in str(traced.graph)
    symbolic = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(symbolic(x), model(x))


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_many_weights_lie_as_their_fakes_say(backend, dim):
    """Compiled code asserts it: v contiguous, in channels_last of either kind, and permuted."""
    if backend == "native" and native.unavailable() is not None:
        pytest.skip("needs the C++ library")
    vs = [
        torch.randn(4, 3, 2, 5),
        torch.randn(4, 3, 2, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 3, 2, 2, 5).to(memory_format=torch.channels_last_3d),
        torch.randn(4, 3, 5).permute(2, 0, 1),
    ]
    gs = [torch.rand([] if dim is None else [v.shape[dim]]) for v in vs]
    with wnfused.use_backend(backend):
        w, norm, _ = torch.ops.wnfused.weight_norm_many(vs, gs, dim)
        dv, _ = torch.ops.wnfused.weight_norm_many_backward([torch.randn_like(t) for t in w], vs, gs, norm, dim)
    for v, *found in zip(vs, w, dv, strict=True):
        expected = torch.empty_like(v, memory_format=reference.suggest_memory_format(v)).stride()
        assert [t.stride() for t in found] == [expected, expected]
