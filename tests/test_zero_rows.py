"""A row of ``v`` that is zero has weights and gradients of 0 whatever its gain: what surrounds it must not notice."""

import functools
import math

import pytest
import torch
from torch import Tensor

import wnfused
from wnfused import functional as F

ROW = 3


def tensors(shapes, dtype):
    source = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=source).to(dtype) for shape in shapes]


def linear(samples, dtype):
    return [F.linear, tensors([(samples, 40), (24, 40), (24,)], dtype)]


def conv(function, x, v, rows, dtype, **options):
    return [functools.partial(function, **options), tensors([x, v, (rows,)], dtype)]


def stage(dtype):
    shapes = [(2, 16, 8, 8), (2, 2, 16), (2, 2, 16, 16, 3, 3), (2, 2, 16)]
    return [lambda x, bias, v, g: F.residual_stage(x, v, g, bias), tensors(shapes, dtype)]


def one_norm(dim, dtype):
    return [lambda v, g: F.weight_norm(v, g, dim), tensors([(8, 8, 3), (8,)], dtype)]


def many_norms(dim, dtype):
    return [lambda v, g: F.weight_norm_many([v], [g], dim)[0], tensors([(8, 8), (8,)], dtype)]


CASES = {
    **{f"linear, {n} samples": functools.partial(linear, n) for n in (1, 2, 4, 9, 17, 64)},
    "1x1 on 3x3": functools.partial(conv, F.conv2d, (1, 64, 3, 3), (64, 64, 1, 1), 64),
    "3x3 on 3x3": functools.partial(conv, F.conv2d, (1, 64, 3, 3), (64, 64, 3, 3), 64, padding=1),
    "3x3 on 8x8": functools.partial(conv, F.conv2d, (2, 16, 8, 8), (16, 16, 3, 3), 16, padding=1),
    "3x3 by 2": functools.partial(conv, F.conv2d, (2, 16, 9, 9), (32, 16, 3, 3), 32, stride=2),
    "depthwise": functools.partial(conv, F.conv2d, (2, 16, 9, 9), (16, 1, 3, 3), 16, groups=16),
    "grouped": functools.partial(conv, F.conv2d, (2, 16, 9, 9), (16, 4, 3, 3), 16, groups=4),
    "one dim": functools.partial(conv, F.conv1d, (2, 16, 40), (16, 16, 5), 16),
    "three dims": functools.partial(conv, F.conv3d, (1, 8, 5, 5, 5), (8, 8, 3, 3, 3), 8),
    "transposed": functools.partial(conv, F.conv_transpose2d, (1, 16, 5, 5), (16, 8, 4, 4), 16, stride=2),
    "stage": stage,
    "norm, dim 0": functools.partial(one_norm, 0),
    "norm, dim 1": functools.partial(one_norm, 1),
    "norms, dim 0": functools.partial(many_norms, 0),
    "norms, dim -1": functools.partial(many_norms, -1),
}


def outcome(make, gain, dtype):
    """The result, and its gradients, where a row is zero and has this gain."""
    function, given = make(dtype)
    *_, v, g = given
    if v.dim() == 6:
        v[1, 0, ROW], g[1, 0, ROW] = 0, gain
    else:
        v[ROW], g[ROW] = 0, gain
    if len(given) == 2:  # by whichever dim a case has its norms
        v[:, ROW] = 0
    given = [t.requires_grad_() for t in given]
    y: Tensor = function(*given)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y, *torch.autograd.grad(y, given, dy)]


def assert_unnoticed(name, gain, dtype):
    found, expected = (outcome(CASES[name], value, dtype) for value in (gain, 1.0))
    assert all(part.isfinite().all() for part in expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gain", [math.inf, math.nan])
@pytest.mark.parametrize("name", CASES)
def test_of_the_kernels(isa, name, gain, dtype):
    assert_unnoticed(name, gain, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_of_the_reference(name, dtype):
    with wnfused.use_backend("reference"):
        assert_unnoticed(name, -math.inf, dtype)
