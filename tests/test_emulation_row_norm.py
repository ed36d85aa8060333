"""The CUDA row-norm kernels, emulated on the host, against the float64 reference."""

import pytest
import torch
from emulator import Guarded, emulation, tensor_of

from wnfused import reference

# Shape, dim (None: one norm over the tensor): short and long rows, rows along every dim.
SHAPES = [((5, 7), 0), ((3, 4, 3, 3), 0), ((2, 2000), 0), ((6, 5), 1), ((3, 4, 5), 1), ((40, 2, 30), 1), ((7, 9), None)]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def module():
    return emulation()


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_emulation_row_norm(module, shape, dim, dtype, reverse):
    rows = 1 if dim is None else shape[dim]
    outer = 1 if dim is None else torch.Size(shape[:dim]).numel()
    inner = torch.Size(shape).numel() // (rows * outer)
    v, dw, g = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), (torch.rand(rows) + 0.5).to(dtype)
    if rows > 1:
        v.select(dim, 1).zero_()
    guarded = Guarded()
    arrays = [guarded.array(t) for t in (v, g, dw)]
    wide = reference.wide(dtype)
    w, dv, dg = guarded.output(v), guarded.output(v), guarded.output(g)
    norm = guarded.output(torch.empty(rows, dtype=wide))
    sizes = (outer, rows, inner, reverse)
    faults = module.row_norm(arrays[0], arrays[1], None, w, dg, norm, *sizes)
    faults += module.row_norm(arrays[0], arrays[1], arrays[2], dv, dg, norm, *sizes)
    assert faults + guarded.faults() == []

    # Every value is rounded once to its dtype; sums of a few hundred products in the wide type.
    tolerance = 2 * torch.finfo(dtype).eps + 8 * torch.finfo(wide).eps
    w_expected, norm_expected = reference.weight_norm(v.double(), g.double(), dim)
    expected = reference.weight_norm_backward(dw.double(), v.double(), g.double(), norm_expected, dim)
    for array, value in zip((w, norm, dv, dg), (w_expected, norm_expected.reshape(-1), *expected), strict=True):
        torch.testing.assert_close(
            tensor_of(array).double(), value.double(), rtol=tolerance, atol=tolerance * max(value.abs().max().item(), 1)
        )
