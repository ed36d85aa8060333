"""The CUDA row-norm kernels, emulated on the host, against the float64 reference."""

import pytest
import torch
from emulator import Guarded, emulation, tensor_of

from wnfused import reference

# Shape, dim (None: one norm over the tensor): short and long rows, rows along every dim; rows that several blocks
# share, the last shares shorter.
SHAPES = [
    ((5, 7), 0), ((3, 4, 3, 3), 0), ((2, 2000), 0), ((6, 5), 1), ((3, 4, 5), 1), ((40, 2, 30), 1), ((7, 9), None),
    ((2, 32769), 0), ((410, 2, 83), 1), ((3, 16411), None),
]  # fmt: skip
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


def test_few_long_rows_are_shared_and_many_or_short_ones_are_not(module):
    assert module.row_shares(1, 2**24) == 264  # two blocks for each multiprocessor of an H200
    assert module.row_shares(10, 2**20) == 27
    assert module.row_shares(3, 2**15) == 2
    assert module.row_shares(3, 2**15 - 1) == module.row_shares(264, 2**24) == module.row_shares(0, 0) == 1


@pytest.mark.parametrize("shape", [(2, 32769), (1, 50_000)], ids=str)
def test_shared_rows_have_the_same_bits_whichever_warp_goes_first(module, shape):
    v, g = torch.randn(shape), torch.rand(shape[0])
    results = []
    for reverse in (False, True):
        guarded = Guarded()
        w, norm = guarded.output(v), guarded.output(g)
        arguments = (guarded.array(v), guarded.array(g), None, w, guarded.output(g), norm, 1, *shape, reverse)
        assert module.row_norm(*arguments) + guarded.faults() == []
        results.append((tensor_of(w), tensor_of(norm)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_more_rows_than_a_grid_has_blocks_are_refused(module):
    """Cut to 32 bits their number would be 0, and nothing would run."""
    v = Guarded().array(torch.ones(4))
    assert module.row_norm(v, v, None, v, v, v, 1, 2**32, 1, False) == ["a launch of more blocks than a grid has"]
