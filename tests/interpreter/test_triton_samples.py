"""The whole table of samples through the public functions, on the fused kernels and on the vendor's product."""

import pytest
import torch
from samples import SAMPLES, Sample
from triton_cases import DEVICE, DTYPES, TOLERANCE, relative

import wnfused
from wnfused.backends.triton import strategy

LAYERS = [sample for sample in SAMPLES if not sample.name.startswith("stage")]


def clear_of_the_kink(sample: Sample, exact: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Where rounding cannot switch an activation."""
    z = sample.composite(*exact, **{**sample.keywords, "activation": None})
    return z.detach().abs() > TOLERANCE[dtype] * z.detach().abs().max()


@pytest.mark.parametrize("way", ["fused", "vendor"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("sample", LAYERS, ids=lambda sample: sample.name)
def test_values_gradients_and_memory_format(sample, dtype, way):
    tensors = [t.detach().to(DEVICE).requires_grad_() for t in sample.tensors(dtype)]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = sample.expected(*exact)
    dy = torch.randn(expected.shape, dtype=torch.float64, device=DEVICE).to(dtype)
    if "activation" in sample.keywords:
        dy = torch.where(clear_of_the_kink(sample, exact, dtype), dy, 0)
    with strategy.forced(way), wnfused.use_backend("triton"):
        y = sample.run(*tensors)
        gradients = torch.autograd.grad(y, tensors, dy)
    assert y.dtype == dtype
    assert y.stride() == sample.expected(*tensors).stride()
    errors = [relative(y, expected)]
    for found, wanted, tensor in zip(
        gradients, torch.autograd.grad(expected, exact, dy.double()), tensors, strict=True
    ):
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        errors.append(relative(found, wanted))
    assert max(errors) < TOLERANCE[dtype], errors


@pytest.mark.parametrize("name", ["linear-residual-leaky", "conv2d-relu-residual"])
def test_second_derivatives_come_from_the_reference(name):
    sample = next(sample for sample in SAMPLES if sample.name == name)
    tensors = [t.detach().to(DEVICE).requires_grad_() for t in sample.tensors(torch.float32)]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    found, expected = [], []
    for run, inputs, second in ((sample.run, tensors, found), (sample.expected, exact, expected)):
        with wnfused.use_backend("triton"):
            first = torch.autograd.grad(run(*inputs).square().sum(), inputs, create_graph=True)
        second += torch.autograd.grad(sum(t.square().sum() for t in first), inputs, materialize_grads=True)
    assert max(relative(a, b) / max(1, float(b.norm())) for a, b in zip(found, expected, strict=True)) < 1e-4


@pytest.mark.parametrize("name", ["linear-relu", "conv2d-last"])
def test_the_ops_contract_with_torch(name):
    """Schema, fake kernel and autograd registration agree with what the backend returns."""
    sample = next(sample for sample in SAMPLES if sample.name == name)
    x, v, g, b = (t.detach().to(DEVICE).requires_grad_() for t in sample.tensors(torch.float32))
    with wnfused.use_backend("triton"):
        if name.startswith("linear"):
            torch.library.opcheck(torch.ops.wnfused.linear.default, (x, v, g, b, None, 0, "relu", 0.01))
        else:
            geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
            torch.library.opcheck(torch.ops.wnfused.conv.default, (x, v, g, b, None, *geometry, 0, "none", 0.01))
