"""Every op, on every backend and dtype, against the composite of torch's own ops in float64."""

import pytest
import torch
from samples import BY_NAME, SAMPLES, Sample
from torch.autograd import gradcheck, gradgradcheck

import wnfused
from wnfused import dispatch

BACKENDS = [name for name in ("native", "reference") if dispatch.backend_module(name).unavailable() is None]
by_name = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)


def runs(sample: Sample, backend: str, dtype: torch.dtype) -> bool:
    """The native stage has float32 and bfloat16; the choice between backends is tested elsewhere."""
    return not (backend == "native" and sample.name.startswith("stage") and dtype in (torch.float64, torch.float16))


def gradient_tolerance(sample: Sample, dtype: torch.dtype) -> float:
    """In two samples rounding to bfloat16 flips the mask of an output near 0, which is worth a whole term."""
    flips = dtype == torch.bfloat16 and sample.name in ("stage-last", "transpose2d")
    return 0.3 if flips else 3 * TOLERANCE[dtype]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1))


# Sums of at most K terms round by about sqrt(K) eps; the samples' K is below 100 and the chains at most six
# convolutions long. Half precision also rounds the operands.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


@by_name
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_values_and_gradients(sample, backend, dtype):
    if not runs(sample, backend, dtype):
        pytest.skip("the native stage has float32 and bfloat16")
    tensors = sample.tensors(dtype)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    with wnfused.use_backend(backend):
        y = sample.run(*tensors)
        weights = torch.randn(y.shape, dtype=torch.float64).to(dtype)
        gradients = torch.autograd.grad(y, tensors, weights)
    expected = sample.expected(*exact)
    assert y.dtype == dtype
    assert y.shape == expected.shape
    assert relative(y, expected) < TOLERANCE[dtype]
    for found, wanted, tensor in zip(
        gradients, torch.autograd.grad(expected, exact, weights.double()), tensors, strict=True
    ):
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert relative(found, wanted) < gradient_tolerance(sample, dtype)


@by_name
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_format_is_torchs_own(sample, backend):
    if not runs(sample, backend, torch.float32):
        pytest.skip("no such kernel")
    tensors = sample.tensors(torch.float32)
    with wnfused.use_backend(backend), torch.no_grad():
        y = sample.run(*tensors)
    assert y.stride() == sample.expected(*tensors).stride()


@by_name
@pytest.mark.parametrize("backend", BACKENDS)
def test_first_and_second_derivatives(sample, backend):
    if not runs(sample, backend, torch.float64):
        pytest.skip("no float64 stage in C++; its first derivatives are checked above")
    tensors = sample.tensors()
    with wnfused.use_backend(backend):
        assert gradcheck(sample.run, tensors, check_forward_ad=True, fast_mode=True)
        assert gradgradcheck(sample.run, tensors, fast_mode=True)


@by_name
def test_per_sample_gradients(sample):
    """``vmap`` over ``grad``, and forward mode under ``vmap``: through the reference."""
    tensors = [t.detach() for t in sample.tensors()]
    batch = torch.stack([tensors[0], 2 * tensors[0], tensors[0] - 1])

    def loss(first, run):
        return run(first, *tensors[1:]).square().sum()

    with wnfused.use_backend("reference"):
        found = torch.vmap(torch.func.grad(lambda x: loss(x, sample.run)))(batch)
        _, pushed = torch.vmap(lambda x: torch.func.jvp(lambda u: sample.run(u, *tensors[1:]), (x,), (x,)))(batch)
    expected = torch.vmap(torch.func.grad(lambda x: loss(x, sample.expected)))(batch)
    torch.testing.assert_close(found, expected)
    _, expected = torch.vmap(lambda x: torch.func.jvp(lambda u: sample.expected(u, *tensors[1:]), (x,), (x,)))(batch)
    torch.testing.assert_close(pushed, expected)


@by_name
def test_gradients_of_many_parameters_at_once(sample):
    """``vmap`` over ``grad`` with one tensor after the other batched, the rest the same for all: an ensemble's."""
    tensors = [t.detach() for t in sample.tensors()]

    def loss(run, place):
        return lambda t: run(*tensors[:place], t, *tensors[place + 1 :]).square().sum()

    for place in range(1, len(tensors)):
        batch = torch.stack([tensors[place], 0.5 * tensors[place] + 1])
        with wnfused.use_backend("reference"):
            found = torch.vmap(torch.func.grad(loss(sample.run, place)))(batch)
        expected = torch.vmap(torch.func.grad(loss(sample.expected, place)))(batch)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_aten_weight_norm_is_no_oracle_for_second_derivatives(backend):
    """Why the reference is our own: torch's fused op fails ``gradgradcheck``, ours passes."""
    v = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    g = torch.randn(3, 1, dtype=torch.float64, requires_grad=True)
    assert not gradgradcheck(lambda v, g: torch._weight_norm(v, g, 0), (v, g), raise_exception=False)
    with wnfused.use_backend(backend):
        assert gradgradcheck(wnfused.functional.weight_norm, (v, g))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_zero_rows_give_zeros_of_both_orders(backend, dtype):
    v = torch.randn(3, 4).to(dtype)
    v[1] = 0
    x, g = torch.randn(2, 4).to(dtype), torch.randn(3).to(dtype)
    for t in (v, g, x):
        t.requires_grad_()
    with wnfused.use_backend(backend):
        y = wnfused.functional.linear(x, v, g)
        first = torch.autograd.grad(y.sum(), (x, v, g), create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), (x, v, g))
        plain = torch.autograd.grad(wnfused.functional.linear(x, v, g).sum(), (x, v, g))
    assert (y[:, 1] == 0).all()
    for gradients in (first, second, plain):
        assert all(torch.isfinite(t).all() for t in gradients)
        assert (gradients[1][1] == 0).all()
        assert gradients[2][1] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("exponent", [-17, -9, 0, 9, 17])
def test_norms_are_right_over_float32s_range(backend, exponent):
    v = torch.randn(4, 33) * 10.0**exponent
    g = torch.rand(4) + 0.5
    with wnfused.use_backend(backend):
        w = wnfused.functional.weight_norm(v, g)
    torch.testing.assert_close(w.double().norm(dim=1), g.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("shape", "dim"), [((200_000, 2), 1), ((2, 3, 70_000), 1), ((300_000,), None)], ids=str)
def test_norms_of_long_rows_of_equal_entries(shape, dim, backend):
    # The roundings of a running sum of equal entries all go one way; the longest run has 512 and errs by 256 of them.
    v = torch.full(shape, 0.7)
    g = torch.ones(()) if dim is None else torch.ones(shape[dim])
    with wnfused.use_backend(backend):
        w = wnfused.functional.weight_norm(v, g, dim)
    spans = [d for d in range(v.dim()) if d != dim]
    error = w.double() * v.double().square().sum(spans, keepdim=True).sqrt() / v.double() - 1
    assert error.abs().max() < 64 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinities_and_nan_come_out_as_torch_gives_them(backend):
    x = torch.randn(4, 3, 5, 5)
    x[0, 0, 0, 0], x[1, 1, 2, 2], x[2, 2, 4, 4] = float("inf"), float("-inf"), float("nan")
    v, g = torch.randn(4, 3, 3, 3), torch.ones(4)
    for keywords in ({"padding": 1}, {"padding": 1, "activation": "relu"}):
        with wnfused.use_backend(backend):
            found = wnfused.functional.conv2d(x, v, g, **keywords)
        expected = BY_NAME["conv2d"].composite(x, v, g, **keywords)
        assert (torch.isnan(found) == torch.isnan(expected)).all()
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
@pytest.mark.parametrize("rows", [3, 40])
def test_gradients_of_an_activation_that_is_nan_are_torchs(rows, activation, backend):
    """NaN passes a ReLU and is scaled by the slope of a leaky one."""
    x, v, g, bias = torch.randn(rows, 17), torch.randn(9, 17), torch.rand(9), torch.randn(9)
    x[1, 4], bias[2] = float("nan"), float("nan")
    leaves = [t.requires_grad_() for t in (x, bias)]
    with wnfused.use_backend(backend):
        y = wnfused.functional.linear(x, v, g, bias, activation=activation, negative_slope=0.1)
        found = torch.autograd.grad(y, leaves, torch.ones_like(y))
    z = torch.nn.functional.linear(x, wnfused.functional.weight_norm(v, g), bias)
    y = torch.relu(z) if activation == "relu" else torch.nn.functional.leaky_relu(z, 0.1)
    for a, b in zip(found, torch.autograd.grad(y, leaves, torch.ones_like(y)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_the_same_for_any_number_of_threads(backend):
    v, g, dw = torch.randn(257, 1031), torch.rand(257), torch.randn(257, 1031)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            with wnfused.use_backend(backend):
                a, b = v.clone().requires_grad_(), g.clone().requires_grad_()
                w = wnfused.functional.weight_norm(a, b)
                found.append((w, *torch.autograd.grad(w, (a, b), dw)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_the_backward_runs_on_the_backend_of_its_forward():
    from unittest.mock import patch

    x, v, g = torch.randn(2, 4), torch.randn(3, 4, requires_grad=True), torch.ones(3)
    with wnfused.use_backend("reference"):
        y = wnfused.functional.linear(x, v, g)
    reference = dispatch.backend_module("reference")
    with patch.object(reference, "linear_backward", wraps=reference.linear_backward) as spy:
        y.sum().backward()
    assert spy.called


@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("name", ["conv", "conv_transpose"])
def test_every_convolution_tells_of_its_own_dims(name, spatial):
    text = getattr(wnfused.functional, f"{name}{spatial}d").__doc__
    assert f"[N, C_in, {', '.join('DHW'[-spatial:])}]" in text
    assert ("channels_last (_3d) is kept." in text) == (name == "conv" and spatial > 1)


def test_empty_batches_give_empty_outputs_and_zero_gradients():
    v = torch.randn(4, 3, 3, 3, requires_grad=True)
    g = torch.ones(4, requires_grad=True)
    for backend in BACKENDS:
        with wnfused.use_backend(backend):
            y = wnfused.functional.conv2d(torch.randn(0, 3, 8, 8), v, g, padding=1, activation="relu")
            assert list(y.shape) == [0, 4, 8, 8]
            dv, dg = torch.autograd.grad(y.sum(), (v, g))
            assert (dv == 0).all()
            assert (dg == 0).all()
            z = wnfused.functional.linear(torch.randn(0, 5), torch.randn(2, 5), torch.ones(2))
            assert list(z.shape) == [0, 2]
